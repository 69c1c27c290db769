"""Every benchmark runs with tiny models, and published ratios keep their rules."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import quantisedfiles
import tinymodels
from realmodels import real_path

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / "benchmarks" / "__main__.py").exists():
    pytest.skip("needs the benchmarks", allow_module_level=True)
sys.path.append(str(ROOT))  # at the end: the sources must not hide the installed package

from benchmarks import __main__ as commands  # noqa: E402
from benchmarks import kernel_rates, low_bits, record as records, report, synthetic  # noqa: E402
from benchmarks.probe import Frame, Probe  # noqa: E402
from benchmarks.record import Turn  # noqa: E402

NEAR = {"round_trip_ns": 105.0, "read_1": 40.0, "read_2": 53.0}
FAR = {"round_trip_ns": 520.0, "read_1": 42.0, "read_2": 85.0}


def test_every_command_is_described() -> None:
    """In the README, in the help text, and by a module that reads the command line."""
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    described = set(re.findall(r"`([a-z-]+)[^`|]*`(?=[^|]*\|[^|]*\|[^|]*\|$)", readme, re.MULTILINE))
    assert described == set(commands.COMMANDS)
    assert re.findall(r"^ {4}([a-z-]+) {2,}", commands.__doc__ or "", re.MULTILINE) == list(commands.COMMANDS)
    for module in commands.COMMANDS.values():
        tree = ast.parse((ROOT / "benchmarks" / f"{module}.py").read_text())
        assert any(isinstance(part, ast.FunctionDef) and part.name == "main" for part in tree.body), module


#: Options of a short run of each command. Those in braces are files, see :func:`test_command_runs`.
RUNS = {
    "compare": "--quick --rounds 1 --again 0 --engines mpool --embedding-model {bert} --text-model {llama} "
               "--json {json}",
    "contexts": "{gguf} --bytes 1e6 --lengths 20 40 --tokens 4 --turns 1 --json {json}",
    "half-memory": "{gguf} --engines mpool --prompt 16 --tokens 4 --rounds 1 --faked --share 100 --json {json}",
    "masks": "--model {llama} --rounds 1 --tokens 20 --threads 1",
    "pool": "--quick --parts calls threads beside --embedding-model {bert} --text-model {llama}",
    "serving overhead": "--count 5 --tokens 8 --rounds 1 --threads 1 --embedding {bert} --text {llama}",
    "serving throughput": "--clients 1 3 --seconds 0.2 --tokens 4 --rounds 1 --threads 1 --embedding {bert} "
                          "--text {llama}",
    "serving embeddings": "--clients 1 3 --seconds 0.3 --texts 1 5 --rounds 1 --embedding {bert}",
}
#: Commands that take minutes. Two make models of published shapes with torch, and compare results with those of a peer.
LONG = {
    "low-bits": "--quick --vocabulary {vocabulary} --folder {folder} --json {json}",
    "success": "--sizes 0.03 --tokens 8 --words 4 --folder {folder} --vocabulary {smollm2} --json {json}",
    "images": "--quick --rounds 1 --shapes dinov2-s --engines mpool:float32,torch --json {json}",
    "outputs": "--quick --rounds 1 --shapes colbert --engines mpool:float32,sentence-transformers --json {json}",
}


@pytest.mark.builds
@pytest.mark.parametrize("command", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)])
def test_command_runs(command: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A short run prints figures. If it writes a record, this has all fields and no failure."""
    peers = ["sentence_transformers"] if command in ("images", "outputs") else []
    for needed in ("gguf", "uvicorn", "llguidance", *peers):
        pytest.importorskip(needed)
    vocabulary, gguf = quantisedfiles.write("llama", "F32", tmp_path), tmp_path / "model.gguf"
    out = tmp_path / "out.json"
    synthetic.qwen3(str(gguf), str(vocabulary), **low_bits.SMALL)
    files: dict[str, Any] = {
        "bert": tinymodels.cached(tmp_path_factory, "bert"), "llama": tinymodels.cached(tmp_path_factory, "llama"),
        "gguf": gguf, "vocabulary": vocabulary, "folder": tmp_path, "json": out,
        "smollm2": real_path("smollm2") if command == "success" else ""}
    words = [word.format(**files) for word in (RUNS | LONG)[command].split()]
    done = subprocess.run([sys.executable, "-m", "benchmarks", *command.split(), *words], cwd=ROOT, capture_output=True,
                          text=True, timeout=900)
    # times of `success` mean nothing on a machine in use
    assert done.returncode == 0 or command == "success" and done.returncode == 1, done.stderr[-3000:]
    assert re.search(r"\d", done.stdout)
    if "{json}" in (RUNS | LONG)[command]:
        found = json.loads(out.read_text())
        problems = records.problems({**found, "commit": found["commit"] or "0" * 40})
        assert [problem for problem in problems if "--quick" not in problem] == [] and found["failures"] == []
        assert str(tmp_path) not in out.read_text()
        for name, cosines in found["agreement"].items():
            assert "cosine" not in name or all(cosine >= 0.9999 for cosine in cosines.values())


def test_the_benchmark_of_kernels_compiles() -> None:
    """The program is built only on demand, so this test checks that it still compiles."""
    builder = kernel_rates.test_builder()
    variant = builder.VARIANTS["release"]
    compiler = builder.compiler_of(variant)
    if compiler is None:
        pytest.skip("no C compiler")
    run = subprocess.run([*compiler, *builder.BASE_FLAGS, *variant.flags, "-fsyntax-only", f"-I{ROOT / 'csrc'}",
                          str(ROOT / "benchmarks" / "bench_kernels.c")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_probe() -> None:
    """The probe's results are physically plausible."""
    probe = Probe()
    if not probe.works:
        pytest.skip("no C compiler")
    found = probe.run()
    assert found is not None and 0.05 < found["read_1"] < 10_000 and found["read_2"] > 0.05
    assert len(probe.cpus) < 2 or 1 < found["round_trip_ns"] < 1e9


# ---- rules of ratios -------------------------------------------------------------------------------------------------

def turn(engine: str, number: int, measures: dict[str, float], state: dict[str, float] = NEAR,
         others: float = 0.0) -> Turn:
    """Return a measurement of an engine in a round."""
    return Turn("embed", engine, number, {"measures": measures, "rss MB": 100.0}, Frame(state, state, others))


def test_ratios_compare_turns_of_a_round() -> None:
    """Above 1, mpool is better: larger rates, smaller times and memory."""
    turns = [turn("mpool", 0, {"mixed texts/s": 200.0, "one text ms": 2.0}),
             turn("peer", 0, {"mixed texts/s": 100.0, "one text ms": 6.0}),
             turn("mpool", 1, {"mixed texts/s": 20.0, "one text ms": 20.0}),  # both are slow in this round
             turn("peer", 1, {"mixed texts/s": 10.0, "one text ms": 60.0})]
    rows = report.summary(turns)["embed"]
    assert rows["mixed texts/s"]["peer"] == {
        "median": 55.0, "min": 10.0, "max": 100.0, "n": 2, "turns": 2, "against": "mpool", "ratio": 2.0,
        "ratio_min": 2.0, "ratio_max": 2.0, "pairs": 2, "ratio_n": 2}
    assert rows["one text ms"]["peer"]["ratio"] == 3.0 and rows["memory MB"]["peer"]["ratio"] == 1.0


def test_disturbed_turns_and_other_states_are_not_compared() -> None:
    good = [turn("mpool", 0, {"a": 2.0}), turn("peer", 0, {"a": 1.0})]
    bad = [turn("mpool", 0, {"a": 2.0}, others=0.5), turn("peer", 0, {"a": 100.0}, others=0.5)]
    best = report.summary(good + bad)["embed"]["a"]["peer"]
    assert (best["median"], best["n"], best["turns"], best["ratio"], best["pairs"]) == (1.0, 1, 2, 2.0, 1)
    worst = report.summary(bad)["embed"]["a"]["peer"]  # no others: `n` and `pairs` say so
    assert (worst["median"], worst["n"], worst["ratio"], worst["pairs"]) == (100.0, 0, 0.02, 0)
    far = report.summary([*good, turn("peer", 0, {"a": 4.0}, FAR)])["embed"]["a"]["peer"]
    assert (far["median"], far["ratio"], far["pairs"]) == (2.5, 2.0, 1)


def test_a_peer_is_compared_in_its_own_compute_type() -> None:
    """If mpool was measured in it, else with the default; those that generate compute with weights as stored."""
    engines = ["mpool", "mpool:float32", "mpool:int8", "openvino", "openvino:int8:latency", "openvino:bfloat16"]
    assert [report.against(engine, engines) for engine in engines] == \
        [None, "mpool", "mpool", "mpool:float32", "mpool:int8", "mpool"]
    assert report.against("llama-cpp", ["mpool", "mpool:float32", "llama-cpp"]) == "mpool"
