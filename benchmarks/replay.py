"""``python -m benchmarks replay``: record what one compute thread does, and replay it with up to 192.

Builds a copy of the extension that records its compute threads (`trace.c`), in FOLDER, and runs each workload in
processes of their own: recorded on one CPU, and without a record on one CPU and on two. The replay of the record with
one and with two threads is compared with the rates measured. Then the record is replayed on larger machines, whose
bandwidths and barriers are assumptions (`MACHINES`). `scaling_model.py` is the model, `SCALING.md` has its results.

Barriers of a real machine are measured by the probe: a round trip of a word between two CPUs.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import scaling_model as model
from .options import found_here, parser_of, path_of
from .probe import Probe, Watch

ROOT = Path(__file__).resolve().parent.parent
WRAPPED = ("mp_lease_run", "mp_team_barrier", "mp_team_split", "mp_gemm")
#: Sizes to replay: threads, cores per socket, sockets, GB/s of one core and of a socket. Assumed: eight cores of a
#: desktop with two channels of DDR5, and servers with twelve.
MACHINES = ((8, 8, 1, 35, 80), (32, 96, 1, 35, 460), (64, 96, 1, 35, 460), (96, 96, 1, 35, 460), (128, 96, 2, 35, 460),
            (192, 96, 2, 35, 460))
TREE = 8
#: Machines for which the number of threads is chosen: two channels of DDR5, then four, eight and twelve.
SIZES = tuple(model.Machine(cores, sockets, 35, every, tree=TREE) for cores, sockets, every in (
    (8, 1, 80), (16, 1, 80), (32, 1, 200), (64, 1, 400), (96, 1, 460), (96, 2, 460)))
ROWS = {"one completion": 1, "eight completions": 8}
RUN = """
import json, os, sys, time
import mpool
from benchmarks import texts
task = json.loads(sys.argv[1])
pool = mpool.Pool(mpool.PoolConfig(threads=task["threads"], max_workers_per_model=1))
language, encoder = task["language"], task["encoder"]
spans = {}

def measure(name, turns, call, count):
    times = []
    call(-2)
    call(-1)
    for turn in range(turns):
        begin = time.monotonic_ns()
        call(turn)
        times.append((begin, time.monotonic_ns()))
    spans[name] = {"spans": times, "count": count}

def prompt(turn, words):
    return texts.same(1, words, turn + 7)[0]

def generate(text, tokens):
    return pool.generate(text, language, max_tokens=tokens, temperature=0, ignore_eos=True)

if language:
    tokens = len(pool.get(language).tokenize(prompt(0, 400)))
    measure("one completion", 5, lambda turn: generate(prompt(turn, 6), 48), 48)
    measure("prompt", 5, lambda turn: generate(prompt(turn, 400), 1), tokens)

    def eight(turn):
        jobs = [pool.submit("text_to_text", prompt=prompt(20 * turn + number, 6), model=language, max_tokens=32,
                            temperature=0, ignore_eos=True) for number in range(8)]
        [job.result() for job in jobs]

    measure("eight completions", 5, eight, 256)
    facts = next(iter(pool.ps())).facts
    for found in spans.values():
        found.update(weights=facts["weight_bytes"], parameters=facts["parameters"])
if encoder:
    measure("one text", 21, lambda turn: pool.embed(prompt(turn, 24), encoder, compute="bfloat16"), 1)
print(json.dumps(spans), flush=True)
pool.close()
"""


def build(folder: Path) -> None:
    """Build the recording copy of the package in ``folder``, unless it is newer than the sources."""
    target = folder / "package"
    recorder, trace = folder / "trace.o", Path(__file__).with_name("trace.c")
    newest = max(path.stat().st_mtime for path in [*(ROOT / "csrc").rglob("*.[ch]"), trace])
    if any(path.stat().st_mtime > newest for path in (target / "mpool").glob("_core*")):
        return
    shutil.copytree(ROOT / "mpool", target / "mpool", dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("_core*.so", "_libs", "__pycache__"))
    shutil.copytree(ROOT / "benchmarks", target / "benchmarks", dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("results", "__pycache__"))
    for old in (target / "mpool").glob("_core*"):
        old.unlink()  # setup.py would not link again for another recorder
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    subprocess.run([compiler, "-std=c11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-fvisibility=hidden", f"-I{ROOT / 'csrc'}",
                    "-c", str(trace), "-o", str(recorder)], check=True)
    wraps = " ".join(f"-Wl,--wrap={name}" for name in WRAPPED)
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={target}",
                    f"--build-temp={folder / 'objects'}"], cwd=ROOT, check=True,
                   env={**os.environ, "LDFLAGS": f"{recorder} {wraps}"})


def run(package: Path, task: dict[str, Any], cpus: list[int], trace: Path | None) -> dict[str, Any]:
    """Run the workloads in a process on some CPUs. Returns spans and counts by name."""
    environment = {**os.environ, "PYTHONPATH": str(package), "MPOOL_SPECULATION": "0",
                   **({"MPOOL_TRACE": str(trace)} if trace else {})}
    done = subprocess.run([sys.executable, "-c", RUN, json.dumps(task)], capture_output=True, text=True, check=False,
                          cwd=package, timeout=1800, env=environment,
                          preexec_fn=lambda: os.sched_setaffinity(0, cpus))
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def typical(found: dict[str, Any]) -> tuple[int, int]:
    """Return the turn whose duration is the median of an odd number of turns."""
    return tuple(sorted(found["spans"], key=lambda span: span[1] - span[0])[len(found["spans"]) // 2])  # type: ignore[return-value]


def rate(found: dict[str, Any]) -> float:
    """Return results per second of the typical turn."""
    begin, end = typical(found)
    return found["count"] / (end - begin) * 1e9


def main() -> int:
    """Run the command line."""
    parser = parser_of("replay", __doc__)
    parser.add_argument("folder", type=lambda given: Path(path_of(given)),
                        help="folder for the recording copy of the package and the traces")
    parser.add_argument("--language", type=found_here, default="", help="language model (default: none)")
    parser.add_argument("--bytes", type=float, default=0,
                        help="bytes of its weights that a token reads from memory (default: 0: caches have them)")
    parser.add_argument("--encoder", type=found_here, default="", help="embedding model (default: none)")
    args = parser.parse_args()
    if not args.language and not args.encoder:
        parser.error("name a model: --language, --encoder or both")
    args.folder.mkdir(parents=True, exist_ok=True)
    build(args.folder)
    cpus = sorted(os.sched_getaffinity(0))[:2]
    probe = Probe().run() or {"read_1": 20.0, "read_2": 40.0, "round_trip_ns": 120.0}
    task = {"language": args.language, "encoder": args.encoder}
    with Watch() as watch:
        package = args.folder / "package"
        recorded = run(package, {**task, "threads": 1}, cpus[:1], args.folder / "one.trace")
        measured = {count: run(ROOT, {**task, "threads": count}, cpus[:count], None) for count in (1, len(cpus))}
    print(f"{time.strftime('%Y-%m-%d')}, probe {probe}, others {watch.others}")
    here = model.Machine(len(cpus), 1, probe["read_1"], probe["read_2"], barrier=0, each=probe["round_trip_ns"] / 2)
    rows = []
    for name, found in recorded.items():
        trace = model.read(args.folder / "one.trace", [typical(found)], probe["read_1"])
        if not trace.regions:
            raise SystemExit(f"the record of `{name}` is empty: enlarge EVENTS in trace.c")
        passes = len(trace.regions) if name == "one completion" else 0
        memory = min(1.0, passes * args.bytes / probe["read_1"] / 1e9 / trace.work) if passes else 0.0
        rows.append((name, trace, found["count"], memory))
        barriers = sum(map(len, trace.regions)) / len(trace.regions)
        print(f"\n{name}: {len(trace.regions)} regions of {barriers:.0f} barriers, {trace.work:.3f} s of work, "
              f"{trace.serial:.3f} s outside, memory {memory:.0%}; recorded {rate(found):,.1f}/s")
        for count, others in measured.items():
            replayed = found["count"] / model.seconds(trace, here, count, memory)
            print(f"  {count} threads: replayed {replayed:,.1f}/s, measured {rate(others[name]):,.1f}/s, "
                  f"{replayed / rate(others[name]) - 1:+.1%}")
    machines = [(threads, model.Machine(cores, sockets, one, all))
                for threads, cores, sockets, one, all in MACHINES]
    print("\n| replayed, per second; (with a tree of counters) | " + " | ".join(
        f"{threads} threads" for threads, _ in machines) + " |")
    print("|---|" + "---|" * len(machines))
    for cells in model.table(rows, machines, TREE):
        print("| " + " | ".join(cells) + " |")
    largest = machines[-1][1]
    for name, trace, count, memory in rows:
        for tree in (0, TREE):
            threads, least = model.best(trace, replace(largest, tree=tree), memory)
            print(f"{name}, {'tree' if tree else 'one counter'}: {count / least:,.0f}/s with {threads} threads")
    for name, trace, count, memory in rows:
        found = recorded[name]
        if "weights" not in found:
            continue
        tokens = found["count"] if name == "prompt" else ROWS[name] * len(trace.regions)
        worth = model.threads_worth(found["weights"], found["parameters"], tokens / len(trace.regions),
                                    len(trace.regions[-1]))
        print(f"\n{name}, threads and rate | assumed | tuned | best")
        for machine in SIZES:
            most = machine.cores * machine.sockets
            lasts = functools.partial(model.seconds, trace, machine, memory=memory)
            chosen = (min(worth, most), model.tuned(worth, most, lasts), model.best(trace, machine, memory)[0])
            print(f"{most} cores | " + " | ".join(f"{threads}: {count / lasts(threads):,.0f}" for threads in chosen))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
