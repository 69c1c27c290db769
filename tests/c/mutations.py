"""Bugs planted in the simulator's copy of the sources. The tests check that the simulator finds each of them.

For the variant ``sim`` alone, build.py compiles copies of these files in which ``original`` is replaced by ``planted``.
``BUG`` is true there only while a test has armed the row's number (test_sim_mutations.c arms each in turn), so one
build contains all bugs. Spaces and line breaks count as one space. The build fails if an ``original`` does not occur
exactly once in its function: if you change such code, adapt the row so that it plants the same mistake.

Each world has one row, which shows that the world still finds mistakes. tests/mutate.py makes mutants of all code.

Rows with number 0 plant no bug: they insert ``POINT`` where another thread may run. Atomics need no such row: each is a
point (sim_atomic.h).
"""

import re
from dataclasses import dataclass

FEW, SOME, MANY = 300, 2000, 8000
"""Numbers of schedules of a world, starting with the first seed, within which a bug must be found."""


@dataclass(frozen=True)
class Mutation:
    """One planted bug, or a point if number is 0."""

    number: int
    file: str
    """Path below csrc/."""
    function: str
    what: str
    """Description of the mistake."""
    original: str
    planted: str
    world: str = ""
    """The world of sim_world.c that shows it."""
    schedules: int = 0


class MutationError(Exception):
    """A row does not match the sources."""


_T = "registry/caller.c"
_M, _C, _E = "registry/maintenance.c", "registry/cpu_allocator.c", "registry/remove.c"
_D, _X, _S = "registry/dispatch.c", "registry/ends.c", "registry/serve.c"
_L, _G = "registry/launch.c", "registry/governor.c"
_W, _P = "registry/sweep.c", "registry/worker.c"
_Q, _K = "registry/pool/queue.c", "registry/faults.c"

MUTATIONS = [
    Mutation(103, _T, "mp_ticket_cancel", "no request is cancelled",
             "!mp_ticket_is_orphan(ticket)", "!mp_ticket_is_orphan(ticket) && !BUG", "calls", FEW),
    Mutation(115, _T, "ticket_park", "the progress that a waiter waits for is not published",
             "if (seen + 1 < ticket->wait_at)", "if (!BUG && seen + 1 < ticket->wait_at)", "streams", FEW),
    Mutation(144, _M, "mp_maintenance_at", "the thread sleeps on", "else if (maintenance->running)",
             "else if (maintenance->running && !BUG)", "ticks", FEW),
    Mutation(145, _M, "mp_maintenance_at", "stop waits for a thread that was refused", "maintenance->running = false;",
             "if (!BUG) maintenance->running = false;", "faults", SOME),
    Mutation(153, _C, "give_back", "a waiter gets CPUs and is not notified", "mp_cond_signal(",
             "if (!BUG) mp_cond_signal(", "cores", FEW),
    Mutation(207, _E, "mp_entry_quit", "queued requests are forgotten when the registry closes",
             "mp_ticket *list = mp_entry_take_queue(entry, false);",
             "mp_ticket *list = BUG ? NULL : mp_entry_take_queue(entry, false);", "shutdown", SOME),
    Mutation(221, "registry/load.c", "mp_entry_load", "a model that is to be pinned is evicted before it is",
             "entry->pinned |= pin;", "entry->pinned |= pin && !BUG;", "evictions", SOME),
    Mutation(222, "registry/evict.c", "mp_entry_value", "a model whose workers are becoming idle counts as busy",
             "(soon && !idle)", "(soon && !idle && !BUG)", "reclaim", SOME),
    Mutation(228, _E, "find_abandonable", "a worker is abandoned while its CPUs are in transit",
             "&& !worker->moving", "&& (BUG || !worker->moving)", "cut", MANY),
    Mutation(180, _K, "mp_faults_step", "a request of several steps has no retry", "!refused &&",
             "!refused && !(BUG && atomic_load(&ticket->progress)) &&", "crashes", SOME),
    Mutation(225, _D, "mp_dispatch_choose", "the more loaded of two workers is chosen",
             "return at_first < at_second ? live[first] : live[second];",
             "return (at_first < at_second) != BUG ? live[first] : live[second];", "balance", SOME),
    Mutation(227, _D, "may_grow", "more workers start than allowed", "entry->worker_count >= most_workers(entry))",
             "(entry->worker_count >= most_workers(entry) && !BUG))", "cold", SOME),
    Mutation(208, _D, "mp_dispatch_predict", "the forecast starts no worker",
             "entry->worker_count >= mp_dispatch_predicted(", "BUG || entry->worker_count >= mp_dispatch_predicted(",
             "ahead", FEW),
    Mutation(231, _S, "requeue", "a request is lost between active list and queue",
             "mp_queue_push_front(&w->entry->queue, &ticket->node);",
             "if (!BUG) mp_queue_push_front(&w->entry->queue, &ticket->node);", "memory", SOME),
    Mutation(243, _L, "mp_entry_finalize", "a thread that waits for the end is not notified",
             "mp_cond_broadcast(&entry->changed);",
             "if (!BUG) mp_cond_broadcast(&entry->changed);", "swaps", SOME),
    Mutation(261, "registry/leave.c", "mp_worker_abandon", "the CPUs of an abandoned worker are lost", "if (threads)",
             "if (threads && !BUG)", "stuck", SOME),
    Mutation(265, _P, "mp_watch_check", "a jump of the clock abandons a worker", "if (passed > limit_ns / 2)",
             "if (passed > limit_ns / 2 && !BUG)", "jumps", SOME),
    Mutation(271, _G, "give_rest", "a reservation is never released", "mp_budget_end_load(guard->account);",
             "(void)(BUG || (mp_budget_end_load(guard->account), 0));", "thrash", FEW),
    Mutation(273, _G, "mp_governor_remove_reclaimer", "a reclaimer is removed while it is in use",
             "while (reclaimer->callers)",
             "while (reclaimer->callers && !BUG)", "governor", MANY),
    Mutation(291, "registry/pool/pool.c", "became_idle", "a thread counts as busy forever", "pool->busy--;",
             "pool->busy -= !BUG;", "pool", FEW),
    Mutation(303, _Q, "insert", "tenants share flows by the low bits of their numbers", "flows, node->tenant,",
             "flows, BUG ? node->tenant % 16 : node->tenant,", "tenants", FEW),
    Mutation(311, _W, "is_expired", "no sweep runs at a deadline", "if (due > clock_ns &&",
             "if (!BUG && due > clock_ns &&", "deadlines", FEW),
    Mutation(321, _K, "mp_breaker_ask", "more probes at once than allowed", "breaker->probing >= rule->probes",
             "breaker->probing >= rule->probes && !BUG", "flapping", SOME),
    Mutation(331, "registry/chaos.c", "chaos_retire", "the wrapped engine keeps the item",
             "inner->ops->retire(inner, item);", "if (!BUG) inner->ops->retire(inner, item);", "chaos", FEW),
    Mutation(351, _X, "mp_entry_wake", "a new mask wakes no worker",
             "if (ticket->worker)", "if (ticket->worker && !BUG)", "masks", FEW),
    Mutation(361, _S, "fail_item", "the progress of a request that can continue is lost",
             "if (ticket->item.request->resumable) {",
             "if (ticket->item.request->resumable && !BUG) {", "lost", FEW),
    Mutation(371, _K, "mp_faults_step", "external kills open the breaker", "if (!external_kill && !faults->had_fault",
             "if ((!external_kill || BUG) && !faults->had_fault", "kills", SOME),
    # --- points
    Mutation(0, "base/alloc.c", "take_free", "between check and update", "uint64_t limit =",
             "POINT; uint64_t limit ="),
    Mutation(0, "base/alloc.c", "take_free", "between update and check", "*now_used = used + bytes;",
             "POINT; *now_used = used + bytes;"),
    Mutation(0, "base/alloc.c", "mp_budget_reserve", "between update and check", "if (is_within(budget, reserved))",
             "POINT; if (is_within(budget, reserved))"),
    Mutation(0, "base/alloc.c", "mp_budget_give", "", "uint64_t before =", "POINT; uint64_t before ="),
    Mutation(0, "registry/shared.h", "mp_shared_lock", "it spins", "mp_cpu_relax();", "POINT;"),
]


def _function(text: str, name: str, where: str) -> tuple[int, int]:
    """Returns the begin and end of a function's definition. Functions begin and end in the first column."""
    found = [m for m in re.finditer(rf"^[a-z_].*\b{name}\((?:[^;{{]|\n)*\{{$", text, re.MULTILINE)]
    if len(found) != 1:
        raise MutationError(f"{where}: the function is defined {len(found)} times")
    return found[0].start(), text.index("\n}\n", found[0].start()) + 2


def plant(file: str, text: str, rows: list[Mutation]) -> str:
    """Plants the rows of a file and returns its text. Lines keep their numbers.

    Raises:
        MutationError: a row does not fit; the message says what to do.
    """
    changes: list[tuple[int, int, str]] = []
    for row in rows:
        where = f"tests/c/mutations.py: row {row.number} ({row.what}) of csrc/{file}, {row.function}()"
        begin, end = _function(text, row.function, where)
        pattern = r"(?:\s|/\*.*?\*/)+".join(map(re.escape, row.original.split()))  # comments may change
        hits = list(re.finditer(pattern, text[begin:end]))
        if len(hits) != 1:
            raise MutationError(f"{where}: `{row.original}` occurs {len(hits)} times, must occur once: adapt "
                                "the row to the changed code")
        planted = re.sub(r"\bBUG\b", f"sim_mutation({row.number})", row.planted)
        planted = re.sub(r"\bPOINT\b", "sim_yield()", planted)
        if planted == row.planted:
            raise MutationError(f"{where}: `planted` contains neither BUG nor POINT")
        hit = hits[0]
        changes.append((begin + hit.start(), begin + hit.end(), planted + "\n" * hit.group().count("\n")))
    changes.sort()
    for (_, before, _), (after, _, planted) in zip(changes, changes[1:]):
        if after < before:
            raise MutationError(f"tests/c/mutations.py: two rows of csrc/{file} change the same code: {planted}")
    for begin, end, planted in reversed(changes):
        text = text[:begin] + planted + text[end:]
    return text


def planted_files() -> dict[str, list[Mutation]]:
    """Returns the rows by file."""
    files: dict[str, list[Mutation]] = {}
    numbers = [row.number for row in MUTATIONS if row.number]
    for number in numbers:
        if numbers.count(number) > 1:
            raise MutationError(f"tests/c/mutations.py: {number} is used twice")
    for row in MUTATIONS:
        files.setdefault(row.file, []).append(row)
    return files


def table() -> str:
    """Returns the text that test_sim_mutations.c includes: number, world, schedules, file, what."""
    return "".join(f'MP_MUTATION({row.number}, "{row.world}", {row.schedules}, "{row.file}", "{row.what}")\n'
                   for row in MUTATIONS if row.number)
