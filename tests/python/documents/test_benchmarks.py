"""Every benchmark runs with tiny models."""

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

from benchmarks import kernel_rates, low_bits, record as records, synthetic  # noqa: E402

#: Options of a short run of each command. Those in braces are files, see :func:`test_command_runs`.
RUNS = {
    "compare": "--quick --rounds 1 --again 0 --engines mpool --embedding-model {bert} --text-model {llama} "
               "--json {json}",
    "contexts": "{gguf} --bytes 1e6 --lengths 20 40 --tokens 4 --turns 1 --json {json}",
    "turns": "{gguf} --length 40 --new 8 --rounds 1 --json {json}",
    "half-memory": "{gguf} --engines mpool --prompt 16 --tokens 4 --rounds 1 --faked --share 100 --json {json}",
    "masks": "--model {llama} --rounds 1 --tokens 20 --threads 1",
    "pool": "--quick --parts calls threads beside --embedding-model {bert} --text-model {llama}",
    "serving overhead": "--count 5 --tokens 8 --rounds 1 --threads 1 --embedding {bert} --text {llama}",
    "serving throughput": "--clients 1 3 --seconds 0.2 --tokens 4 --rounds 1 --threads 1 --embedding {bert} "
                          "--text {llama}",
    "serving embeddings": "--clients 1 3 --seconds 0.3 --texts 1 5 --rounds 1 --embedding {bert}",
    "replay": "--larger 1",
}
#: Commands that take minutes, or link the extension. Two make models of published shapes with torch, and compare
#: results with those of a peer.
LONG = {
    "replay --turns 1": "{gguf} --rounds 1 --larger 1 --json {json}",
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

