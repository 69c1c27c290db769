"""``python -m benchmarks wheel``: ratios, failures, the environment and the options of the comparison of two builds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import tinymodels

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / "benchmarks" / "__main__.py").exists():
    pytest.skip("needs the benchmarks", allow_module_level=True)
sys.path.append(str(ROOT))  # at the end: the sources must not hide the installed package

from benchmarks import record as records, wheel  # noqa: E402
from benchmarks.probe import Frame  # noqa: E402
from benchmarks.record import Turn  # noqa: E402

STATE = {"round_trip_ns": 105.0, "read_1": 40.0, "read_2": 53.0}


def turn(engine: str, number: int, measures: dict[str, float], *, topic: str = "embed", others: float = 0.0) -> Turn:
    return Turn(topic, engine, number, {"measures": measures, "rss MB": 100.0}, Frame(STATE, STATE, others))


def test_ratios_are_speeds_of_the_wheel_in_the_same_round() -> None:
    turns = [turn(wheel.HERE, 0, {"texts/s": 200.0, "one text ms": 2.0}),
             turn(wheel.WHEEL, 0, {"texts/s": 100.0, "one text ms": 4.0}),
             turn(wheel.WHEEL, 1, {"texts/s": 22.0, "one text ms": 10.0}),  # both are slow in this round
             turn(wheel.HERE, 1, {"texts/s": 20.0, "one text ms": 20.0}),
             turn(wheel.HERE, 2, {"texts/s": 1.0, "one text ms": 1.0})]  # the wheel failed
    found = wheel.ratios(turns)["embed"]
    assert found == {"texts/s": (pytest.approx([0.5, 1.1]), True), "one text ms": (pytest.approx([0.5, 2.0]), True),
                     "memory MB": ([1.0, 1.0], True)}


def test_disturbed_turns_count_only_without_others() -> None:
    bad = [turn(wheel.HERE, 0, {"a": 10.0}, others=0.5), turn(wheel.WHEEL, 0, {"a": 30.0}, others=0.5)]
    good = [turn(wheel.HERE, 1, {"a": 10.0}), turn(wheel.WHEEL, 1, {"a": 10.1})]
    assert wheel.ratios(bad)["embed"]["a"] == ([3.0], False)
    assert wheel.ratios(bad + good)["embed"]["a"] == (pytest.approx([1.01]), True)
    assert "3.000 (3.000 to 3.000, 1 pairs, disturbed) *" in wheel.table(bad)


@pytest.mark.parametrize("speed, mark", [(0.969, True), (0.971, False), (1.029, False), (1.031, True)])
def test_the_table_marks_what_misses_the_target(speed: float, mark: bool) -> None:
    said = wheel.table([turn(wheel.HERE, 0, {"a": 1.0}), turn(wheel.WHEEL, 0, {"a": speed})])
    row = next(line for line in said.splitlines() if " a " in line)
    assert row.endswith(" *") == mark and f"{speed:.3f}" in row
    assert f"{1 if mark else 2} of 2 medians are within 3% of 1" in said  # the other is the memory


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


def test_topics() -> None:
    assert wheel.topics_of(["auto", "float32"]) == ["embed", "generate", "embed float32", "generate float32"]


@pytest.mark.parametrize("given, words", [
    (["--computes", "auto,float64"], "got 'float64'"), ([], "is not the file of a wheel"),
    (["--rounds", "x"], "--rounds")])
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
    monkeypatch.setattr(wheel, "HASHES", tmp_path / "hashes.py")
    monkeypatch.setattr(wheel, "install", lambda path, folder: sys.executable)
    monkeypatch.setattr(wheel, "check_places", lambda facts, python: None)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    init = wheel.Wheels.__init__

    def same(self: Any, *given: Any) -> None:
        init(self, *given)
        self.builds = dict.fromkeys(self.builds, self.builds[wheel.HERE])

    monkeypatch.setattr(wheel.Wheels, "__init__", same)
    code = wheel.main([str(tmp_path / "mpool-1-cp311-abi3-linux.whl"), "--quick", "--rounds", "1", "--embedding-model",
                       str(bert), "--text-model", str(llama), "--json", str(tmp_path / "record.json")])
    return code, json.loads((tmp_path / "record.json").read_text())


@pytest.mark.builds
def test_a_run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch,
               capsys: pytest.CaptureFixture[str]) -> None:
    code, record = run(tmp_path, tmp_path_factory, monkeypatch, "print('{\"a\": \"1\", \"b\": \"2\"}')")
    assert code == 0 and record["failures"] == []
    assert {(entry["topic"], entry["engine"]) for entry in record["turns"]} == {
        (topic, engine) for topic in ("embed", "generate", "embed float32", "generate float32")
        for engine in (wheel.HERE, wheel.WHEEL)}
    assert {entry["compute"] for entry in record["turns"] if entry["topic"].endswith("float32")} == {"float32"}
    assert records.problems({**record, "commit": record["commit"] or "0" * 40}) == ["--quick measures nothing"]
    assert record["agreement"] == {"equal hashes of results": {wheel.WHEEL: "2 of 2"}}
    assert record["weights"]["wheel"]["path"] == "mpool-1-cp311-abi3-linux.whl"
    assert str(tmp_path) not in json.dumps(record)
    said = capsys.readouterr().out
    assert "mixed texts/s" in said and "pp16 tokens/s" in said and "medians are within 3% of 1" in said


@pytest.mark.builds
def test_a_run_with_other_hashes_fails(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory,
                                       monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, record = run(tmp_path, tmp_path_factory, monkeypatch,
                       "import json, os\nprint(json.dumps({'a': os.getpid()}))")
    assert code == 1 and record["failures"] == ["the hash of a differs between the builds"]
    assert "FAILED: the hash of a differs" in capsys.readouterr().out
