"""The replay of recorded passes: known times of made-up traces, and the constants that it shares with the core."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks import replay, scaling_model as model  # noqa: E402

MACHINE = model.Machine(cores=8, sockets=2, one=10, all=40, barrier=100, each=10, far=1000)
SECOND = 10**9


def write(path: Path, events: list[tuple[int, int, int]], count: int = 1) -> Path:
    """Write a trace of one thread: (kind, units, ns) of each event."""
    rows = np.zeros(len(events), model.EVENT)
    rows["kind"], rows["units"], rows["ns"] = zip(*events)
    rows["count"] = count
    rows.tofile(path)
    return path


def region(begin: int) -> list[tuple[int, int, int]]:
    """Events of a region of 6 s: 2 s in ten parts, 1 s of one thread, 3 s of products with four and two panels."""
    at = [begin + SECOND * second for second in range(7)]
    return [(model.BEGIN, 0, at[0]), (model.SPLIT, 10, at[0]), (model.PRODUCT, 99, at[1]), (model.ARRIVE, 0, at[2]),
            (model.LEAVE, 0, at[2]), (model.SPLIT, 1, at[2]), (model.ARRIVE, 0, at[3]), (model.LEAVE, 0, at[3]),
            (model.PRODUCT, 4, at[4]), (model.PRODUCT, 2, at[5]), (model.END, 0, at[6])]


def test_a_trace_has_the_segments_between_barriers(tmp_path: Path) -> None:
    """A region that outlasts its span counts whole. Events outside regions and regions before a span do not."""
    path = write(tmp_path / "trace", [*region(0), (model.PRODUCT, 7, 8 * SECOND), *region(20 * SECOND),
                                      *region(30 * SECOND)])
    trace = model.read(path, [(19 * SECOND, 29 * SECOND), (29 * SECOND, 34 * SECOND)], 12.0)
    one = (model.Segment(2.0, 10), model.Segment(1.0, 1), model.Segment(3.0, 6))
    assert trace.regions == (one, one) and (trace.work, trace.one) == (12.0, 12.0)
    assert trace.serial == 4.0 + 1.0  # 10 - 6 seconds, and 5 without the 4 of the region


def test_traces_of_several_threads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one compute thread"):
        model.read(write(tmp_path / "two", region(0), count=2), [(0, SECOND)], 10)


def test_a_region_in_which_the_process_ended_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "open", [*region(0), *region(10 * SECOND)[:-1], *region(20 * SECOND)])
    trace = model.read(path, [(0, 30 * SECOND)], 10)
    assert len(trace.regions) == 2 and trace.work == 12.0 and trace.serial == 18.0


def test_each_part_of_the_time_scales_as_it_should() -> None:
    trace = model.Trace(((model.Segment(2.0, 10), model.Segment(1.0, 0), model.Segment(3.0, 6)),), 0.5, 10)
    assert model.seconds(trace, MACHINE, 1, 0.0) == 6.5
    # ten parts for four threads: three of them; six: two of them; and three barriers of 100 + 4 * 10 ns
    assert model.seconds(trace, MACHINE, 4, 0.0) == pytest.approx(0.5 + 0.6 + 1.0 + 1.0 + 3 * 140e-9, rel=1e-12)
    # all of the work waits for memory: eight threads want 80 GB/s of 40, but the work of one thread keeps its rate
    assert model.seconds(trace, MACHINE, 8, 1.0) == pytest.approx(0.5 + 2 * 0.4 + 1.0 + 2 * 0.5 + 3 * 180e-9, rel=1e-12)
    assert model.seconds(trace, MACHINE, 8, 0.5) == pytest.approx(0.5 + 1.5 * 0.4 + 1.0 + 1.5 * 0.5 + 3 * 180e-9,
                                                                 rel=1e-12)


def test_a_core_with_more_bandwidth_waits_less_for_memory() -> None:
    trace = model.Trace(((model.Segment(4.0, 4),),), 0.0, 5)
    # half of 4 s at 5 GB/s; the machine's core reads 10 GB/s
    assert model.seconds(trace, MACHINE, 1, 0.5) == 2.0 + 1.0
    assert model.seconds(trace, MACHINE, 4, 0.5) == pytest.approx(0.75 + 140e-9)


def test_two_sockets_read_half_of_the_weights_over_the_link() -> None:
    assert MACHINE.reading(4) == 1.0 and MACHINE.reading(8) == 2.0
    assert MACHINE.reading(16) == 2.0 * 1.5  # twice the threads and the bandwidth; half of the reads at half the rate
    assert replace(MACHINE, remote=1.0).reading(16) == 2.0
    assert MACHINE.meeting(9) - MACHINE.meeting(8) == pytest.approx(1010e-9)


def test_a_tree_of_counters_helps_where_it_saves_more_than_a_level() -> None:
    tree = replace(MACHINE, sockets=24, cores=8 * 24, tree=8)
    flat = replace(tree, tree=0)
    assert tree.meeting(1) == 0.0
    for threads in (2, 8, 15):
        assert tree.meeting(threads) == flat.meeting(threads)
    assert tree.meeting(64) == pytest.approx((2 * 100 + 10 * (8 + 8)) * 1e-9)
    assert flat.meeting(64) == pytest.approx((100 + 10 * 64) * 1e-9)


def test_the_best_number_of_threads_is_found() -> None:
    trace = model.Trace(((model.Segment(1e-6, 1000),),) * 3, 0.0, 10)
    times = {threads: model.seconds(trace, MACHINE, threads, 0.0) for threads in range(1, 17)}
    threads, least = model.best(trace, MACHINE, 0.0)
    assert least == min(times.values()) == times[threads] and 1 < threads < 9


def test_tables_name_the_rate_with_a_tree_where_it_differs() -> None:
    trace = model.Trace(((model.Segment(1e-5, 1000),),), 0.0, 10)
    wide = model.Machine(cores=192, sockets=1, one=1, all=1000)
    rows = model.table([("x", trace, 1.0, 0.0)], [(4, wide), (192, wide)], tree=8)
    plain, tree = (1 / model.seconds(trace, replace(wide, tree=size), 192, 0.0) for size in (0, 8))
    assert rows == [["x", f"{1 / model.seconds(trace, wide, 4, 0.0):,.0f}", f"{plain:,.0f} ({tree:,.0f})"]]


def test_the_model_knows_the_numbers_of_the_core() -> None:
    source = (ROOT / "csrc" / "models" / "threads.c").read_text()
    header = (ROOT / "csrc" / "models" / "threads.h").read_text()
    for name, text in (("BYTES", source), ("OPERATIONS", source), ("BARRIER_NS", source), ("FASTER", source),
                       ("MP_THREADS_MIN", header), ("MP_THREADS_MAX", header)):
        found = re.search(rf"\b{name} = ([\d.]+)", text)
        assert found is not None and float(found[1]) == getattr(model, name.removeprefix("MP_")), name
    team = (ROOT / "csrc" / "base" / "team.c").read_text()
    assert f" GROUP = {replay.TREE}," in team and f" GROUPS_FROM = {2 * replay.TREE}," in team
    cases = re.findall(r"\{(\d+), (\d+), (\d+)\}",
                       (ROOT / "tests" / "c" / "test_models_threads.c").read_text().split("_even_numbers")[1])
    assert len(cases) == 17
    for threads, below, above in cases:
        assert model.neighbour(int(threads), False) == int(below) and model.neighbour(int(threads), True) == int(above)


def test_threads_follow_the_larger_part_of_the_work() -> None:
    assert model.threads_worth(98e6, 134e6, 1, 156) == 17  # as in test_models_threads.c
    assert model.threads_worth(98e6, 134e6, 128, 156) == 148
    assert model.threads_worth(100, 0, 1, 50) == 1 and model.threads_worth(1e14, 0, 1, 10) == 256


def test_a_tuner_stops_where_its_neighbours_are_not_faster() -> None:
    assert model.tuned(60, 96, lambda threads: 1000 / threads + threads) == 32  # 48, 32; 24 and 48 are slower
    assert model.tuned(17, 96, lambda threads: 3600 / threads + threads) == 64  # 12 is slower; 24, 32, 48, 64
    assert model.tuned(60, 40, lambda threads: 1 / threads) == 40  # no more are there
    assert model.tuned(30, 36, lambda threads: 1 / threads) == 36
    assert model.tuned(60, 8, lambda threads: threads) == 8 and model.tuned(5, 96, lambda threads: threads) == 5
    assert model.tuned(60, 96, lambda threads: 1.0) == 60


@pytest.mark.parametrize("tree", [0, replay.TREE])
@pytest.mark.parametrize("size", replay.SIZES)
def test_tuned_threads_are_nearly_the_best_of_assumed_machines(size: model.Machine, tree: int) -> None:
    """A token of 1.1 GB and a prompt of 128 rows."""
    machine = replace(size, tree=tree)
    most = machine.cores * machine.sockets
    segments = tuple(model.Segment(9e-5, 2048) for _ in range(146))
    token = model.Trace((segments,) * 4, 0.0, 35)
    prompt = model.Trace((tuple(model.Segment(12e-3, 1024) for _ in range(146)),), 0.0, 35)
    for trace, memory, rows in ((token, 0.9, 1), (prompt, 0.0, 128)):
        worth = model.threads_worth(1.1e9, 1.7e9, rows, 146)
        threads = model.tuned(worth, most, lambda count, trace=trace, memory=memory:  # type: ignore[misc]
                              model.seconds(trace, machine, count, memory))
        best = model.best(trace, machine, memory)[1]
        taken = model.seconds(trace, machine, threads, memory)
        # with a tree, a token gains from the second socket, but not from the first threads on it
        assert taken < (1.2 if tree and machine.sockets > 1 else 1.05) * best
        assert taken <= model.seconds(trace, machine, min(worth, most), memory)
        if most >= 64 and rows == 1 and not tree:
            assert model.seconds(trace, machine, min(worth, most), memory) > 1.1 * best


def test_the_recorder_wraps_functions_of_the_core() -> None:
    """A function that was renamed would be recorded no more, without an error of the linker."""
    recorder = (ROOT / "benchmarks" / "trace.c").read_text()
    headers = "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.h"))
    assert set(re.findall(r"__wrap_(\w+)", recorder)) == set(replay.WRAPPED)
    for name in replay.WRAPPED:
        assert re.search(rf"\b{name}\(", headers), name
    subprocess.run(["gcc", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
                    f"-I{ROOT / 'csrc'}", str(ROOT / "benchmarks" / "trace.c")], check=True, timeout=60)
    kinds = re.search(r"typedef enum kind \{ (.*) \} kind;", recorder)
    assert kinds is not None
    for number, kind in enumerate(kinds[1].split(", ")):
        assert getattr(model, kind) == number
