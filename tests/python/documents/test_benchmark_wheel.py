"""``python -m benchmarks wheel``: ratios, failures, the environment and the options of the comparison of two builds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import mpool
import tinymodels
from benchmarkrecords import check_record

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / "benchmarks" / "__main__.py").exists():
    pytest.skip("needs the benchmarks", allow_module_level=True)
sys.path.append(str(ROOT))  # at the end: the sources must not hide the installed package

from benchmarks import wheel  # noqa: E402
from benchmarks.probe import Frame  # noqa: E402
from benchmarks.record import Recorder, Turn  # noqa: E402

STATE = {"round_trip_ns": 105.0, "read_1": 40.0, "read_2": 53.0}


def turn(engine: str, number: int, speed: float, topic: str = "list, auto", others: float = 0.0) -> Turn:
    return Turn(topic, engine, number, {"measures": {wheel.RATE: speed}, "rss MB": 100.0}, Frame(STATE, STATE, others))


def test_ratios_are_speeds_of_the_wheel_in_the_same_turn() -> None:
    turns = [turn(wheel.HERE, 0, 200.0), turn(wheel.WHEEL, 0, 100.0), turn(wheel.WHEEL, 1, 22.0),
             turn(wheel.HERE, 1, 20.0),  # both are slow in this turn
             turn(wheel.HERE, 2, 1.0),  # the wheel has no such turn
             turn(wheel.HERE, 0, 4.0, "decode, auto"), turn(wheel.WHEEL, 0, 3.0, "decode, auto")]
    assert wheel.ratios(turns) == {"list, auto": (pytest.approx([0.5, 1.1]), True), "decode, auto": ([0.75], True)}


def test_disturbed_turns_count_only_without_others() -> None:
    bad = [turn(wheel.HERE, 0, 10.0, others=0.5), turn(wheel.WHEEL, 0, 30.0, others=0.5)]
    good = [turn(wheel.HERE, 1, 10.0), turn(wheel.WHEEL, 1, 10.1)]
    assert wheel.ratios(bad) == {"list, auto": ([3.0], False)}
    assert wheel.ratios(bad + good) == {"list, auto": (pytest.approx([1.01]), True)}
    assert "3.000 (3.000 to 3.000, 1 pairs, disturbed) *" in wheel.table(bad)


@pytest.mark.parametrize("speed, mark", [(0.969, True), (0.971, False), (1.029, False), (1.031, True)])
def test_the_table_marks_what_misses_the_target(speed: float, mark: bool) -> None:
    said = wheel.table([turn(wheel.HERE, 0, 1.0), turn(wheel.WHEEL, 0, speed)])
    row = next(line for line in said.splitlines() if line.startswith("list, auto "))
    assert row.endswith(" *") == mark and f"{speed:.3f}" in row
    assert f"{0 if mark else 1} of 1 medians are within 3% of 1" in said


def test_the_table_has_the_quartiles() -> None:
    turns = [turn(engine, number, speed if engine == wheel.WHEEL else 1.0)
             for number, speed in enumerate((0.9, 1.0, 1.01, 1.02, 5.0)) for engine in (wheel.HERE, wheel.WHEEL)]
    assert "1.010 (1.000 to 1.020, 5 pairs)" in wheel.table(turns)


def test_builds_take_turns() -> None:
    """The order alternates, all turns do the same number of works, and CPU time of the builds is not that of others."""
    asked: list[tuple[str, int]] = []

    class Fake:
        memory = 7.0

        def __init__(self, engine: str, speed: float) -> None:
            self.engine, self.speed = engine, speed

        def seconds(self, work: str, times: int) -> float:
            asked.append((self.engine, times))
            return times / self.speed

        def cpu_seconds(self) -> float:
            return 2.0

    def measured(run: Any, own: Any) -> tuple[Any, Frame]:
        assert own() == 4.0
        return run(), Frame(STATE, STATE, 0.0)

    recorder = Recorder("wheel", 1)
    recorder.measure = measured  # type: ignore[method-assign, assignment]
    workers: Any = {wheel.HERE: Fake(wheel.HERE, 50.0), wheel.WHEEL: Fake(wheel.WHEEL, 20.0)}
    wheel.measure(recorder, workers, "list, auto", "list", 3)
    assert [times for _, times in asked[:4]] == [1] * 4 and {times for _, times in asked[4:]} == {8}  # 0.4 s of 20/s
    assert [engine for engine, _ in asked[4:]] == [wheel.HERE, wheel.WHEEL, wheel.WHEEL, wheel.HERE, wheel.HERE,
                                                   wheel.WHEEL]
    assert [value for value, _ in wheel.ratios(recorder.turns).values()] == [pytest.approx([0.4] * 3)]


def test_hashes_that_differ_are_named() -> None:
    here, other = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"}
    assert wheel.differing(here, here) == []
    assert [text.split()[3] for text in wheel.differing(here, other)] == ["b", "c", "d"]


def test_only_the_two_builds_are_measured(tmp_path: Path) -> None:
    """An environment in which another mpool is found first is refused."""
    python = str(tmp_path / "bin" / "python")
    here, there = str(ROOT / "mpool" / "_core.so"), str(tmp_path / "lib" / "mpool" / "_core.so")
    wheel.check_places({wheel.HERE: [here], wheel.WHEEL: [there]}, python)
    for one, two in ((here, here), (there, there), (str(tmp_path / "mpool" / "_core.so"), there)):
        with pytest.raises(SystemExit, match="would not be measured"):
            wheel.check_places({wheel.HERE: [one], wheel.WHEEL: [two]}, python)


def test_dependencies_have_the_versions_of_this_environment() -> None:
    installed = [("numpy", "2.3.1"), ("mpool", "0.1.0"), ("torch", "2.13.0+cpu"), ("tokenizers", "0.23.3")]
    assert wheel.constraints(installed) == "numpy==2.3.1\ntokenizers==0.23.3\n"


@pytest.mark.parametrize("given, words", [
    (["--computes", "auto,float64"], "got 'float64'"), ([], "is not the file of a wheel"),
    (["--turns", "0"], "--turns must be 1 or more")])
def test_arguments(tmp_path: Path, given: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        wheel.parse([str(tmp_path / "mpool.whl"), *given])
    assert words in capsys.readouterr().err
    (tmp_path / "mpool.whl").touch()
    assert wheel.parse([str(tmp_path / "mpool.whl"), "--computes", "int8"]).computes == ["int8"]


def run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch,
        printed: str) -> tuple[int, dict[str, Any]]:
    """Run the command with this Python in place of the wheel's environment, and a program that prints hashes."""
    bert, llama = (tinymodels.cached(tmp_path_factory, name) for name in ("bert", "llama"))
    (tmp_path / "mpool-1-cp311-abi3-linux.whl").write_bytes(b"wheel")
    (tmp_path / "hashes.py").write_text(printed)
    build, tested = wheel.Build, str(Path(mpool.__file__).parents[1])
    monkeypatch.setattr(wheel, "HASHES", tmp_path / "hashes.py")
    monkeypatch.setattr(wheel, "SECONDS", 0.0)
    monkeypatch.setattr(wheel, "install", lambda path, folder: sys.executable)
    monkeypatch.setattr(wheel, "check_places", lambda facts, python: None)
    monkeypatch.setattr(wheel, "Build", lambda engine, python, path: build(engine, python, tested))
    code = wheel.main([str(tmp_path / "mpool-1-cp311-abi3-linux.whl"), "--turns", "2", "--embedding-model", str(bert),
                       "--text-model", str(llama), "--json", str(tmp_path / "record.json")])
    return code, json.loads((tmp_path / "record.json").read_text())


@pytest.mark.builds
def test_a_run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch,
               capsys: pytest.CaptureFixture[str]) -> None:
    code, record = run(tmp_path, tmp_path_factory, monkeypatch, "print('{\"a\": \"1\", \"b\": \"2\"}')")
    assert code == 0
    topics = [f"{work}, {compute}" for works in (("list", "single"), ("prompt", "short prompt", "decode", "streams"))
              for compute in ("auto", "float32") for work in works]
    check_record(tmp_path / "record.json", "wheel", dict.fromkeys(topics, {wheel.HERE, wheel.WHEEL}), {wheel.RATE})
    assert record["agreement"] == {"equal hashes of results": {wheel.WHEEL: "2 of 2"}}
    assert record["weights"]["wheel"]["path"] == "mpool-1-cp311-abi3-linux.whl"
    said = capsys.readouterr()
    assert "of 12 medians are within 3% of 1" in said.out and "2 of 2 hashes" in said.err


@pytest.mark.builds
def test_a_run_with_other_hashes_fails(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory,
                                       monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = run(tmp_path, tmp_path_factory, monkeypatch,
                       "import json, os\nprint(json.dumps({'a': os.getpid()}))")
    assert code == 1 and record["failures"] == ["the hash of a differs between the builds"]
    assert "FAILED: the hash of a differs" in capsys.readouterr().out
