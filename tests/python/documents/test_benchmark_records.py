"""Records of the benchmarks that compare variants of mpool, and models of experts with a routing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpool
import quantisedfiles
import tinymodels
from benchmarkrecords import check_record

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / "benchmarks" / "__main__.py").exists():
    pytest.skip("needs the benchmarks", allow_module_level=True)
sys.path.append(str(ROOT))  # at the end: the sources must not hide the installed package

from benchmarks import adapters, engines, half_memory, low_bits, synthetic  # noqa: E402


@pytest.mark.builds
def test_contexts(tmp_path: Path) -> None:
    """Each length has its rates, and every prompt is a turn of the record."""
    pytest.importorskip("gguf")
    model, path = tmp_path / "model.gguf", tmp_path / "record.json"
    synthetic.qwen3(str(model), str(quantisedfiles.write("llama", "F32", tmp_path)), **low_bits.SMALL)
    done = subprocess.run([sys.executable, "-m", "benchmarks", "contexts", str(model), "--bytes", "1e6", "--lengths",
                           "20", "40", "--tokens", "4", "--turns", "2", "--json", str(path)], cwd=ROOT,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["length"] for row in rows] == [20, 40] and all(row["decode"] > 0 for row in rows)
    record = check_record(path, "contexts", {f"context of {length}, auto": {"mpool"} for length in (20, 40)},
                          {"last 512 tokens/s", "decode tokens/s"})
    assert [turn["round"] for turn in record["turns"]] == [0, 1] * 2
    assert record["weights"]["model"]["path"] == model.name


@pytest.mark.builds
def test_drafts(tmp_path: Path) -> None:
    """Code and prose have a turn with and one without the draft model in each round."""
    pytest.importorskip("gguf")
    model, path = str(quantisedfiles.write("llama", "F32", tmp_path)), tmp_path / "record.json"
    done = subprocess.run([sys.executable, "-m", "benchmarks", "drafts", "--model", model, "--draft", model, "--rounds",
                           "2", "--tokens", "8", "--json", str(path)], cwd=ROOT, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr
    record = check_record(path, "drafts", {kind: {"mpool", "mpool:draft"} for kind in ("code", "prose")},
                          {"decode tokens/s"})
    assert record["agreement"] == {"completions are the same": {"mpool:draft": True}}
    assert [turn["round"] for turn in record["turns"]] == [0, 0, 1, 1] * 2
    assert all(cell["against"] == "mpool" for cell in [record["summary"]["code"]["decode tokens/s"]["mpool:draft"]])


@pytest.mark.builds
@pytest.mark.parametrize(("command", "engines", "unit", "libraries"), [
    ("maxsim", {"torch", "mpool:float32", "mpool:int8"}, "one query ms", {"torch": "torch"}),
    ("static", {"tokenizer", "mpool", "mpool:core"}, "texts/s", {"tokenizer": "tokenizers"})])
def test_engines_of_one_process(tmp_path: Path, command: str, engines: set[str], unit: str,
                                libraries: dict[str, str]) -> None:
    """Every turn has all engines of the command, with the version of each library."""
    for package in libraries.values():
        pytest.importorskip(package)
    path = tmp_path / "record.json"
    done = subprocess.run([sys.executable, "-m", "benchmarks", command, "--turns", "2", "--json", str(path)], cwd=ROOT,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    if command == "static" and importlib.util.find_spec("model2vec"):
        engines, libraries = engines | {"model2vec"}, {**libraries, "model2vec": "model2vec"}
    record = check_record(path, command, {command: engines}, {unit})
    assert [turn["round"] for turn in record["turns"]] == [0] * len(engines) + [1] * len(engines)
    own = {engine: mpool.__version__ for engine in engines - set(libraries)}
    versions = {engine: metadata.version(package) for engine, package in libraries.items()}
    assert record["versions"] == {"mpool": mpool.__version__, **own, **versions}


@pytest.mark.slow
def test_outputs(tmp_path: Path) -> None:
    """On small work, mpool and sentence-transformers compute the same vectors of tokens."""
    pytest.importorskip("sentence_transformers")
    path = tmp_path / "record.json"
    command = ["-m", "benchmarks", "outputs", "--quick", "--rounds", "1", "--shapes", "colbert", "--engines",
               "mpool:float32,sentence-transformers", "--json", str(path)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads(path.read_text())
    assert record["agreement"]["colbert: least cosine to sentence-transformers"]["mpool:float32"] >= 0.9999
    assert {turn["engine"] for turn in record["turns"]} == {"mpool:float32", "sentence-transformers"}


@pytest.mark.builds
@pytest.mark.parametrize(("family", "topics", "unit"), [
    ("bert", ("2 texts of 10 words", "2 texts of 33 words"), "texts/s"), ("llama", ("2 streams",), "tokens/s")])
def test_adapters(tmp_path: Path, family: str, topics: tuple[str, ...], unit: str) -> None:
    """Each turn has the rates without and with the adapter, which changes the vectors of an encoder."""
    pytest.importorskip("gguf")
    model = getattr(tinymodels, family)(tmp_path / family)
    path, adapter = tmp_path / "record.json", tmp_path / "adapter.gguf"
    done = subprocess.run([sys.executable, "-m", "benchmarks", "adapters", "--model", str(model), "--rank", "4",
                           "--rows", "2", "--turns", "2", "--json", str(path)], cwd=ROOT, capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    record = check_record(path, "adapters", {topic: {"mpool", "mpool:adapter"} for topic in topics}, {unit})
    assert [turn["round"] for turn in record["turns"]] == [0, 0, 1, 1] * len(topics)
    adapters.write_adapter(adapter, str(model), 4, adapters.LAYERS)
    if family == "bert":
        with mpool.Pool() as pool:
            pool.load(model, adapters={"it": adapter})
            plain, changed = (pool.embed("a text", model, adapter=name) for name in (None, "it"))
        assert np.dot(plain, changed) < 0.99


@pytest.mark.builds
def test_a_ballast_holds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process holds what is available above the limit until the run ends; the engine is killed before others."""
    held: list[subprocess.Popen[str]] = []

    class Popen(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            held.append(self)

    monkeypatch.setattr(half_memory, "available", lambda: 150 << 20)
    monkeypatch.setattr(half_memory.subprocess, "Popen", Popen)
    with half_memory.ballast(100 << 20) as enter:
        status = Path(f"/proc/{held[0].pid}/status").read_text()
        assert int(re.search(r"VmRSS:\s*(\d+) kB", status)[1]) >= 50 << 10  # type: ignore[index]
    assert held[0].wait(10) == 0
    score = subprocess.run([sys.executable, "-c", "print(open('/proc/self/oom_score_adj').read())"], text=True,
                           capture_output=True, preexec_fn=enter, check=True)
    assert score.stdout.strip() == "1000"
    with pytest.raises(RuntimeError, match="not available"), half_memory.ballast(200 << 20):
        pass


def test_half_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn is a process in a new group with a limit of half the file, and the record counts the faults."""
    pytest.importorskip("gguf")
    model, path, parent = tmp_path / "model.gguf", tmp_path / "record.json", tmp_path / "group"
    synthetic.qwen3(str(model), str(quantisedfiles.write("llama", "F32", tmp_path)), layers=1, heads=2, kv_heads=1,
                    feed=256, experts=8, used=2, width=256, words=2000, routing="uniform")
    parent.mkdir()
    kept: list[dict[str, str]] = []

    def remove(group: half_memory.Group) -> None:  # files of a control group need not be removed before it
        kept.append({file.name: file.read_text() for file in group.folder.iterdir()})
        shutil.rmtree(group.folder)

    monkeypatch.setattr(half_memory.Group, "remove", remove)
    command = ["half-memory", str(model), "--engines", "mpool", "--prompt", "16", "--tokens", "4", "--rounds", "1",
               "--json", str(path)]
    for version, name in (("v2", "memory.max"), ("v1", "memory.limit_in_bytes")):
        if version == "v1":
            (parent / name).write_text("1")
        kept.clear()
        monkeypatch.setattr(sys, "argv", [*command, "--group", str(parent)])
        half_memory.main()  # the disk of a test may keep files in the cache, which is a failure of the run
        group, = kept
        assert group[name] == str(model.stat().st_size // 2) and int(group["cgroup.procs"]) != os.getpid()
    found = json.loads(path.read_text())
    found["failures"] = [failure for failure in found["failures"] if "cache" not in failure]
    path.write_text(json.dumps(found))
    record = check_record(path, "half-memory", {"0.5 of the file": {"mpool"}},
                          {"first pp512 tokens/s", "pp16 tokens/s", "tg@8 tokens/s"})
    assert all(turn["counts"]["major faults"] >= 0 for turn in record["turns"])
    monkeypatch.setattr(sys, "argv", [*command, "--faked", "--share", "100"])  # the file is small
    half_memory.main()
    assert list(json.loads(path.read_text())["summary"]) == ["100 of the file, faked"]


def test_llama_cpp_without_copies() -> None:
    """With the variant ``mapped``, llama.cpp copies no weights."""
    settings = SimpleNamespace(use_extra_bufts=True)
    low = SimpleNamespace(llama_model_default_params=lambda: settings)

    class Llama:
        def __init__(self, path: str, **options: Any) -> None:
            self.copies = low.llama_model_default_params().use_extra_bufts

        def n_vocab(self) -> int:
            return 1

    for variant, copies in (("", True), ("mapped", False)):
        engine = engines.LlamaCpp(variant)
        engine.lib = SimpleNamespace(llama_cpp=low, Llama=Llama,
                                     llama_model_default_params=lambda: SimpleNamespace(use_extra_bufts=True))
        engine.load("model.gguf", 1, 64)
        assert engine.model.copies is copies
    with pytest.raises(ValueError, match="mapped"):
        engines.LlamaCpp("packed")


def test_a_group_without_a_limit_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, text: str) -> int:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(PermissionError):
        half_memory.Group(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.builds
def test_mapped_weights(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, path = tinymodels.cached(tmp_path_factory, "bert"), tmp_path_factory.mktemp("record") / "record.json"
    done = subprocess.run([sys.executable, "-m", "benchmarks", "mapped", str(folder), "--rounds", "1", "--json",
                           str(path)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    record = check_record(path, "mapped", {"encoder": {"mpool", "mpool:packed", "mpool:mapped", "mpool:fast"}},
                          {"first result s", "anonymous MB after it", "anonymous MB at the end",
                           *(f"{count} texts: texts/s" for count in (1, 2, 16))})
    assert record["agreement"] == {"different results of packed, mapped and auto": {"mpool": 1}}
    assert "digests of the results of packed, mapped and auto: 1;" in done.stdout
    kinds = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith(("packed", "mapped"))}
    assert "'weights': ['packed']" in kinds["packed"] and "'weights': ['mapped']" in kinds["mapped"]
    for count in (1, 2, 16):
        assert f"{count} texts: texts/s: fast over packed " in done.stdout


@pytest.mark.sample(3)
@pytest.mark.parametrize(("write", "sizes", "kind"), [
    (synthetic.qwen3, {"heads": 4, "kv_heads": 2, "feed": 256, "used": 1}, "Q6_K"),
    (synthetic.gpt_oss, {"heads": 8}, "Q8_0"), (synthetic.deepseek, {"heads": 4, "feed": 256}, "Q4_K")])
def test_routing_of_synthetic_models(write: Any, sizes: dict[str, Any], kind: str, tmp_path: Path) -> None:
    """The routers prefer experts as ``--routing`` says, for the rows that the embeddings give."""
    gguf = pytest.importorskip("gguf")
    vocabulary, words, experts = str(quantisedfiles.write("llama", "F32", tmp_path)), 2000, 32
    used: dict[str, Any] = {}
    for routing in synthetic.ROUTINGS:
        path = str(tmp_path / f"{routing}.gguf")
        write(path, vocabulary, layers=1, width=768, words=words, experts=experts, routing=routing, **sizes)
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        rows = gguf.dequantize(tensors["token_embd.weight"].data, gguf.GGMLQuantizationType[kind])
        rows /= np.sqrt((rows ** 2).mean(1, keepdims=True))
        best = np.argmax(rows @ np.asarray(tensors["blk.0.ffn_gate_inp.weight"].data).T, axis=1)
        used[routing] = np.bincount(best, minlength=experts) / words
    assert used["one"][0] == 1
    assert used["uniform"].max() < 3 / experts and used["uniform"].min() > 0.3 / experts
    expected = 1 / np.arange(1, experts + 1) / sum(1 / number for number in range(1, experts + 1))
    assert np.abs(used["zipf"][:6] - expected[:6]).max() < 0.3 * expected[0]
    assert np.all(np.diff(used["zipf"][[0, 1, 3, 7, 15]]) < 0) and used["zipf"][16:].sum() < 0.25


@pytest.mark.slow
def test_layers_choose_the_experts_of_the_routing(tmp_path: Path) -> None:
    """If every row chooses the same expert, a model packs this expert of each layer and no other."""
    pytest.importorskip("gguf")
    vocabulary, packed = str(quantisedfiles.write("llama", "F32", tmp_path)), {}
    for routing in synthetic.ROUTINGS:
        path = str(tmp_path / f"{routing}.gguf")
        synthetic.qwen3(path, vocabulary, layers=4, heads=4, kv_heads=2, feed=256, experts=16, used=1, width=512,
                        words=2000, routing=routing)
        with mpool.Pool() as pool:
            for turn in range(4):  # a pass packs experts for a limited time
                pool.generate([number * 7 % 1900 + turn for number in range(200)], model=path, max_tokens=1,
                              temperature=0)
            facts = pool.ps()[0].facts
        packed[routing] = facts["expert_packed_bytes"] / facts["expert_bytes"] * 16
    assert 0.9 < packed["one"] < 1.3 and packed["one"] < packed["zipf"] and packed["one"] < packed["uniform"]
