"""``python -m benchmarks replay [MODEL]``: replay recorded passes on threads of unequal speeds, in virtual time.

Measured, if a MODEL is named (GGUF, dense; ``--json`` keeps it): the work of one compute thread between its barriers,
for a prompt and for decode (``trace.c``), and rates with one thread, with two, and with two of which the second is
slowed to a half and to a third. The first table compares these rates with the replay. Without a MODEL, the passes come
from a record.

Taken from the core, as compiled code (``replay.c``): how threads claim ranges, the wavefront, the number of threads on
that the tuner chooses (times of passes vary by 3 %), and which cores of faked machines get threads.

Assumed: the speed of a core is its highest clock times the int8 operations per cycle of its vector units
(``MACHINES``), with the share of that peak which this machine reaches. It reads weights in proportion to that speed,
and all cores together read at 80 % of the memory's rate. Only decode is limited by memory. A barrier takes 50 ns and 60
ns for each thread. The system puts threads on the fastest free cores. Not modelled: heat, the time to wake a thread,
caches. Larger models are the recorded one with larger layers.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import record
from .kernel_rates import test_builder
from .options import add_json, found_here, parser_of

ROOT = Path(__file__).resolve().parent.parent
WRAPPED = ("mp_lease_run", "mp_team_barrier", "mp_team_split", "mp_team_next", "mp_gemm")
#: As in trace.c, like the numbers of the kinds of events. The kinds of segments are those of replay.c.
EVENT = np.dtype([("ns", "<i8"), ("units", "<i8"), ("least", "<i8"), ("kind", "<i8")])
BEGIN, STARTED, DONE, SPLITS, ARRIVE, LEAVE, END = range(7)
EACH, SPLIT, LOOP, BARRIER = range(4)
BARRIER_S, EACH_S, SLICE_S = 50e-9, 60e-9, 4e-3
#: Machine of tests/c/fake_machines.h -> int8 operations per ns of a core of each class at its highest clock, and GB/s
#: of the memory (width of the bus times transfers). Operations per cycle: 128 with two 256-bit or four 128-bit units,
#: 64 with two 128-bit ones.
MACHINES: dict[str, tuple[tuple[float, ...], float]] = {
    "Core i5-1240P": ((128 * 4.4, 64 * 3.3), 76.8),  # LPDDR5-4800
    "Core i7-13700H": ((128 * 5.0, 64 * 3.7), 102.4),  # LPDDR5-6400
    "Core Ultra 7 155H": ((128 * 4.8, 64 * 3.8, 64 * 2.5), 119.5),  # LPDDR5X-7467
    "Core Ultra 7 258V": ((128 * 4.8, 128 * 3.7), 136.5),  # LPDDR5X-8533
    "Ryzen 7 7840U": ((128 * 5.1,), 102.4),  # LPDDR5X-6400
    "Ryzen AI 9 HX 370": ((128 * 5.1, 128 * 3.3), 120.0),  # LPDDR5X-7500
    "N100": ((64 * 3.4,), 38.4),  # one channel of DDR5-4800
    "Snapdragon X Elite (X1E001DE)": ((128 * 3.8,), 135.2),  # LPDDR5X-8448
    "Graviton 3": ((128 * 2.6,), 307.2),  # eight channels of DDR5-4800
    "Raspberry Pi 5": ((64 * 2.4,), 17.1),  # 32 bits of LPDDR4X-4267
}
USABLE = 0.8
WAVE_ROWS, WAVE_THREADS = 60, 4  # MP_WAVE_ROWS, MP_WAVE_THREADS
RUN = """
import json, sys
import mpool
from benchmarks import texts
task = json.loads(sys.argv[1])
options = mpool.PoolConfig._registry_options
mpool.PoolConfig._registry_options = lambda self: options(self) | {"step_budget": 10.0}  # a prompt is one pass
with mpool.Pool(mpool.PoolConfig(threads=task["threads"], max_workers_per_model=1)) as pool:
    model = pool.load(task["model"])
    while next(iter(pool.ps())).facts["weights"] == "packing":
        model.generate(texts.same(1, 60, 3)[0], max_tokens=2)
    rates = []
    for turn in range(-1, task["turns"]):
        ids = model.tokenize(texts.same(1, task["rows"], turn + 7)[0])[:task["rows"]]
        done = model.generate(ids, max_tokens=1 + task["tokens"], temperature=0, ignore_eos=True)
        times = done.timings
        rates.append(task["tokens"] / times.generation if task["tokens"] else len(ids) / times.prompt)
    print(json.dumps({"rates": rates[1:], **next(iter(pool.ps())).facts}), flush=True)
"""
#: Workload -> rows of the prompt and tokens to decode. Prompts of 200 rows are no wavefront on two threads.
WORKLOADS = {"prompt of 500": (500, 0), "prompt of 200": (200, 0), "decode": (8, 40)}


class Segment(ctypes.Structure):
    """As in replay.c."""

    _fields_ = (("seconds", ctypes.c_double), ("bytes", ctypes.c_double), ("units", ctypes.c_int64),
                ("least", ctypes.c_int64), ("kind", ctypes.c_int64), ("panels", ctypes.c_int64))


class Threads(ctypes.Structure):
    """The struct ``machine`` of replay.c."""

    _fields_ = (("threads", ctypes.c_int), ("late", ctypes.c_int), ("slice", ctypes.c_double),
                ("phase", ctypes.c_double), ("memory", ctypes.c_double), ("barrier", ctypes.c_double),
                ("each", ctypes.c_double), ("speed", ctypes.POINTER(ctypes.c_double)))


@dataclass(frozen=True)
class Pass:
    """Passes of one thread.

    Attributes:
        segments: kind, units, least units of a range, rows and panels of a product, and seconds of each segment.
        outside: seconds between two passes.
        rows: rows of a pass.
        layers: layers of the model.
        weights: bytes of weights that a pass reads from memory; 0: memory is no limit.
        parameters: parameters of the model.
    """

    segments: tuple[tuple[int, int, int, int, int, float], ...]
    outside: float
    rows: int
    layers: int
    weights: float
    parameters: float

    @property
    def work(self) -> float:
        """Seconds of one thread, without barriers."""
        return sum(segment[-1] for segment in self.segments) + self.outside

    def array(self, larger: float = 1.0) -> ctypes.Array[Segment]:
        """Return the segments for replay.c. ``larger``: of a model with that many times more weights in each layer."""
        loops = sum(seconds for kind, *_, seconds in self.segments if kind == LOOP) or 1.0
        found = (Segment * len(self.segments))()
        for to, (kind, units, least, rows, panels, seconds) in zip(found, self.segments):
            if kind == LOOP and (panels or units != self.rows):
                units, least, panels = divided(units, least, rows, panels, larger)
            to.seconds, to.bytes = seconds * larger, self.weights * larger * seconds / loops if kind == LOOP else 0.0
            to.units, to.least, to.kind, to.panels = units, least, kind, panels
        return found


def divided(units: int, least: int, rows: int, panels: int, larger: float) -> tuple[int, int, int]:
    """Return units, least units of a range, and parts of panels, of a recorded loop as several threads divide it.

    One thread records panels without parts. The rule is that of csrc/models/nn/linear.c (`part_rows`, `least_bytes`).

    Args:
        larger: see :meth:`Pass.array`; heads, inputs and outputs grow with its square root.
    """
    side = larger ** 0.5
    if not panels:  # attention
        return round(units * side), least, 0
    each = -(-max(1, -(-rows // 4)) // 48) * 48
    parts = max(1, -(-rows // each))
    if units <= panels:  # units are panels (mp_linear_into)
        units = round(units * side) * parts
        return units, max(1, round(least * parts / 2 / side)), units
    units, panels = round(units * larger), round(panels * side)
    aim = (512 << 10) // (1 + rows // 8) // (2 if parts > 1 else 1)
    return units, max(aim, units // panels // parts), panels * parts


# ---- the core's rules, compiled ----

def _compile(folder: Path, *extra: str) -> None:
    done = subprocess.run(extra, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])


def library(folder: Path) -> ctypes.CDLL:
    """Compile replay.c with the core's rules, and return it."""
    builder = test_builder()
    compiler = builder.compiler_of(builder.VARIANTS["release"])
    if compiler is None:
        raise SystemExit("no gcc is installed: set CC to a C compiler")
    core, _ = builder.sources(["base"], [])
    files = [str(path) for path in core if path.name != "team.c"]
    _compile(folder, *compiler, *builder.BASE_FLAGS, "-O2", "-fPIC", "-shared", "-DNDEBUG", f"-I{ROOT / 'csrc'}",
             f"-I{ROOT / 'tests' / 'c'}", str(ROOT / "benchmarks" / "replay.c"), *files,
             str(ROOT / "csrc" / "models" / "threads.c"), "-lm", "-o", "replay.so")
    found = ctypes.CDLL(str(folder / "replay.so"))
    found.replay_barriers.restype = found.replay_wavefront.restype = ctypes.c_double
    found.replay_wavefront.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_double, ctypes.c_void_p)
    found.replay_worth.argtypes = (ctypes.c_double, ctypes.c_double, ctypes.c_int, ctypes.c_int)
    return found


class Replay:
    """The model. ``rules``: see :func:`library`."""

    def __init__(self, rules: ctypes.CDLL) -> None:
        self.rules = rules

    def classes(self, index: int) -> tuple[str, list[tuple[int, float, bool]]] | None:
        """Return the name of a faked machine, and cores, speed and ``used`` of its classes."""
        name, found = ctypes.create_string_buffer(64), (ctypes.c_double * 24)()
        count = self.rules.replay_machine(index, name, ctypes.c_size_t(64), found)
        return (name.value.decode(), [(int(found[3 * i]), found[3 * i + 1], bool(found[3 * i + 2]))
                                      for i in range(count)]) if count else None

    def seconds(self, what: Pass, speeds: Sequence[float], memory: float = 0.0, late: int = -1, larger: float = 1.0,
                wave: bool = False) -> float:
        """Return the time of a pass.

        Args:
            what: the pass.
            speeds: one for each thread; 1 is the core that was recorded.
            memory: bytes per second that all threads read together; 0: no limit.
            late: thread whose CPU another program has in every second slice; the result is a mean over begins of the
                slices.
            larger: see :meth:`Pass.array`.
            wave: the pass is a wavefront.
        """
        given, segments = (ctypes.c_double * len(speeds))(*speeds), what.array(larger)
        begins = [2 * SLICE_S * (i + 0.5) / 16 for i in range(16)] if late >= 0 else [0.0]
        found = []
        for begin in begins:
            threads = Threads(len(speeds), late, SLICE_S, begin, memory, BARRIER_S, EACH_S, given)
            if wave:
                blocks = round(what.rows / WAVE_ROWS)
                each = (what.work - what.outside) * larger / blocks / what.layers
                found.append(self.rules.replay_wavefront(blocks, what.layers, each, ctypes.byref(threads)))
            else:
                found.append(self.rules.replay_barriers(segments, len(segments), ctypes.byref(threads)))
        return statistics.mean(found) + what.outside / speeds[0]

    def tuned(self, what: Pass, fast: int, seconds: Sequence[float], larger: float = 1.0) -> int:
        """Return the number of threads that the tuner chooses.

        Args:
            what: the pass.
            fast: cores of the fastest class; 0: all are equal.
            seconds: of a pass with 1, 2, 3, ... threads.
            larger: see :meth:`Pass.array`.
        """
        barriers = sum(kind == BARRIER for kind, *_ in what.segments)
        worth = self.rules.replay_worth(what.weights * larger, what.parameters * larger, 1, barriers)
        chance, count = random.Random(1), 5000
        noise = (ctypes.c_double * count)(*(chance.lognormvariate(0, 0.03) for _ in range(count)))
        times = (ctypes.c_double * (len(seconds) + 1))(0.0, *seconds)
        return int(self.rules.replay_tuned(worth, len(seconds), fast, times, noise, count))


# ---- measuring ----

def recording(folder: Path) -> Path:
    """Link a copy of the extension with trace.c, and return the folder with the package."""
    package, built = folder / "package", folder / "built"
    (package / "mpool").mkdir(parents=True, exist_ok=True)
    (package / "benchmarks").exists() or (package / "benchmarks").symlink_to(ROOT / "benchmarks")
    for path in (ROOT / "mpool").iterdir():
        if not path.name.startswith("_core") and not (package / "mpool" / path.name).exists():
            (package / "mpool" / path.name).symlink_to(path)
    compiler = test_builder().compiler_of(test_builder().VARIANTS["release"]) or ["cc"]
    _compile(folder, *compiler, "-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-fvisibility=hidden",
             f"-I{ROOT / 'csrc'}", "-c", str(ROOT / "benchmarks" / "trace.c"), "-o", str(folder / "trace.o"))
    wraps = " ".join(f"-Wl,--wrap={name}" for name in WRAPPED)
    done = subprocess.run([sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={built}"], cwd=ROOT, text=True,
                          capture_output=True, env={**os.environ, "LDFLAGS": f"{folder / 'trace.o'} {wraps}"})
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    for path in (built / "mpool").glob("_core*"):
        path.replace(package / "mpool" / path.name)
    return package


def run(package: Path, cpus: Sequence[int], workload: str, model: str, turns: int, **options: str) -> dict[str, Any]:
    """Run a workload in a process with one thread per CPU. Returns its rates and the facts of the model."""
    rows, tokens = WORKLOADS[workload]
    task = {"model": model, "threads": len(cpus), "rows": rows, "tokens": tokens, "turns": turns}
    done = subprocess.run([sys.executable, "-c", RUN, json.dumps(task)], cwd=package, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(package), "MPOOL_SPECULATION": "0", **options},
                          preexec_fn=lambda: os.sched_setaffinity(0, cpus))
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def read(events: NDArray[np.void], facts: dict[str, Any], decode: bool) -> Pass:
    """Return a pass over the whole prompt, or of decode: medians over all such passes with the same segments.

    Raises:
        ValueError: there is no such pass.
    """
    kinds: dict[tuple[tuple[int, ...], ...], list[list[float]]] = {}
    outside = []
    begins, ends = (np.flatnonzero(events["kind"] == kind).tolist() for kind in (BEGIN, END))
    for first, last in zip(begins, ends):
        shape, seconds, since, segment = list[tuple[int, ...]](), list[float](), 0, (EACH, 0, 1)
        for ns, units, least, kind in events[first:last + 1].tolist():
            if kind not in (BEGIN, LEAVE):
                shape.append((*segment, units, least) if kind == DONE else (*segment, 0, 0))
                seconds.append((ns - since) / 1e9)
            since = ns
            segment = (LOOP, units, least) if kind == STARTED else (SPLIT, units, 1) if kind == SPLITS else (EACH, 0, 1)
            if kind == ARRIVE:
                shape.append((BARRIER, 0, 1, 0, 0))
                seconds.append(0.0)
        kinds.setdefault(tuple(shape), []).append(seconds)
        if first:
            outside.append((int(events["ns"][first]) - int(events["ns"][first - 1])) / 1e9)

    def rows_of(shape: tuple[tuple[int, ...], ...]) -> int:  # a pass first splits its rows
        return next((units for kind, units, *_ in shape if kind == SPLIT), 0)

    wanted = 1 if decode else max(map(rows_of, kinds), default=0)
    found = max((item for item in kinds.items() if rows_of(item[0]) == wanted), key=lambda item: len(item[1]),
                default=None)
    if not wanted or found is None:
        raise ValueError("the trace has no such pass")
    middle = np.median(np.array(found[1]), axis=0).tolist()
    segments = tuple((kind, units, least, rows, panels, round(seconds, 9))
                     for (kind, units, least, rows, panels), seconds in zip(found[0], middle))
    return Pass(segments, statistics.median(outside) if decode else 0.0, wanted, int(facts["layers"]),
                float(facts["weight_bytes"]) if decode else 0.0, float(facts["parameters"]))


def measured(recorder: record.Recorder, model: str, folder: Path, turns: int, rounds: int) -> dict[str, Pass]:
    """Record each workload, and measure it in each round. Returns the passes by workload."""
    package, cpus = recording(folder), sorted(os.sched_getaffinity(0))[:2]
    passes = {}
    for name in WORKLOADS:
        trace = folder / "events"
        facts = run(package, cpus[:1], name, model, turns, MPOOL_TRACE=str(trace))
        passes[name] = read(np.fromfile(trace, EVENT), facts, name == "decode")
        cases: list[tuple[str, Sequence[int], dict[str, str]]] = [("one", cpus[:1], {}), ("two", cpus, {})]
        if name != "prompt of 500":  # the hook does not reach loops of a wavefront
            cases += [("two, one at 0.50", cpus, {"MPOOL_SLOW": "1"}), ("two, one at 0.33", cpus, {"MPOOL_SLOW": "2"})]
        for number, (case, own, options) in itertools.product(range(rounds), cases if len(cpus) == 2 else cases[:1]):
            done, frame = recorder.measure(lambda own=own, name=name, options=options: run(  # type: ignore[misc]
                package, own, name, model, turns, **options))
            recorder.add(name, f"mpool:{case}", number, {"tokens/s": statistics.median(done["rates"])}, frame)
    return passes


def kept(passes: dict[str, Pass]) -> dict[str, Any]:
    """Return the passes as a record keeps them: the segments are one line of their numbers, with nanoseconds."""
    return {name: {**vars(what), "segments": ", ".join(" ".join(map(str, part)) + f" {seconds * 1e9:.0f}"
                                                       for *part, seconds in what.segments)}
            for name, what in passes.items()}


def loaded(found: dict[str, Any]) -> dict[str, Pass]:
    """Return the passes of a record."""
    return {name: Pass(**{**fields, "segments": tuple(
        (int(kind), int(units), int(least), int(rows), int(panels), int(ns) / 1e9)
        for kind, units, least, rows, panels, ns in (part.split() for part in fields["segments"].split(", ")))})
            for name, fields in found["options"]["passes"].items()}


# ---- tables ----

def show(header: Sequence[str], rows: list[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    print("\n| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def compared(model: Replay, passes: dict[str, Pass], found: dict[str, Any]) -> list[Sequence[str]]:
    """Return rows: workload, threads, number of rounds, rates measured and replayed as factors of one thread, and their
    difference. A measured factor is the median over the rounds: a round's turns see the machine in one state.
    """
    turns: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for turn in found["turns"]:
        turns.setdefault((turn["topic"], turn["engine"].partition(":")[2]), {})[turn["round"]] = turn
    rows = list[Sequence[str]]()
    for (name, case), own in turns.items():
        if case == "one":
            continue
        what, ones = passes[name], turns[name, "one"]
        slower = float(case.rpartition(" ")[2]) if " " in case else 1.0
        frames = [side for turn in own.values() for side in (turn["frame"]["before"], turn["frame"]["after"]) if side]
        read_2 = statistics.median(side["read_2"] for side in frames) * 1e9 if frames and what.weights else 0.0
        wave = what.rows >= 4 * WAVE_ROWS
        replayed = what.work / model.seconds(what, [1.0, slower], read_2, wave=wave)
        real = statistics.median(turn["measures"]["tokens/s"] / ones[number]["measures"]["tokens/s"]
                                 for number, turn in own.items() if number in ones)
        rows.append((name, case, f"{len(own)}", f"{real:.2f}", f"{replayed:.2f}", f"{replayed / real - 1:+.0%}"))
    return rows


def core_speeds(counts: Sequence[int], speeds: Sequence[float]) -> list[float]:
    """Return the speed of each core, the fastest first."""
    return sorted((speed for count, speed in zip(counts, speeds) for _ in range(count)), reverse=True)


def on_machine(model: Replay, passes: dict[str, Pass], counts: Sequence[int], used: Sequence[bool],
               speeds: Sequence[float], memory: float, larger: float) -> dict[str, float]:
    """Return the figures of a machine.

    Args:
        counts, used, speeds: cores of each class, whether the core gives them threads, and their speed; 1 is the core
            that was recorded.
        memory: bytes per second.
        larger: see :meth:`Pass.array`.
    """
    prompt, decode = passes["prompt of 500"], passes["decode"]
    every, chosen = core_speeds(counts, speeds), core_speeds([c if u else 0 for c, u in zip(counts, used)], speeds)

    def prefill(cores: list[float]) -> float:
        wave = 1 < len(cores) <= WAVE_THREADS and prompt.rows >= 2 * len(cores) * WAVE_ROWS
        return prompt.work * larger / model.seconds(prompt, cores, larger=larger, wave=wave)

    subsets = [core_speeds(part, speeds) for part in itertools.product(*(
        range(0, count + 1, 1 if sum(counts) <= 16 else 4) for count in counts)) if sum(part)]
    best_time, best = min((model.seconds(decode, part, memory, larger=larger), part) for part in subsets)
    times = [model.seconds(decode, chosen[:n], memory, larger=larger) for n in range(1, len(chosen) + 1)]
    tuned = model.tuned(decode, counts[0] if len(counts) > 1 else 0, times, larger)
    rate = prefill(chosen)
    return {"threads": len(chosen), "prefill of all": rate / sum(every), "prefill of chosen": rate / sum(chosen),
            "prefill with all": prefill(every) / sum(every), "decode": tuned, "best": len(best),
            "of best": best_time / times[tuned - 1], "all of best": best_time / times[-1],
            "prompt tokens/s": prompt.rows * rate / (prompt.work * larger),
            "tokens/s": 1 / times[tuned - 1]}


def machines(model: Replay, passes: dict[str, Pass], int8: float, larger: float) -> list[Sequence[str]]:
    """Return a row per faked machine. ``int8``: operations per ns of the core that was recorded."""
    rows = []
    for index in itertools.count():
        found = model.classes(index)
        if found is None:
            return rows
        name, classes = found
        rates, memory = MACHINES[name]
        figures = on_machine(model, passes, [c[0] for c in classes], [c[2] for c in classes],
                             [rate / int8 for rate in rates], memory * USABLE * 1e9, larger)
        cores = " + ".join(f"{c[0]} at {rate / rates[0]:.2f}" for c, rate in zip(classes, rates))
        rows.append((name, cores, *row_of(figures)))
    return rows


def row_of(figures: dict[str, float]) -> tuple[str, ...]:
    """Return the cells of a machine."""
    return (f"{figures['threads']:.0f}", f"{figures['prefill of chosen']:.2f}", f"{figures['prefill of all']:.2f}",
            f"{figures['prefill with all']:.2f}", f"{figures['decode']:.0f} of {figures['best']:.0f}",
            f"{figures['of best']:.2f}", f"{figures['all of best']:.2f}", f"{figures['prompt tokens/s']:,.0f}",
            f"{figures['tokens/s']:,.0f}")


def late(model: Replay, passes: dict[str, Pass], cores: int, memory: float, larger: float) -> Sequence[str]:
    """Return what cores of equal speed reach while another program has one of them for half of the time."""
    prompt, decode = passes["prompt of 500"], passes["decode"]
    rates = []
    for what, limit in ((prompt, 0.0), (decode, memory)):
        for wave in (False, True) if what is prompt else (False,):
            rates.append(what.work * larger / model.seconds(what, [1.0] * cores, limit, cores - 1, larger, wave))
        rates.append(what.work * larger / model.seconds(what, [1.0] * (cores - 1), limit, larger=larger))
    return [f"{cores}", f"{larger:g}", *(f"{rate:.2f}" for rate in rates)]


def main() -> int:
    """Run the command line."""
    parser = parser_of("replay", __doc__)
    parser.add_argument("model", type=found_here, nargs="?", default="",
                        help="GGUF file (default: replay the newest record)")
    parser.add_argument("--turns", type=int, default=5, help="turns of each workload (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of measuring (default: %(default)s)")
    parser.add_argument("--larger", type=float, nargs="+", default=[1, 6.4, 12.5],
                        help="also replay models with that many times more weights (default: %(default)s)")
    add_json(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mpool-replay-") as name:
        return _run(args, Path(name))


def _run(args: argparse.Namespace, folder: Path) -> int:
    model = Replay(library(folder))
    if args.model:
        recorder = record.Recorder("replay", min(2, len(os.sched_getaffinity(0))), turns=args.turns, rounds=args.rounds)
        passes = measured(recorder, args.model, folder, args.turns, args.rounds)
        recorder.options["passes"] = kept(passes)
        found = recorder.write(args.json, model=args.model)
    else:
        newest = max(map(str, record.RESULTS.glob("*-replay.json")), default="")
        if not newest:
            raise SystemExit("no record of a replay: name a MODEL")
        found = json.loads(Path(newest).read_text())
        passes = loaded(found)
    sides = [side for turn in found["turns"] for side in (turn["frame"]["before"], turn["frame"]["after"]) if side]
    int8 = statistics.median(side["int8"] for side in sides) if sides else 1000.0
    for title, what in passes.items():
        barriers = sum(kind == BARRIER for kind, *_ in what.segments)
        print(f"{title}: {what.rows} rows, {barriers} barriers, {what.work * 1e3:.2f} ms on one thread")
    show(("workload", "threads", "rounds", "measured, times one thread", "replayed", "difference"),
         compared(model, passes, found))
    header = ("prompt: share of the threads' speeds", "of all cores'", "of all cores', a thread on each",
              "decode: threads, and of the best subset", "share of the best", "with all threads", "prompt, tokens/s",
              "decode, tokens/s")
    for larger in args.larger:
        print(f"\n{passes['decode'].weights * larger / 1e9:.2f} GB of weights")
        show(("machine", "cores", "threads", *header), machines(model, passes, int8, larger))
        rows: list[Sequence[str]] = []
        for slow in (0.67, 0.58, 0.5, 0.37):
            rows.append((f"6 fast, 8 at {slow}", *row_of(on_machine(
                model, passes, (6, 8), (True, True), (0.6, 0.6 * slow), 82e9, larger))))
        show(("cores", "threads", *header), rows)
    show(("cores, one half taken", "times the weights", "prompt with barriers", "wavefront", "without the thread",
          "decode", "without the thread"),
         [late(model, passes, cores, 82e9, larger) for larger in args.larger for cores in (2, 8)])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
