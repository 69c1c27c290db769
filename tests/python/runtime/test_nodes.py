"""Memory nodes (NUMA), simulated by MPOOL_NODES. Results do not depend on them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mpool
from mpool.debug.show import table
from catalogues import row

PROGRAM = """
import hashlib, os, sys, time
import mpool
bert, llama = sys.argv[1:]
found = hashlib.sha256()
with mpool.Pool(mpool.PoolConfig(threads=2, max_workers_per_model=2)) as pool:
    found.update(pool.embed([f"text {number} " + "and so on " * (number % 7) for number in range(64)], bert).tobytes())
    found.update(pool.embed("one text", bert).tobytes())
    jobs = [pool.submit("text_to_text", prompt=f"Number {number}", model=llama, max_tokens=20, ignore_eos=True, seed=3)
            for number in range(4)]
    found.update(repr([job.result().text for job in jobs]).encode())
    print(found.hexdigest())
    end = time.monotonic() + 30
    while any(entry.workers < 2 for entry in pool.ps()) and time.monotonic() < end:
        time.sleep(0.01)
    print([entry.nodes for entry in pool.ps()], "NODES" in repr(pool.ps()))
    print([node["cpus"] for node in mpool.show_config("dicts")["nodes"]])
    allowed = set()
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        allowed.add((lines["Name"].strip(), lines["Cpus_allowed_list"].strip()))
    print(sorted(cpus for name, cpus in allowed if name == "mpool-compute"))
    print(sorted({cpus for name, cpus in allowed if name == "mpool-worker"}))
"""


def run(nodes: str, *arguments: Path) -> list[str]:
    """Run the program with this MPOOL_NODES and return its output lines."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, arguments)], capture_output=True, text=True,
                          timeout=120, env={**os.environ, "MPOOL_NODES": nodes})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_two_nodes_of_this_machine(bert: Path, llama: Path) -> None:
    """The bytes are the same, workers are distributed over nodes, and compute threads are bound to a node."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("one CPU")
    first, rest = str(cpus[0]), ",".join(map(str, cpus[1:]))
    whole, cut = run("off", bert, llama), run(f"{first};{rest}", bert, llama)
    assert whole[0] == cut[0]
    assert whole[1] == "[(), ()] False" and cut[1] == "[(0, 1), (0, 1)] True"
    assert len(eval(whole[2])) == 1 and len(eval(cut[2])) == 2 and eval(cut[2])[0] == first
    everywhere = eval(whole[2])[0]
    assert eval(whole[3]) == eval(whole[4]) == [everywhere]
    assert len(eval(cut[3])) == 1 and eval(cut[3])[0] in eval(cut[2])
    assert eval(cut[4]) == [everywhere]


@pytest.mark.parametrize("nodes", ["0;;1", "0-", "a", "0;0", "4096"])
def test_invalid_lists_of_nodes(nodes: str) -> None:
    """Loading the core raises an error that names the variable and the format."""
    done = subprocess.run([sys.executable, "-c", "import mpool; mpool.show_config()"], capture_output=True, text=True,
                          timeout=60, env={**os.environ, "MPOOL_NODES": nodes})
    assert done.returncode == 1
    assert "InvalidArgument: the environment variable MPOOL_NODES must be the CPUs of each node, such as " \
        "0-7,16-23;8-15,24-31" in done.stderr and f'got "{nodes}"' in done.stderr


def test_ps_shows_nodes_if_there_are_several() -> None:
    """The column appears only with several nodes."""
    assert "NODES" not in repr(table([row()]))
    on = [{"node": 1, "process": 0}, {"node": 0, "process": 0}]
    lines = repr(table([row(worker=on), row(key="other")])).splitlines()
    assert lines[0].split()[-1] == "NODES" and lines[1].split()[-1] == "0,1" and lines[2].split()[-1] == "-"
    assert "Nodes" in table([row(worker=on[:1])])._repr_html_()


def test_config_lists_the_nodes() -> None:
    """Every CPU of this process appears exactly once."""
    found = []
    for node in mpool.show_config("dicts")["nodes"]:
        for part in filter(None, node["cpus"].split(",")):
            low, _, high = part.partition("-")
            found += range(int(low), int(high or low) + 1)
    assert sorted(found) == sorted(os.sched_getaffinity(0))
