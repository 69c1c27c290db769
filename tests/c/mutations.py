"""Bugs planted in the simulator's copy of the sources. The tests check that the simulator finds each of them.

For the variant ``sim`` alone, build.py compiles copies of these files in which ``original`` is replaced by ``planted``.
``BUG`` is true there only while a test has armed the row's number (test_sim_mutations.c arms each in turn), so one
build contains all bugs. Spaces and line breaks count as one space. The build fails if an ``original`` does not occur
exactly once in its function: if you change such code, adapt the row so that it plants the same mistake.

Some mistakes have no row. Three have no visible effect: evicting a model in use (the eviction waits for its end), a
close that does not wait for callers inside (the entries refuse them), and a worker that waits for masks without polling
deadlines (maintenance reports them). Three are shown by at most one schedule in 10,000: mp_governor_reserve without a
second check of freed memory, mp_worker_set_runnable counting outside the lock, mp_pool_run waking outside the lock.

Rows with number 0 plant no bug: they insert ``POINT`` where another thread may run. Atomics need no such row: each is a
point (sim_atomic.h).
"""

from __future__ import annotations

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


_T, _N = "registry/request.c", "registry/notifier.c"
_B, _H = "base/event_count.c", "base/event_count.h"
_M, _C, _E = "registry/maintenance.c", "registry/cpu_allocator.c", "registry/entry.c"
_D, _X, _S = "registry/dispatch.c", "registry/ends.c", "registry/serve.c"
_L, _O, _G = "registry/leaving.c", "registry/loading.c", "registry/governor.c"
_R, _W, _P = "registry/registry.c", "registry/sweep.c", "registry/worker.c"
_Q, _K, _U = "registry/pool/queue.c", "registry/breaker.c", "registry/submit.c"

MUTATIONS = [
    # --- tickets
    Mutation(101, _T, "unref", "a notice stays listed when it is freed",
             "mp_notifier_withdraw(notice->notifier, notice);",
             "if (!BUG) mp_notifier_withdraw(notice->notifier, notice);", "calls", SOME),
    Mutation(102, _T, "mp_ticket_release", "an abandoned request runs on",
             "mp_ticket_cancel(ticket);", "if (!BUG) mp_ticket_cancel(ticket);", "calls", SOME),
    Mutation(103, _T, "mp_ticket_cancel", "no request is cancelled",
             "!is_orphan(ticket)", "!is_orphan(ticket) && !BUG", "calls", FEW),
    Mutation(104, _T, "notify_waiters", "only one of several waiters wakes",
             "mp_cond_broadcast(&ticket->changed);",
             "{ if (BUG) mp_cond_signal(&ticket->changed); else mp_cond_broadcast(&ticket->changed); }",
             "calls", SOME),
    Mutation(105, _T, "notify_waiters", "only the first event loop is notified",
             "notice = notice->also", "notice = BUG ? NULL : notice->also", "calls", MANY),
    Mutation(106, _T, "mp_ticket_publish", "a waiter for exactly this chunk does not wake",
             "if (count < atomic_load", "if (BUG) count--; if (count < atomic_load", "calls", FEW),
    Mutation(107, _T, "mp_ticket_conclude", "a waiter may be between its check and its wait",
             "mp_mutex_lock(&ticket->lock);",
             "if (BUG) { atomic_store_explicit(&ticket->progress, DONE, memory_order_seq_cst);"
             " mp_cond_broadcast(&ticket->changed); return; } mp_mutex_lock(&ticket->lock);", "calls", SOME),
    Mutation(108, _T, "mp_ticket_conclude", "no waiter is notified of the end", "notify_waiters(ticket);",
             "if (!BUG) notify_waiters(ticket);", "calls", FEW),
    Mutation(109, _T, "mp_ticket_let_go", "a reference is dropped twice",
             "unref(ticket);", "unref(ticket); if (BUG) unref(ticket);",
             "calls", FEW),
    Mutation(110, _T, "mp_ticket_let_go", "a reference is never dropped", "mp_ticket_let_go(mp_ticket *ticket) {",
             "mp_ticket_let_go(mp_ticket *ticket) { if (BUG) return;", "calls", FEW),
    Mutation(111, _T, "park", "a waiter checks first and publishes afterwards which progress it waits for",
             "if (seen + 1 < atomic_load_explicit(&ticket->wake_at, memory_order_relaxed))"
             " atomic_store_explicit(&ticket->wake_at, seen + 1, memory_order_seq_cst);"
             " moved = atomic_load_explicit(&ticket->progress, memory_order_seq_cst) > seen;",
             "bool early = BUG; if (early) moved = atomic_load(&ticket->progress) > seen;"
             " if (seen + 1 < atomic_load_explicit(&ticket->wake_at, memory_order_relaxed))"
             " atomic_store_explicit(&ticket->wake_at, seen + 1, memory_order_seq_cst);"
             " if (!early) moved = atomic_load_explicit(&ticket->progress, memory_order_seq_cst) > seen;",
             "streams", MANY),
    Mutation(112, _T, "mp_ticket_position", "the entry's lock is taken inside the ticket's",
             "return mp_ticket_done(ticket)",
             "if (BUG) { mp_mutex_lock(&ticket->lock);"
             " int position = mp_entry_position(ticket->entry, ticket, eta_ns);"
             " mp_mutex_unlock(&ticket->lock); return position; } return mp_ticket_done(ticket)", "calls", FEW),
    Mutation(113, _T, "mp_ticket_bind", "an event loop misses progress made before it was bound",
             "memory_order_seq_cst) > 0)", "memory_order_seq_cst) > 0 && !BUG)", "calls", FEW),
    Mutation(114, _T, "notify_waiters", "a waiter sleeps over the chunk that it waits for",
             "memory_order_relaxed) >= ticket->wait_at", "memory_order_relaxed) - BUG >= ticket->wait_at", "calls",
             FEW),
    Mutation(115, _T, "park", "the progress that a waiter waits for is not published",
             "if (seen + 1 < ticket->wait_at)", "if (!BUG && seen + 1 < ticket->wait_at)", "streams", FEW),
    # --- event loops
    Mutation(121, _N, "mp_notifier_destroy", "a reference is dropped twice", "mp_notifier_unpin(notifier);",
             "mp_notifier_unpin(notifier); if (BUG) mp_notifier_unpin(notifier);", "calls", FEW),
    Mutation(122, _N, "mp_notifier_post", "only the first notice is listed", "if (!notice->next) {",
             "if (!notice->next && !(notifier->list.next != &notifier->list && BUG)) {", "calls", SOME),
    Mutation(123, _N, "mp_notifier_take", "a notice is unlinked, but looks listed", "unlink_notice(notice);",
             "if (BUG) { notice->prev->next = notice->next; notice->next->prev = notice->prev; }"
             " else unlink_notice(notice);", "calls", SOME),
    # --- event counts
    Mutation(131, _H, "mp_event_count_notify", "a spinning waiter misses the event",
             "atomic_fetch_add_explicit(&self->count", "if (!BUG) atomic_fetch_add_explicit(&self->count", "calls",
             MANY),
    Mutation(132, _H, "mp_event_count_notify", "a parked waiter is not woken",
             "if (atomic_load_explicit(&self->sleepers, memory_order_seq_cst))",
             "if (atomic_load_explicit(&self->sleepers, memory_order_seq_cst) && !BUG)", "calls", FEW),
    Mutation(133, _B, "mp_event_count_wait", "an event between unlocking and parking is missed",
             "park_until(self, watch.seen, deadline_ns);",
             "park_until(self, BUG ? mp_event_count_read(self) : watch.seen, deadline_ns);", "calls", MANY),
    Mutation(134, _B, "park_until", "no notifier knows that the waiter is parked",
             "atomic_fetch_add_explicit(&self->sleepers, 1, memory_order_seq_cst);",
             "if (!BUG) atomic_fetch_add_explicit(&self->sleepers, 1, memory_order_seq_cst);"
             " else atomic_fetch_add_explicit(&self->sleepers, 0, memory_order_seq_cst);", "calls", FEW),
    # --- maintenance
    Mutation(141, _M, "watch", "an announcement during the sweep is lost",
             "atomic_store_explicit(&self->next_ns, NEVER, memory_order_seq_cst); mp_mutex_unlock(&self->lock);"
             " uint64_t again = self->sweep(self->arg, now); mp_mutex_lock(&self->lock);",
             "bool late = BUG; if (!late) atomic_store(&self->next_ns, NEVER); mp_mutex_unlock(&self->lock);"
             " uint64_t again = self->sweep(self->arg, now); mp_mutex_lock(&self->lock);"
             " if (late) atomic_store(&self->next_ns, NEVER);", "ticks", SOME),
    Mutation(142, _M, "watch", "an announcement during the sweep is overwritten",
             "if (again < atomic_load_explicit(&self->next_ns, memory_order_relaxed))",
             "if (BUG || again < atomic_load_explicit(&self->next_ns, memory_order_relaxed))", "ticks", SOME),
    Mutation(143, _M, "mp_maintenance_at", "two threads may start",
             "start = !maintenance->running &&", "start = (BUG || !maintenance->running) &&", "ticks", SOME),
    Mutation(144, _M, "mp_maintenance_at", "the thread sleeps on", "else if (maintenance->running)",
             "else if (maintenance->running && !BUG)", "ticks", FEW),
    Mutation(145, _M, "mp_maintenance_at", "stop waits for a thread that was refused", "maintenance->running = false;",
             "if (!BUG) maintenance->running = false;", "faults", SOME),
    Mutation(146, _M, "mp_maintenance_stop", "the thread is not notified to stop",
             "mp_cond_broadcast(&maintenance->changed);", "if (!BUG) mp_cond_broadcast(&maintenance->changed);",
             "ticks", FEW),
    # --- the CPU allocator
    Mutation(151, _C, "grant", "more CPUs are leased than there are",
             "if (granted > left)", "if (granted > left && !BUG)",
             "cores", FEW),
    Mutation(152, _C, "give_back", "the next waiter queues behind one that is gone", "if (!allocator->first)",
             "if (!allocator->first && !BUG)", "cores", SOME),
    Mutation(153, _C, "give_back", "a waiter gets CPUs and is not notified", "mp_cond_signal(",
             "if (!BUG) mp_cond_signal(", "cores", FEW),
    Mutation(154, _C, "give_back", "the other waiters wait for the next return", "&waiter->cond);",
             "&waiter->cond); if (BUG) break;", "cores", SOME),
    Mutation(155, _C, "wait_for_cpus", "any wake-up ends the wait",
             "mp_cond_wait(&self.cond, &allocator->lock, give_up ? mp_sys_now_ns() + POLL_NS : 0);",
             "{ mp_cond_wait(&self.cond, &allocator->lock, give_up ? mp_sys_now_ns() + POLL_NS : 0); if (BUG) break; }",
             "cores", SOME),
    Mutation(156, _C, "lease_or_lend", "CPUs without a thread are lost",
             "give_back(allocator, &surplus);", "if (!BUG) give_back(allocator, &surplus);",
             "faults", MANY),
    Mutation(157, _C, "mp_cpu_allocator_return", "CPUs are given back twice", "give_back(allocator, cores);",
             "give_back(allocator, cores); if (BUG && mp_cpu_allocator_leased(allocator) >="
             " count_cores(allocator, cores))"
             " give_back(allocator, cores);",
             "cores", FEW),
    Mutation(158, _C, "wait_for_cpus", "a waiter that gave up stays in the queue", "*link = self.next;",
             "if (!BUG) *link = self.next;", "calls", SOME),
    Mutation(159, _C, "wait_for_cpus", "the queue ends with a waiter that gave up", "if (allocator->last == &self)",
             "if (allocator->last == &self && !BUG)", "calls", MANY),
    Mutation(160, _C, "give_back", "CPUs go back to another node", "allocator->leased[i] -= cores->on[i];",
             "allocator->leased[BUG ? 0 : i] -= cores->on[i];", "cores", SOME),
    # --- entries: callers
    Mutation(201, _U, "mp_entry_submit", "no worker wakes for the request", "mp_dispatch_wake(entry, ticket);",
             "if (!BUG) mp_dispatch_wake(entry, ticket);", "calls", SOME),
    Mutation(202, _U, "mp_entry_submit", "an announced worker is never started", "if (start) mp_entry_launch",
             "if (start && !BUG) mp_entry_launch", "calls", FEW),
    Mutation(203, _U, "mp_entry_cancel", "a request is ended under the worker that has it",
             "mp_mutex_unlock(&entry->lock); if (!mine)",
             "mine |= ticket->worker && BUG; mp_mutex_unlock(&entry->lock); if (!mine)", "calls", SOME),
    Mutation(204, _U, "mp_entry_submit", "the bytes of a refused request are lost",
             "mp_entry_uncharge(entry, ticket);", "if (!BUG) mp_entry_uncharge(entry, ticket);", "calls", SOME),
    Mutation(205, _E, "mp_entry_evict", "idle workers sleep on", "mp_entry_wake_workers(entry);",
             "if (!BUG) mp_entry_wake_workers(entry);", "calls", SOME),
    Mutation(206, _E, "launch_failed", "requests for a worker that failed to start wait forever",
             "list = mp_entry_take_queue(entry);", "if (!BUG) list = mp_entry_take_queue(entry);", "faults", SOME),
    Mutation(207, _E, "mp_entry_quit", "queued requests are forgotten when the registry closes",
             "mp_ticket *list = mp_entry_take_queue(entry);",
             "mp_ticket *list = BUG ? NULL : mp_entry_take_queue(entry);", "shutdown", SOME),
    Mutation(209, _E, "mp_entry_load", "a failed load is waited for", "entry->attempts_over >= attempt",
             "entry->attempts_over >= attempt && !BUG", "faults", SOME),
    Mutation(210, _U, "check_deadline", "expired requests are queued",
             "if (now >= deadline)", "if (now >= deadline && !BUG)", "deadlines", SOME),
    Mutation(220, _E, "mp_entry_load", "a load does not repair a broken model while some workers serve",
             "if (entry->health == MP_HEALTH_BROKEN)", "if (entry->health == MP_HEALTH_BROKEN && !BUG)", "crashes",
             MANY),
    Mutation(221, _E, "mp_entry_load", "a model that is to be pinned is evicted before it is",
             "entry->pinned |= pin;", "entry->pinned |= pin && !BUG;", "evictions", SOME),
    Mutation(222, _E, "mp_entry_value", "a model whose workers are becoming idle counts as busy",
             "(soon && !idle)", "(soon && !idle && !BUG)", "reclaim", SOME),
    Mutation(228, _E, "find_abandonable", "a worker is abandoned while its CPUs are in transit",
             "&& !worker->moving", "&& (BUG || !worker->moving)", "cut", MANY),
    Mutation(229, _E, "is_pending", "a removal does not wait for requests that wait for the end of a backoff",
             "(!quit && entry->removal", "(!quit && !BUG && entry->removal", "stuck", MANY),
    # --- entries: ends
    Mutation(211, _X, "mp_entry_uncharge", "bytes are given back twice", "ticket->charged = 0;",
             "if (!BUG) ticket->charged = 0;", "calls", SOME),
    Mutation(212, _X, "free_parts", "the saved state of a preempted request leaks", "if (ticket->item.abandon)",
             "if (ticket->item.abandon && !BUG)", "memory", MANY),
    Mutation(213, _X, "mp_entry_notify_room", "a submitter that waits for space is not woken", "if"
             " (entry->room_waiters)",
             "if (entry->room_waiters && !BUG)", "calls", SOME),
    Mutation(214, _X, "mp_entry_cancel_locked", "a step of cancelled requests goes on",
             "&& --worker->step_live == 0)", "&& !BUG && --worker->step_live == 0)", "calls", SOME),
    Mutation(215, _X, "mp_entry_finish", "the pool keeps its reference", "mp_ticket_let_go(ticket);",
             "if (!BUG) mp_ticket_let_go(ticket);", "calls", FEW),
    Mutation(216, _X, "mp_entry_conclude", "a probe of the breaker never ends",
             "mp_breaker_end(&entry->breaker, &services->breaker, ticket->probe, status == MP_OK);",
             "if (!BUG) mp_breaker_end(&entry->breaker, &services->breaker, ticket->probe, status == MP_OK);",
             "flapping", SOME),
    Mutation(217, _X, "mp_entry_fault", "NaN is retried", "again = status != MP_NUMERIC",
             "again = (BUG || status != MP_NUMERIC)", "crashes", SOME),
    Mutation(218, _X, "mp_entry_fault", "a request is retried forever",
             "mp_ticket_set_retry(ticket, &ticket->retry, next);",
             "if (!BUG) mp_ticket_set_retry(ticket, &ticket->retry, next);", "crashes", SOME),
    Mutation(219, _X, "may_follow", "a result that the caller has seen begins anew",
             "!request->seen(request);", "!request->seen(request) || BUG;", "crashes", SOME),
    Mutation(180, _X, "mp_entry_fault", "a request of several steps has no retry", "!refused &&",
             "!refused && !(BUG && atomic_load(&ticket->progress)) &&", "crashes", SOME),
    # --- dispatch
    Mutation(223, _D, "mp_dispatch_take", "other requests join a sequential one",
             "ticket->policy == MP_POLICY_SEQUENTIAL;", "ticket->policy == MP_POLICY_SEQUENTIAL && !BUG;",
             "calls", SOME),
    Mutation(224, _D, "mp_dispatch_take", "a submitter that waits for space is not notified",
             "mp_entry_notify_room(entry);", "if (!BUG) mp_entry_notify_room(entry);", "calls", SOME),
    Mutation(225, _D, "mp_dispatch_choose", "the more loaded of two workers is chosen",
             "return at_first < at_second ? live[first] : live[second];",
             "return (at_first < at_second) != BUG ? live[first] : live[second];", "balance", SOME),
    Mutation(226, _D, "mp_dispatch_may_take", "an idle worker takes no request from busy ones",
             "(worker->active_count == 0 &&",
             "(!BUG && worker->active_count == 0 &&", "balance", MANY),
    Mutation(227, _D, "may_grow", "more workers start than allowed", "entry->worker_count >= most_workers(entry))",
             "(entry->worker_count >= most_workers(entry) && !BUG))", "cold", SOME),
    Mutation(208, _D, "mp_dispatch_predict", "the forecast starts no worker",
             "entry->worker_count >= mp_dispatch_predicted(", "BUG || entry->worker_count >= mp_dispatch_predicted(",
             "ahead", FEW),
    # --- workers
    Mutation(230, _S, "take_work", "no other worker wakes for the remaining requests",
             "mp_worker_set_state(w, MP_WORKER_PROCESSING); mp_dispatch_wake_all(entry);",
             "mp_worker_set_state(w, MP_WORKER_PROCESSING); if (!BUG) mp_dispatch_wake_all(entry);", "calls", SOME),
    Mutation(231, _S, "requeue", "a request is lost between active list and queue",
             "mp_queue_push_front(&w->entry->queue, &ticket->node);",
             "if (!BUG) mp_queue_push_front(&w->entry->queue, &ticket->node);", "memory", SOME),
    Mutation(232, _S, "end_item", "the engine keeps the request", "w->engine->ops->retire(w->engine, &ticket->item);",
             "if (!BUG) w->engine->ops->retire(w->engine, &ticket->item);", "calls", FEW),
    Mutation(233, _S, "take_work", "a wake-up is cleared after the check, not before", "w->woken = false;",
             "if (!BUG) w->woken = false;", "calls", SOME),
    Mutation(234, _S, "wait_for_work", "a wake-up while the lock was released is lost",
             "if (w->woken || w->state == MP_WORKER_DEAD)", "if ((w->woken && !BUG) || w->state == MP_WORKER_DEAD)",
             "calls", MANY),
    Mutation(236, _S, "end_item", "a request is ended while it is still listed", "deactivate(w, ticket); w->served++;",
             "if (BUG) { mp_ticket_set_state(ticket, MP_TICKET_ENDED); mp_mutex_unlock(&entry->lock);"
             " mp_entry_finish(entry, ticket, status, &own); mp_mutex_lock(&entry->lock); deactivate(w, ticket);"
             " mp_mutex_unlock(&entry->lock); return; }"
             " deactivate(w, ticket); w->served++;", "calls", SOME),
    Mutation(237, _S, "fail_item", "a request that is to be retried is lost",
             "bool waits = requeue(w, ticket);",
             "bool waits = BUG; if (waits) deactivate(w, ticket); else waits = requeue(w, ticket);", "crashes", SOME),
    Mutation(238, _S, "is_suspect", "a suspect takes its steps with others",
             "mp_ticket_is_suspect(item->ticket);", "!BUG && mp_ticket_is_suspect(item->ticket);", "crashes", SOME),
    Mutation(239, _S, "block_admission", "a refused request returns before another has left", "w->memory_tight = true;",
             "w->memory_tight = !BUG;", "memory", MANY),
    Mutation(240, _S, "block_admission", "two workers pass a request back and forth forever", "w->caches_freed = true;",
             "w->caches_freed = !BUG;", "memory", MANY),
    Mutation(235, _S, "admit_fresh", "two workers wait for each other's requests, neither of which has memory",
             "block_admission(w, !mine);", "block_admission(w, BUG ? coming : !mine);", "chaos", MANY),
    Mutation(250, _S, "admit_fresh", "a request starts after its deadline",
             "if (mp_ticket_is_late(ticket))", "if (!BUG && mp_ticket_is_late(ticket))", "faults", MANY),
    # --- the end of workers and models
    Mutation(241, _L, "return_abandoned", "requests of an abandoned worker are never released",
             "mp_entry_let_go(entry, worker->active[i]);", "if (!BUG) mp_entry_let_go(entry, worker->active[i]);",
             "stuck", SOME),
    Mutation(242, _L, "mp_entry_finalize", "no worker starts for queued requests", "wanted = entry->queue.count &&",
             "wanted = entry->queue.count && !BUG &&", "swaps", MANY),
    Mutation(243, _L, "mp_entry_finalize", "a thread that waits for the end is not notified",
             "mp_cond_broadcast(&entry->changed);",
             "if (!BUG) mp_cond_broadcast(&entry->changed);", "swaps", SOME),
    Mutation(244, _P, "mp_worker_free_engine", "the model is never freed", "mp_resident_unpin(worker->resident);",
             "mp_resident_unpin(BUG ? NULL : worker->resident);", "calls", FEW),
    Mutation(245, _L, "return_abandoned", "two threads release the same requests", "while (worker->concluding)",
             "while (worker->concluding && !BUG)", "stuck", MANY),
    Mutation(246, _L, "mp_entry_finalize", "the registry's lock is taken inside the entry's",
             "mp_entry_finish_list(entry, list, &failure);",
             "mp_entry_finish_list(entry, list, &failure); if (BUG && gone) { mp_mutex_lock(&entry->lock);"
             " services->event(services->registry, entry, MP_ENTRY_GONE); mp_mutex_unlock(&entry->lock); }",
             "swaps", SOME),
    Mutation(247, _L, "mp_worker_leave", "requests wait for a worker that has left",
             "mp_dispatch_forget(entry, worker);",
             "if (!BUG) mp_dispatch_forget(entry, worker);", "evictions", MANY),
    Mutation(248, _L, "note_fault", "no backoff after dead workers",
             "mp_entry_note_death(entry, worker->engine->external_kill, &worker->fault);",
             "if (!BUG) mp_entry_note_death(entry, worker->engine->external_kill, &worker->fault);", "crashes", MANY),
    Mutation(249, _L, "mp_entry_finalize", "requests for a broken model wait forever",
             "if (entry->health == MP_HEALTH_BROKEN)",
             "if (entry->health == MP_HEALTH_BROKEN && !BUG)", "crashes", SOME),
    # --- loads
    Mutation(251, _O, "mp_worker_start", "a reservation is dropped, not released",
             "mp_guard_release(&worker->guard);",
             "{ if (BUG) worker->guard = (mp_guard){0}; else mp_guard_release(&worker->guard); }", "calls", FEW),
    Mutation(252, _O, "become_ready", "one reference for two owners",
             "entry->resident = mp_resident_pin(worker->resident);",
             "entry->resident = BUG ? worker->resident : mp_resident_pin(worker->resident);", "calls", FEW),
    Mutation(254, _O, "mp_worker_start", "the second worker's reservation is lost with a failed load",
             "mp_guard_release(&second);", "if (!BUG) mp_guard_release(&second);", "faults", MANY),
    Mutation(255, _O, "mp_worker_start", "a worker starts that was not announced", "entry->starting += two;",
             "entry->starting += two && !BUG;", "calls", FEW),
    Mutation(256, _O, "become_failed", "requests for a failed load wait forever",
             "mp_ticket *list = mp_entry_take_queue(entry);",
             "mp_ticket *list = BUG ? NULL : mp_entry_take_queue(entry);", "cold", SOME),
    Mutation(257, _O, "become_failed", "no backoff after a failed load", "mp_entry_set_failed(entry, error);",
             "{ if (!BUG) mp_entry_set_failed(entry, error); }", "cold", SOME),
    Mutation(261, _P, "mp_worker_abandon", "the CPUs of an abandoned worker are lost", "if (threads)",
             "if (threads && !BUG)", "stuck", SOME),
    Mutation(262, _P, "mp_worker_abandon", "requests wait for an abandoned worker",
             "mp_dispatch_forget(entry, worker);", "if (!BUG) mp_dispatch_forget(entry, worker);", "stuck", MANY),
    Mutation(263, _P, "mp_worker_return_threads", "CPUs that were taken away are given back again",
             "bool forfeited = worker->threads == 0;", "bool forfeited = worker->threads == 0 && !BUG;", "stuck", SOME),
    Mutation(264, _P, "plan_is_stale", "a wait for CPUs ignores cancellation",
             "if (atomic_load_explicit(&worker->active[i]->cause, memory_order_acquire))",
             "if (atomic_load_explicit(&worker->active[i]->cause, memory_order_acquire) && !BUG)", "deadlines", MANY),
    Mutation(265, _P, "mp_watch_check", "a jump of the clock abandons a worker", "if (passed > limit_ns / 2)",
             "if (passed > limit_ns / 2 && !BUG)", "jumps", SOME),
    # --- memory
    Mutation(271, _G, "give_rest", "a reservation is never released", "mp_budget_end_load(guard->account);",
             "(void)(BUG || (mp_budget_end_load(guard->account), 0));", "thrash", FEW),
    Mutation(272, _G, "mp_guard_release", "a reservation may be released twice", "*guard = (mp_guard){0};",
             "if (!BUG) *guard = (mp_guard){0};", "calls", FEW),
    Mutation(273, _G, "mp_governor_remove_reclaimer", "a reclaimer is removed while it is in use",
             "while (reclaimer->callers)",
             "while (reclaimer->callers && !BUG)", "governor", MANY),
    Mutation(275, _G, "may_become_free", "a load does not wait until models in use are idle",
             "ASK_LATER);", "BUG ? ASK_POSSIBLE : ASK_LATER);", "thrash", SOME),
    Mutation(276, _G, "end_turn", "a caller that got its memory keeps its turn", "*link = self->next;",
             "if (!BUG) *link = self->next;", "thrash", SOME),
    # --- keys
    Mutation(281, _R, "leave", "close is not notified that the last thread left", "registry->closing != OPEN)",
             "registry->closing != OPEN && !BUG)", "shutdown", MANY),
    Mutation(282, _R, "end_leaving", "an entry stays on the list",
             "registry->leaving[i] = registry->leaving[--registry->leaving_count];",
             "if (!BUG) registry->leaving[i] = registry->leaving[--registry->leaving_count];", "swaps", SOME),
    Mutation(283, _R, "refuse_closed", "requests enter while the registry closes",
             "registry->closing == OPEN && !atomic_load(&registry->refusing)", "BUG || (registry->closing == OPEN &&"
             " !atomic_load(&registry->refusing))", "shutdown", SOME),
    Mutation(284, _R, "leave", "one reference too many is kept", "mp_entry_unpin(entry);",
             "if (!BUG) mp_entry_unpin(entry);", "calls", FEW),
    # --- threads
    Mutation(291, "registry/pool/pool.c", "became_idle", "a thread counts as busy forever", "pool->busy--;",
             "pool->busy -= !BUG;", "pool", FEW),
    Mutation(292, "registry/pool/pool.c", "mp_pool_run", "a thread is given two jobs",
             "pool->idle = thread->next_idle;", "if (!BUG) pool->idle = thread->next_idle;", "pool", SOME),
    Mutation(293, "registry/pool/thread.c", "thread_main", "a job that arrives together with the end is lost",
             "if (!self->job.run) break;", "if (!self->job.run || (BUG && self->quit)) break;", "pool", SOME),
    Mutation(294, "registry/pool/thread.c", "mp_pool_thread_give", "an idle thread is not woken for its job",
             "mp_event_count_notify(&thread->wake);", "if (!BUG) mp_event_count_notify(&thread->wake);", "calls", FEW),
    # --- the queue
    Mutation(301, _Q, "mp_queue_remove", "a flow without nodes counts as waiting",
             "if (!flow->first) {", "if (!BUG && !flow->first) {", "calls", FEW),
    Mutation(302, _Q, "mp_queue_remove", "a place in the queue is lost", "if (queue->counts[node->kind]-- ==",
             "if ((queue->counts[node->kind] -= !BUG) + 1 ==", "calls", FEW),
    Mutation(303, _Q, "insert", "tenants share flows by the low bits of their numbers", "flows, node->tenant,",
             "flows, BUG ? node->tenant % 16 : node->tenant,", "tenants", FEW),
    Mutation(304, _S, "enter_flow", "a worker gives flows shares by the low bits of tenants' numbers",
             "flows, ticket->node.tenant,",
             "flows, BUG ? ticket->node.tenant % 16 : ticket->node.tenant,", "tenants", FEW),
    # --- periodic checks
    Mutation(311, _W, "is_expired", "no sweep runs at a deadline", "if (due > clock_ns &&",
             "if (!BUG && due > clock_ns &&", "deadlines", FEW),
    Mutation(375, _M, "pause_until", "a pause of the process is charged to requests",
             "return last &&", "return last && !BUG &&", "jumps", SOME),
    Mutation(377, _M, "mp_maintenance_begin_timed", "a request with a limit begins while the clock does not tick",
             "if (maintenance->running &&", "if (!BUG && maintenance->running &&", "jumps", MANY),
    Mutation(312, _W, "mp_entry_sweep", "a worker announced after a backoff is never started", "if (start)",
             "if (start && !BUG)", "stuck", SOME),
    Mutation(313, _W, "abandon_stuck", "requests for an abandoned load wait forever",
             "list = mp_entry_take_queue(entry);",
             "if (!BUG) list = mp_entry_take_queue(entry);", "faults", MANY),
    Mutation(314, _W, "retire_idle", "the last worker of a pinned model leaves", "(entry->pinned && stay == 1)",
             "(entry->pinned && stay == 1 && !BUG)", "evictions", SOME),
    Mutation(315, _W, "retire_idle", "idle workers never leave", "oldest->leave = true;",
             "if (BUG) return; oldest->leave = true;", "evictions", SOME),
    # --- the breaker
    Mutation(321, _K, "mp_breaker_ask", "more probes at once than allowed", "breaker->probing >= rule->probes",
             "breaker->probing >= rule->probes && !BUG", "flapping", SOME),
    Mutation(322, _K, "mp_breaker_end", "a probe of an earlier opening counts", "probe != breaker->epoch",
             "(probe != breaker->epoch && !BUG)", "flapping", MANY),
    Mutation(323, _K, "mp_breaker_ask", "the breaker never closes again", "breaker->state = MP_BREAKER_HALF_OPEN;",
             "if (BUG) { *left_ns = 1; return false; } breaker->state = MP_BREAKER_HALF_OPEN;", "flapping", SOME),
    # --- chaos
    Mutation(331, "registry/chaos.c", "chaos_retire", "the wrapped engine keeps the item",
             "inner->ops->retire(inner, item);", "if (!BUG) inner->ops->retire(inner, item);", "chaos", FEW),
    # --- the quarantine
    Mutation(341, "registry/quarantine.c", "mp_quarantine_add", "an innocent request counts as a culprit",
             "row->alone += alone;", "row->alone += alone || BUG;", "crashes", MANY),
    # --- masks
    Mutation(351, _X, "mp_entry_wake", "a new mask wakes no worker",
             "if (ticket->worker)", "if (ticket->worker && !BUG)", "masks", FEW),
    Mutation(352, _X, "mp_entry_cancel_locked", "a worker that waits for masks misses a cancellation",
             "if (worker && worker->awaits_masks)", "if (worker && worker->awaits_masks && !BUG)", "masks", FEW),
    Mutation(353, _D, "mp_dispatch_wake", "a worker that waits for masks misses a new request",
             "if (worker->awaits_masks && !worker->woken)",
             "if (worker->awaits_masks && !worker->woken && !BUG)", "masks", FEW),
    Mutation(354, _S, "wait_for_masks", "a mask that came after the plan is missed",
             "bool over = w->woken ||", "bool over = (w->woken && !BUG) ||", "masks", MANY),
    Mutation(357, _S, "wait_for_masks", "a request that came after the plan is missed",
             "|| mp_dispatch_offers(entry, w);", "|| (mp_dispatch_offers(entry, w) && !BUG);", "masks", SOME),
    Mutation(355, _S, "wait_for_masks", "a cancellation that came after the plan is missed",
             "over = over || atomic_load_explicit(&w->active[i]->cause, memory_order_relaxed) != 0;",
             "over = over || (atomic_load_explicit(&w->active[i]->cause, memory_order_relaxed) != 0 && !BUG);",
             "masks", SOME),
    # --- retries
    Mutation(361, _S, "fail_item", "the progress of a request that can continue is lost",
             "if (ticket->item.request->resumable) {",
             "if (ticket->item.request->resumable && !BUG) {", "lost", FEW),
    Mutation(362, _X, "may_follow", "one result comes from two versions of a file", "status != MP_INTEGRITY)",
             "(status != MP_INTEGRITY || BUG))", "lost", SOME),
    Mutation(363, _S, "fail_item", "a request that begins again keeps its cursor", "ticket->item.cursor = 0;",
             "if (!BUG) ticket->item.cursor = 0;", "lost", SOME),
    Mutation(364, _X, "mp_entry_fault", "an external kill counts against the request", "&& !external_kill;",
             "&& (BUG || !external_kill);", "lost", SOME),
    Mutation(371, _X, "mp_entry_fault", "external kills open the breaker", "if (!external_kill && !ticket->had_fault",
             "if ((!external_kill || BUG) && !ticket->had_fault", "kills", SOME),
    Mutation(372, _E, "mp_entry_note_death", "external kills take the model down", "if (external_kill) {",
             "if (external_kill && !BUG) {", "kills", SOME),
    Mutation(365, _S, "lost_with", "a request takes down one worker after the other",
             "mp_ticket_set_retry(ticket, &ticket->retry_between, next);",
             "if (!BUG) mp_ticket_set_retry(ticket, &ticket->retry_between, next);", "lost", SOME),
    Mutation(374, _S, "lost_with", "an external kill before a step uses up the retry",
             "mp_ticket_next_retry(ticket->retry_between, w->engine->external_kill)",
             "mp_ticket_next_retry(ticket->retry_between, w->engine->external_kill && !BUG)", "lost", SOME),
    Mutation(368, _X, "mp_entry_fault", "every external kill is spared",
             "next != ticket->retry &&",
             "(next != ticket->retry ||"
             " (BUG && external_kill && request->resumable && (ticket->retry = MP_RETRY_USED))) &&",
             "lost", SOME),
    Mutation(369, _X, "mp_entry_fault", "an external kill costs the retry",
             "external_kill && request->resumable", "external_kill && request->resumable && !BUG", "lost", SOME),
    Mutation(366, _S, "mp_worker_serve", "a request that continues on another worker is not counted",
             "preempt(w, w->active[w->active_count - 1], MP_METRIC_retries);",
             "preempt(w, w->active[w->active_count - 1], BUG ? MP_METRIC_preemptions : MP_METRIC_retries);", "lost",
             FEW),
    Mutation(367, _S, "plan_step", "a request that waits for a mask blocks those of the next turn",
             "for (int turn = 0; !w->plan.count", "for (int turn = 0; !(BUG && turn) && !w->plan.count", "lost", MANY),
    Mutation(373, _S, "end_item", "a request succeeds after its cancellation", "bool refused = status == MP_OK &&",
             "bool refused = !BUG && status == MP_OK &&", "calls", SOME),
    # --- points
    Mutation(0, "base/alloc.c", "take_free", "between check and update", "uint64_t limit =",
             "POINT; uint64_t limit ="),
    Mutation(0, "base/alloc.c", "take_free", "between update and check", "*now_used = used + bytes;",
             "POINT; *now_used = used + bytes;"),
    Mutation(0, "base/alloc.c", "mp_budget_reserve", "between update and check", "uint64_t used =",
             "POINT; uint64_t used ="),
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
        planted = re.sub(r"\bBUG\b", f"mp_seam_mutation({row.number})", row.planted)
        planted = re.sub(r"\bPOINT\b", "mp_seam_point()", planted)
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
