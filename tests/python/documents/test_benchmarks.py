"""The benchmarks run, and their reports follow from their measurements."""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import imagemodels
import mpool
import quantisedfiles
import tinymodels
from benchmarkrecords import check_record
from realmodels import real_path

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / "benchmarks" / "__main__.py").exists():
    pytest.skip("needs the benchmarks", allow_module_level=True)
sys.path.append(str(ROOT))  # at the end: the sources must not hide the installed package

from benchmarks import __main__ as commands  # noqa: E402
from benchmarks import compare, engines, http_client, ik, kernel_rates, limits, peers, plot, policies  # noqa: E402
from benchmarks import record as records, report, synthetic, tables, texts, timing  # noqa: E402
from benchmarks.probe import Frame, Probe, Watch, disturbance  # noqa: E402
from benchmarks.record import Turn  # noqa: E402

NEAR = {"round_trip_ns": 105.0, "read_1": 40.0, "read_2": 53.0}
FAR = {"round_trip_ns": 520.0, "read_1": 42.0, "read_2": 85.0}


#: A program that reports constant rates in the format of llama-bench, twice as high with repacking at run time.
FAKE_LLAMA_BENCH = """#!{python}
import json, sys
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
by = 1 + int(arguments["-rtr"])
depth, written = map(int, arguments["-gp"].split(","))
print(json.dumps([{{"n_prompt": int(arguments["-p"]), "n_gen": 0, "samples_ts": [150 * by] * int(arguments["-r"]),
                   "build_commit": "8337e4cd3"}},
                  {{"n_prompt": depth, "n_gen": written, "samples_ts": [10 * by] * int(arguments["-r"])}}]))
"""


#: The program prints its table among other lines. It runs with and without -rtr; the better run counts.
FAKE_BATCHED_BENCH = """#!{python}
import sys
numbers = dict(zip(sys.argv[1:], sys.argv[2:]))["-npl"].split(",")
print("main: n_kv_max = 88\\n\\n|    PP |     TG |    B |   N_KV | S_TG t/s |\\n|-------|--------|------|--------|---|")
for number, batch in enumerate(numbers):
    print("|     8 |      4 |    %s |     24 | %8.2f |" % (batch, ("-rtr" in sys.argv) * 20 + 20 + number))
"""


def turn(engine: str, number: int, measures: dict[str, float], state: dict[str, float] = NEAR, others: float = 0.0,
         **more: Any) -> Turn:
    """Return a measurement of an engine in a round."""
    result = {"measures": measures, "rss MB": 100.0, **more}
    return Turn("embed", engine, number, result, Frame(state, state, others))


def test_every_command_is_described() -> None:
    """In the README, in the help text, and by a module that reads the command line."""
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    described = set(re.findall(r"`([a-z-]+)[^`|]*`(?=[^|]*\|[^|]*\|[^|]*\|$)", readme, re.MULTILINE))
    assert described == set(commands.COMMANDS)
    assert re.findall(r"^ {4}([a-z-]+) {2,}", commands.__doc__ or "", re.MULTILINE) == list(commands.COMMANDS)
    for module in commands.COMMANDS.values():
        tree = ast.parse((ROOT / "benchmarks" / f"{module}.py").read_text())
        assert any(isinstance(part, ast.FunctionDef) and part.name == "main" for part in tree.body), module


def test_measured_processes_have_bytecode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Bytecode is compiled before a command runs, and the processes that it starts may write more."""
    package = tmp_path / "mpool"
    (package / "inner").mkdir(parents=True)
    for folder in (package, package / "inner"):
        (folder / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(commands.importlib.util, "find_spec",
                        lambda name: types.SimpleNamespace(submodule_search_locations=[str(package)]))
    commands.write_bytecode()
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ
    assert len(list(package.rglob("*.pyc"))) == 2


def test_texts_are_reproducible() -> None:
    """Texts depend on a fixed seed only and have the requested lengths."""
    assert texts.mixed(50) == texts.mixed(50) and len(set(texts.mixed(384))) == 384
    assert {len(text.split()) for text in texts.same(20, 90)} == {90}
    assert len(texts.prose(1000).split()) == 1000


def test_mixed_texts_have_the_length_of_natural_sentences() -> None:
    """Texts have 31 tokens on average in the vocabulary of MiniLM."""
    from mpool.tokenizers import Tokenizer

    from mpool.models import describe

    tokenizer = Tokenizer.from_source(describe(str(real_path("minilm"))).tokenizer)
    assert 30 <= statistics.mean(len(tokenizer.encode(text)) for text in texts.mixed(384)) <= 32


def test_ratios_above_one_mean_that_mpool_is_better() -> None:
    """Larger rates and smaller times and memory are better. A ratio compares measurements of the same round."""
    turns = [turn("mpool", 0, {"mixed texts/s": 200.0, "one text ms": 2.0}),
             turn("peer", 0, {"mixed texts/s": 100.0, "one text ms": 6.0}),
             turn("mpool", 1, {"mixed texts/s": 20.0, "one text ms": 20.0}),  # both are slow in this round
             turn("peer", 1, {"mixed texts/s": 10.0, "one text ms": 60.0})]
    rows = report.summary(turns)["embed"]
    assert rows["mixed texts/s"]["peer"] == {
        "median": 55.0, "min": 10.0, "max": 100.0, "n": 2, "turns": 2, "against": "mpool", "ratio": 2.0,
        "ratio_min": 2.0, "ratio_max": 2.0, "pairs": 2, "ratio_n": 2}
    assert rows["one text ms"]["peer"]["median"] == 33.0 and rows["one text ms"]["peer"]["ratio"] == 3.0
    assert rows["memory MB"]["peer"]["ratio"] == 1.0


def test_failures_name_no_folder_of_the_machine() -> None:
    trace = f'  File "{Path.home()}/x.py", line 1\nOSError: {Path.home()}/model.gguf is missing\n'
    assert report.last_line(trace) == "OSError: ~/model.gguf is missing" and report.last_line("") == ""


def test_disturbed_measurements_are_excluded() -> None:
    """Disturbed measurements count in no median or ratio, unless there are no others; then `pairs` is 0."""
    good = [turn("mpool", 0, {"a": 2.0}), turn("peer", 0, {"a": 1.0})]
    bad = [turn("mpool", 0, {"a": 2.0}, others=0.5), turn("peer", 0, {"a": 100.0}, others=0.5)]
    assert [entry.disturbed is None for entry in good + bad] == [True, True, False, False]
    best = report.summary(good + bad)["embed"]["a"]["peer"]
    assert (best["median"], best["max"], best["n"], best["turns"]) == (1.0, 1.0, 1, 2)
    assert (best["ratio"], best["pairs"], best["ratio_n"]) == (2.0, 1, 1)
    worst = report.summary(bad)["embed"]["a"]["peer"]
    assert (worst["median"], worst["n"], worst["ratio"], worst["pairs"]) == (100.0, 0, 0.02, 0)


def test_measurements_in_different_machine_states_are_not_compared() -> None:
    """Two undisturbed measurements give no ratio if the machine was in different states."""
    turns = [turn("mpool", 0, {"a": 2.0}, NEAR), turn("peer", 0, {"a": 1.0}, NEAR), turn("peer", 0, {"a": 4.0}, FAR)]
    assert all(entry.disturbed is None for entry in turns)
    cell = report.summary(turns)["embed"]["a"]["peer"]
    assert (cell["median"], cell["ratio"], cell["pairs"]) == (2.5, 2.0, 1)


def test_repetitions_in_the_fastest_state_are_compared() -> None:
    """If the machine changes its state within turns, the medians tell which engine met the slow state. The fastest
    tenth of the repetitions of all turns compares the engines."""
    slow, fast = [50.0] * 5, [88.0, 90.0, 91.0]
    turns = [turn("mpool", 0, {"a": 50.0}, samples={"a": slow + fast[:1]}), turn("mpool", 1, {"a": 90.0},
                                                                               samples={"a": fast})]
    turns += [turn("peer", 0, {"a": 75.0}, samples={"a": [75.0] * 8 + [74.0]}), turn("old", 0, {"a": 75.0})]
    row = report.summary(turns)["embed"]["a"]
    assert row["mpool"]["fast"] == 91.0 and row["peer"]["fast"] == 75.0
    assert row["peer"]["fast_ratio"] == pytest.approx(91 / 75)
    assert "fast" not in row["old"] and "fast_ratio" not in row["old"]  # records without repetitions
    assert turns[0].as_json()["samples"] == {"a": slow + fast[:1]} and "samples" not in turns[-1].as_json()


def test_repeated_turns_of_a_round_count_once() -> None:
    """Two turns of one engine and three of another give six pairs, but no more than two independent ratios."""
    turns = [turn("mpool", 0, {"a": 2.0 + at}) for at in range(2)]
    turns += [turn("peer", 0, {"a": 1.0}) for _ in range(3)]
    cell = report.summary(turns)["embed"]["a"]["peer"]
    assert (cell["pairs"], cell["ratio_n"], cell["ratio_min"], cell["ratio_max"]) == (6, 2, 2.0, 3.0)


def test_a_peer_is_compared_at_its_own_precision() -> None:
    """A peer is compared with mpool at the same precision if that was measured, else with the default."""
    engines = ["mpool", "mpool:float32", "mpool:int8", "openvino", "openvino:int8:latency", "openvino:bfloat16"]
    assert [report.against(engine, engines) for engine in engines] == \
        [None, "mpool", "mpool", "mpool:float32", "mpool:int8", "mpool"]
    assert report.against("openvino", ["openvino"]) is None
    turns = [turn("mpool:int8", 0, {"a": 6.0}), turn("mpool", 0, {"a": 2.0}), turn("openvino:int8", 0, {"a": 3.0})]
    assert report.summary(turns)["embed"]["a"]["openvino:int8"]["ratio"] == 2.0


def test_peers_that_generate_are_compared_with_the_default() -> None:
    """llama.cpp computes with the weights as stored, as mpool's default does, and not in float32."""
    assert report.against("llama-cpp", ["mpool", "mpool:float32", "llama-cpp"]) == "mpool"
    assert report.against("ik", ["mpool:float32", "ik"]) is None


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the peers' converted weights, which their settings share."""
    return tmp_path_factory.mktemp("peers")


@pytest.mark.parametrize("module, needs, engine", [
    ("onnxruntime", "onnx", "onnxruntime:float32"), ("onnxruntime", "onnx", "onnxruntime:int8"),
    ("openvino", "onnx", "openvino:float32:latency"), ("openvino", "onnx", "openvino:float32:throughput"),
    ("openvino", "onnx", "openvino:bfloat16:latency"), ("openvino", "onnx", "openvino:bfloat16:throughput"),
    ("openvino", "nncf", "openvino:int8:latency"), ("openvino", "nncf", "openvino:int8:throughput"),
    ("ctranslate2", "ctranslate2", "ctranslate2:float32:inter1"),
    ("ctranslate2", "ctranslate2", "ctranslate2:float32:inter2"),
    ("ctranslate2", "ctranslate2", "ctranslate2:int8:inter1"),
    ("ctranslate2", "ctranslate2", "ctranslate2:int8:inter2")])
def test_peers_compute_the_same_embeddings(converted: Path, module: str, needs: str, engine: str) -> None:
    """Installed peers give the embeddings of sentence-transformers with every setting, and when threads call them."""
    for needed in (module, needs, "sentence_transformers"):
        pytest.importorskip(needed)
    from sentence_transformers import SentenceTransformer

    path = str(real_path("minilm"))
    peer = engines.make("embed", engine, str(converted))
    peer.imports()
    peer.folder.mkdir(parents=True, exist_ok=True)
    peer.prepare(path)
    peer.load(path, 2)
    given = texts.mixed(80)
    want = SentenceTransformer(path, device="cpu").encode(given, normalize_embeddings=True)
    least = 0.95 if ":int8" in engine else 0.999 if ":bfloat16" in engine else 0.9999
    assert (peer.embed(given) * want).sum(1).min() > least
    alone: dict[int, np.ndarray] = {}
    timing.together(4, lambda number: alone.update({number: peer.embed([given[number]])}))
    assert all((alone[number][0] * want[number]).sum() > least for number in range(4))


class FakePeer(peers.Converted):
    """A peer whose hidden state of a text is its token ids; ``meet`` makes concurrent batches wait for each other."""

    module, variants, settings = "numpy", ("float32", "int8"), ("alone", "together")
    meet: threading.Barrier | None = None

    def start(self, threads: int) -> None:
        self.parallel = 2 if self.setting == "together" else 1
        self.meet = threading.Barrier(2) if self.setting == "together" else None

    def hidden(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        if self.meet is not None:
            self.meet.wait(30)
        return np.stack([ids, np.ones_like(ids)], axis=2).astype(np.float32)


@pytest.mark.sample(4)
@pytest.mark.parametrize("library", ["sentence_transformers", "optimum", "onnxruntime", "openvino", "ctranslate2"])
def test_no_module_of_the_benchmarks_hides_a_package(library: str) -> None:
    """Programs of the peers run by path, so modules beside them come first. transformers looks for a package of the
    name ``kernels``."""
    pytest.importorskip(library)
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); "
                           f"import {library}"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_batches_of_a_list_run_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a setting for throughput, a peer computes batches at the same time, and every text keeps its vector."""
    class Words:
        def __init__(self, path: str) -> None:
            self.batches = lambda given: [
                (np.array([at + 1, at]), np.array([[at + 2, 0], [at + 1, at + 1]]), np.array([[1, 0], [1, 1]]))
                for at in range(0, len(given), 2)]

    monkeypatch.setattr(peers, "Tokens", Words)
    found = []
    for setting in ("alone", "together"):
        peer = FakePeer("", str(tmp_path), setting)
        peer.load("", 2)
        found.append(peer.embed(["text"] * 8))
    assert np.array_equal(found[0], found[1])
    assert np.allclose(found[0][:, 0] / found[0][:, 1], np.arange(1, 9))
    with pytest.raises(ValueError, match="float32, int8, each with the settings alone, together"):
        FakePeer("int8", str(tmp_path), "fast")


def test_a_peer_takes_part_with_every_setting() -> None:
    """Engines that name no setting are measured with each; a named setting and other engines stay as they are."""
    given = ["mpool:int8", "openvino", "openvino:int8", "openvino:float32:latency", "ctranslate2:int8:inter2",
             "ctranslate2", "llama-cpp", "onnxruntime:int8"]
    assert compare.parse(["--engines", ",".join(given)]).engines == [
        "mpool:int8", "openvino:float32:latency", "openvino:float32:throughput", "openvino:int8:latency",
        "openvino:int8:throughput", "ctranslate2:int8:inter2", "ctranslate2:float32:inter1",
        "ctranslate2:float32:inter2", "llama-cpp", "onnxruntime:int8"]


def test_openvino_gets_its_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The setting is OpenVINO's performance hint. It says how many batches it computes at the same time."""
    given: dict[str, Any] = {}

    class Core:
        def compile_model(self, path: str, device: str, options: dict[str, Any]) -> Any:
            given.update(options, path=Path(path).name)
            return types.SimpleNamespace(get_property=lambda name: {"OPTIMAL_NUMBER_OF_INFER_REQUESTS": 3}[name])

    monkeypatch.setattr(peers, "version", lambda module: "1")
    for variant, setting, graph, precision, parallel in (
            ("float32", "latency", "plain.onnx", "f32", 1), ("bfloat16", "throughput", "plain.onnx", "bf16", 3),
            ("int8", "throughput", "int8.xml", "f32", 3)):
        peer = peers.OpenVino(variant, str(tmp_path), setting)
        peer.lib = types.SimpleNamespace(Core=Core)
        peer.start(2)
        assert given == {"path": graph, "INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": 2,
                         "PERFORMANCE_HINT": setting.upper()}
        assert peer.parallel == parallel


def test_ctranslate2_divides_its_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two inter threads share the compute threads, so that every engine uses the same number."""
    given: list[tuple[int, int]] = []

    def encoder(path: str, inter_threads: int, intra_threads: int, **more: Any) -> None:
        given.append((inter_threads, intra_threads))

    monkeypatch.setattr(peers, "version", lambda module: "1")
    for setting in ("inter1", "inter2"):
        peer = peers.CTranslate2("int8", str(tmp_path), setting)
        peer.lib = types.SimpleNamespace(Encoder=encoder)
        peer.start(2)
    assert given == [(1, 2), (2, 1)] and peer.parallel == 2


def test_an_engine_that_fails_leaves_its_topic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine that fails on a topic is not tried again there. Its failure is recorded once, and others go on."""
    run: list[tuple[str, str]] = []

    def fake_worker(self: compare.Bench, engine: str, task: dict[str, Any]) -> dict[str, Any]:
        run.append((engine, task["topic"]))
        if engine == "mpool:int8" and task["topic"] == "generate":
            raise RuntimeError("mpool:int8, generate: Unsupported")
        return {"measures": {"a": 1.0}, "rss MB": 1.0, "ids": [1]}

    (tmp_path / "x.Q4_K_M.gguf").write_bytes(b"weights")
    for name, value in (("run_worker", fake_worker), ("installed", lambda self, engine: True),
                        ("version", lambda self, engine: "1")):
        monkeypatch.setattr(compare.Bench, name, value)
    monkeypatch.setattr(compare, "weights", lambda ref, capability: str(tmp_path / "x.Q4_K_M.gguf"))
    monkeypatch.setattr(limits, "work", lambda *arguments: {})
    monkeypatch.setattr(Probe, "run", lambda self: {**NEAR, "fp32": 1.0, "bf16": 1.0, "int8": 1.0})
    monkeypatch.setattr(Watch, "__exit__", lambda self, *error: setattr(self, "others", 0.0))
    found = compare.Bench(compare.parse(["--engines", "mpool,mpool:int8", "--topics", "embed,generate",
                                         "--text-model", "x"])).run()
    assert run.count(("mpool:int8", "generate")) == 1 and run.count(("mpool:int8", "embed")) == 3
    assert run.count(("mpool", "generate")) == 3
    assert found["failures"] == ["mpool:int8, generate: Unsupported"]
    assert found["weights"]["generate"]["path"] == "x.Q4_K_M.gguf" and len(found["turns"]) == 9


def test_files_of_type_q4_k_m_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Peers repack Q4_K_M for their fastest kernels, so a comparison of text begins with such a file."""
    assert list(compare.text_topics(["/a/x.Q4_1.gguf", "/a/y-q4_k_m.gguf", "/b/z.Q8_0.gguf"]).items()) == [
        ("generate", "/a/y-q4_k_m.gguf"), ("generate:x.Q4_1.gguf", "/a/x.Q4_1.gguf"),
        ("generate:z.Q8_0.gguf", "/b/z.Q8_0.gguf")]
    assert capsys.readouterr().err == ""
    compare.text_topics(["/a/x.Q4_1.gguf"])
    assert "no file of type Q4_K_M is compared" in capsys.readouterr().err
    from mpool.models import load_catalogue

    first = load_catalogue().get(compare.TEXT_MODELS[0])
    assert first is not None and compare.FIRST in str(first.refs[0])


def test_percentiles_are_of_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 99th percentile of a turn comes from 2,000 calls, none with the same text."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # an engine's process runs worker.py by path
    worker = importlib.import_module("worker")
    given: list[str] = []
    found = worker.many_threads(types.SimpleNamespace(embed=given.extend), texts.same(compare.CALLS, 9, 2))
    assert len(given) == len(set(given)) == compare.CALLS == tables.ENOUGH_CALLS
    assert set(found) == {"8 threads calls/s", worker.P99}


def test_disturbances_are_detected() -> None:
    """Different machine states and CPU use of other processes are disturbances, and so is a missing probe."""
    assert disturbance([Frame(NEAR, NEAR, 0.01), Frame(NEAR, dict(NEAR, read_2=50.0), 0.0)]) is None
    assert "round_trip_ns" in str(disturbance([Frame(NEAR, NEAR, 0.0), Frame(FAR, FAR, 0.0)]))
    assert "read_2" in str(disturbance([Frame(NEAR, dict(NEAR, read_2=80.0), 0.0)]))
    assert disturbance([Frame(NEAR, NEAR, 0.5)]) == "other processes used 50% of the CPUs"
    assert disturbance([Frame(None, None, 0.0)]) == "no probe"


def test_probe() -> None:
    """The probe's results are physically plausible."""
    probe = Probe()
    if not probe.works:
        pytest.skip("no C compiler")
    found = probe.run()
    assert found is not None and 0.05 < found["read_1"] < 10_000 and found["read_2"] > 0.05
    assert len(probe.cpus) < 2 or 1 < found["round_trip_ns"] < 1e9
    assert all(0 <= found[name] < 1e6 for name in ("fp32", "bf16", "int8"))


def test_the_printed_table() -> None:
    """A cell has the median and the ratio with its pairs; `?` marks a ratio without comparable turns."""
    turns = [turn("mpool", 0, {"a texts/s": 10.0}), turn("openvino", 0, {"a texts/s": 4.0}),
             turn("onnxruntime", 0, {"a texts/s": 5.0}, FAR)]
    made = records.build("compare", 2, {}, turns, weights={}, versions={"mpool": "1"},
                         agreement={"cosine": {"mpool": 1}}, summary=report.summary(turns), failures=["peer: error"])
    lines = report.text(made).splitlines()
    row = next(line for line in lines if line.startswith("a texts/s"))
    assert row.split() == ["a", "texts/s", "10", "4", "(2.50x,", "1)", "5", "(2.00x,", "?)"]
    assert "cosine: mpool 1" in lines and "FAILED: peer: error" in lines


def test_agreement_of_engines() -> None:
    """The report compares the embeddings by cosine and the tokens by position."""
    turns = [turn("sentence-transformers", 0, {}, vectors=[[1.0, 0.0], [0.0, 1.0]]),
             turn("mpool", 0, {}, vectors=[[2.0, 0.0], [3.0, 4.0]], first=[1, 2, 3]),
             turn("llama-cpp", 0, {}, first=[1, 2, 4])]
    found = report.agreement(turns)
    assert found["least cosine to sentence-transformers"]["mpool"] == 0.8
    assert found["embed: greedy tokens alike with llama-cpp"]["mpool"] == "2 of 3"


def test_markdown_names_the_fastest_peer() -> None:
    """Each cell names the fastest peer at the precision of its column."""
    turns = [turn("mpool", 0, {"a texts/s": 10.0}), turn("mpool:int8", 0, {"a texts/s": 20.0}),
             turn("openvino", 0, {"a texts/s": 4.0}), turn("onnxruntime", 0, {"a texts/s": 5.0}),
             turn("onnxruntime:int8", 0, {"a texts/s": 8.0})]
    found = report.markdown({"summary": report.summary(turns)}).splitlines()
    assert found[0] == f"| {turns[0].topic} | mpool | mpool:int8 |"
    assert "| a texts/s | 10 (2.00x onnxruntime) | 20 (2.50x onnxruntime:int8) |" in found


@pytest.mark.builds
def test_a_stream_and_embeddings_run_concurrently(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither workload starves while the other runs."""
    bert, llama = (tinymodels.cached(tmp_path_factory, name) for name in ("bert", "llama"))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "pool", "--quick", "--no-c", "--parts", "beside", "--embedding-model",
         str(bert), "--text-model", str(llama)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = {name.strip(): float(value.replace(",", "")) for name, value in
            (line.strip("|").split("|") for line in done.stdout.splitlines() if line.startswith("| beside"))}
    assert len(rows) == 6 and all(value > 0 for value in rows.values())


@pytest.mark.builds
def test_clients_that_embed(tmp_path_factory: pytest.TempPathFactory) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "serving", "embeddings", "--embedding",
         str(tinymodels.cached(tmp_path_factory, "bert")), "--rounds", "1", "--seconds", "0.3", "--clients", "1", "3",
         "--texts", "1", "5"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [(row[0], row[1]) for row in rows] == [("1", "1"), ("1", "5"), ("3", "1"), ("3", "5")]
    assert all(float(row[2]) > 0 and int(row[-1]) >= int(row[0]) for row in rows)


@pytest.mark.slow
def test_shares(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """Tokenizers and images have a share between 0 and that of a request whose model does nearly nothing."""
    bert = tinymodels.cached(tmp_path_factory, "bert")
    vit = imagemodels.save(imagemodels.randomised("clip", 1), "clip", tmp_path / "vit")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "shares", "--embedding", str(bert), "--images", str(vit), "--turns", "1",
         "--count", "64", "--image-count", "1", "--json", str(tmp_path / "record.json")], cwd=ROOT, capture_output=True,
        text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    names = [row["row"] for row in rows]
    assert names == ["texts, natural", "texts, 10 words", "texts, 90 words", "images, JPEG 4032 x 3024",
                     "images, JPEG 640 x 480", "images, PNG 640 x 480", "images, PNG 224 x 224"]
    record = check_record(tmp_path / "record.json", "shares", {name: {"mpool"} for name in names},
                          {"alone ms", "whole ms"})
    assert set(record["weights"]) == {"embedding", "images"}
    assert all(0 < row["share"] and 0 < row["alone ms"] for row in rows)
    assert rows[3]["alone ms"] > 4 * rows[4]["alone ms"]


@pytest.mark.builds
def test_texts_between_parquet_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One process embeds all texts in batches, and says how its rate and memory develop."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "parquet", "--model", str(tinymodels.cached(tmp_path_factory, "bert")),
         "--texts", "12000", "--files", "3", "--ways", "process"], cwd=ROOT, capture_output=True, text=True,
        timeout=300)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[0])
    assert row["way"] == "process" and row["texts"] == 12_000 and row["texts/s"] > 0
    assert len(row["tenths"]) == 10 and min(row["tenths"]) > 0 and min(row["memory MB"]) > 0


def test_programs_of_ik_state_their_version(tmp_path: Path) -> None:
    """The better rate of the two runs counts, and the record names the commit of the programs."""
    (tmp_path / "llama-bench").write_text(FAKE_LLAMA_BENCH.format(python=sys.executable))
    (tmp_path / "llama-bench").chmod(0o755)
    (tmp_path / "llama-batched-bench").write_text(FAKE_BATCHED_BENCH.format(python=sys.executable))
    (tmp_path / "llama-batched-bench").chmod(0o755)
    found = ik.IkLlama(str(tmp_path)).measures({"path": "model.gguf", "threads": 1, "prompts": [16], "depths": [8],
                                                "write": 4, "repeat": 3, "streams": 2})
    assert found["measures"] == {"pp16 tokens/s": 300.0, "tg@8 tokens/s": 20.0, "2 streams tokens/s": 41.0}
    assert found["samples"] == {"pp16 tokens/s": [300.0] * 3, "tg@8 tokens/s": [20.0] * 3,
                                "2 streams tokens/s": [40.0, 41.0, 42.0]} and found["version"] == "8337e4cd3"
    bench = compare.Bench.__new__(compare.Bench)
    bench.turns = []
    assert bench.version("ik") == "?"
    bench.turns = [turn("mpool", 0, {}), Turn("generate", "ik", 0, found, Frame(NEAR, NEAR, 0.0))]
    assert bench.version("ik") == "8337e4cd3"


def test_weights_of_a_comparison(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option reaches the worker's task, and mpool's pool."""
    monkeypatch.setenv("MPOOL_SPECULATION", "0")
    bench = compare.Bench.__new__(compare.Bench)
    bench.arguments = compare.parse(["--weights", "mapped"])
    bench.paths, bench.ids, bench.programs = {"generate": "a"}, {"generate": []}, {}
    bench.prompts, bench.depths = [], []
    engine = engines.MpoolGenerator("")
    engine.imports()
    engine.weights = bench.task("generate", "mpool")["weights"]
    engine.load(str(llama), 1, 64)
    with engine.pool as pool:
        assert pool.ps()[0].weights == "mapped"


@pytest.mark.slow
@pytest.mark.builds
def test_low_bits(tmp_path: Path) -> None:
    """Each type has its rates, and the bytes of its file and of its panels; a program of ik_llama.cpp is a peer."""
    pytest.importorskip("gguf")
    (tmp_path / "llama-bench").write_text(FAKE_LLAMA_BENCH.format(python=sys.executable))
    (tmp_path / "llama-bench").chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "low-bits", "--quick", "--vocabulary",
         str(quantisedfiles.write("llama", "F32", tmp_path)), "--folder", str(tmp_path), "--ik", str(tmp_path),
         "--json", str(tmp_path / "record.json")], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    record = check_record(tmp_path / "record.json", "low-bits", {kind: {"mpool", "ik"} for kind in synthetic.LINEAR},
                          {"pp16 tokens/s", "tg@8 tokens/s"}, quick=True)
    assert set(record["weights"]) == set(synthetic.LINEAR) and record["versions"]["ik"] == "8337e4cd3"
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["type"], row["engine"]) for row in rows] == [
        (kind, engine) for kind in synthetic.LINEAR for engine in ("mpool", "ik")]
    mine = {row["type"]: row for row in rows if row["engine"] == "mpool"}
    for row in mine.values():
        assert all(row[name] > 0 for name in ("prefill 16", "decode after 8", "file MB", "beyond the file MB"))
        assert row["file MB"] <= row["memory MB"] < 1.5 * row["file MB"]
    weights = 256 * (512 + 2 * 128 + 3 * 512) / 8e6  # MB for each bit of a weight of the linear matrices
    packed = {name: row["memory MB"] - mine["TQ2_0"]["memory MB"] for name, row in mine.items()}
    for name, bits in {"Q2_K": 2.625, "Q3_K": 3.5625, "IQ2_XS": 3.3125, "IQ3_S": 4.3125, "Q4_K": 4.625}.items():
        assert packed[name] == pytest.approx(weights * (bits - 2.0625), abs=0.11), name
    for row in rows:
        if row["engine"] == "ik":
            assert row["prefill 16"] == 300.0 and row["decode after 8"] == 20.0 and "memory MB" not in row
        assert ("share of file" in row) == (row["read_2"] > 0)
    assert not list(tmp_path.glob("mpool-low-bits-*"))


@pytest.mark.slow
@pytest.mark.builds
def test_a_run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """All topics run with tiny models and give a table and a record of every measurement with its machine state."""
    bert, llama = (tinymodels.cached(tmp_path_factory, name) for name in ("bert", "llama"))
    out, second = tmp_path / "record.json", shutil.copytree(llama, tmp_path / "second")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--rounds", "1", "--again", "0", "--engines", "mpool,llama-cpp",
         "--peer-python", f"llama-cpp={sys.executable}", "--embedding-model", str(bert), "--text-model", str(llama),
         "--text-model", str(second), "--json", str(out), "--plot", str(tmp_path / "plot.svg")],
        cwd=ROOT, capture_output=True, text=True, timeout=600)
    record = json.loads(out.read_text())
    engines = {entry["engine"] for entry in record["turns"]}
    if engines == {"mpool"}:
        assert done.returncode == 0, done.stderr + str(record["failures"])
        assert "not installed: llama-cpp" in done.stderr
    topics = {"import", "cold-embed", "cold-generate", "embed", "generate", "cold-generate:second", "generate:second"}
    assert {entry["topic"] for entry in record["turns"] if entry["engine"] == "mpool"} == topics
    for entry in record["turns"]:
        assert all(value > 0 for value in entry["measures"].values()) and entry["rss MB"] > 10
    assert records.problems({**record, "commit": record["commit"] or "0" * 40}) == ["--quick measures nothing"]
    for kind, path in (("embed", bert), ("generate", llama), ("generate:second", second)):
        assert record["weights"][kind]["path"] == path.name
    assert (tmp_path / "plot.svg").read_text() == plot.svg(record)
    assert all(name in done.stdout for name in ("mixed texts/s", "tg@8 tokens/s", "8 streams tokens/s"))


@pytest.mark.builds
def test_policies_are_compared(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The table has every number for every policy, and only a clearly best value is bold."""
    bert, llama = (tinymodels.cached(tmp_path_factory, name) for name in ("bert", "llama"))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "pool", "--quick", "--no-c", "--parts", "policies", "--embedding-model",
         str(bert), "--text-model", str(llama)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "|" in line]
    assert lines[0] == ["", *policies.POLICIES] and lines[1] == ["---"] * 5 and len(lines) == 21
    for name, *values in lines[2:]:
        assert name.startswith(("embed: ", "text: "))
        assert all(float(value.strip("*").replace(",", "")) > 0 for value in values) and len(values) == 4
    rows = list(policies.table({"a: texts/s": dict(zip(policies.POLICIES, (1.0, 2.0, 1.0, 1.0))),
                                "a: p50 ms": dict(zip(policies.POLICIES, (1.0, 1.02, 3.0, 3.0)))}))
    assert rows[2:] == ["| a: texts/s | 1 | **2** | 1 | 1 |", "| a: p50 ms | 1 | 1.02 | 3 | 3 |"]


@pytest.mark.parametrize("name", ["bench_kernels.c", "bench_pool.c"])
def test_c_benchmarks_compile(name: str) -> None:
    """The C benchmarks are built only on demand, so this test checks that they still compile."""
    builder = kernel_rates.test_builder()
    variant = builder.VARIANTS["release"]
    compiler = builder.compiler_of(variant)
    if compiler is None:
        pytest.skip("no C compiler")
    run = subprocess.run([*compiler, *builder.BASE_FLAGS, *variant.flags, "-fsyntax-only", f"-I{ROOT / 'csrc'}",
                          str(ROOT / "benchmarks" / name)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.builds
def test_serving_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The overhead of HTTP, and the throughput of a server whose clients check that they receive every token."""
    pytest.importorskip("uvicorn")
    bert, llama = tinymodels.cached(tmp_path_factory, "bert"), tinymodels.cached(tmp_path_factory, "llama")
    models = [f"--embedding={bert}", f"--text={llama}", "--rounds=1", "--threads=1"]
    for arguments, lines in ((["overhead", "--count=5", "--tokens=8"], 4),
                             (["throughput", "--clients", "1", "3", "--seconds=0.2", "--tokens=4"], 4)):
        done = subprocess.run([sys.executable, "-m", "benchmarks", "serving", *arguments, *models], cwd=ROOT,
                              capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        rows = done.stdout.splitlines()
        assert len(rows) == lines and rows[0].startswith("other processes used ")
        assert all(any(char.isdigit() for char in row) for row in rows[2:])
    assert [row.split()[:2] for row in rows[2:]] == [["1", "mpool"], ["3", "mpool"]]
    assert all(float(row.split()[2]) > 0 for row in rows[2:])


#: A server in the place of llama.cpp's: while it "loads" it refuses once, then every stream has two chunks.
LLAMA_SERVER = '''
import http.server, json, pathlib, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
pathlib.Path(__file__).with_name("options.json").write_text(json.dumps(options))
ready = []

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chunks = [{"choices": [{"text": "a", "finish_reason": end}]} for end in (None, "length")]
        lines = "".join(f"data: {json.dumps(chunk)}\\n\\n" for chunk in chunks) + "data: [DONE]\\n\\n"
        data = (lines if body.get("stream") else json.dumps(chunks[1])).encode()
        self.send_response(200 if ready else 503)
        ready.append(body)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

http.server.ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
'''


@pytest.mark.builds
def test_serving_compares_with_llama_server(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """The peer starts with a slot and a context for each client, may refuse while it loads, and gets a ratio."""
    pytest.importorskip("uvicorn")
    program = tmp_path / "llama-server"
    program.write_text(f"#!{sys.executable}\n{LLAMA_SERVER}")
    program.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "serving", "throughput", "--clients", "1", "3", "--seconds=0.2",
         "--tokens=2", "--threads=1", "--rounds=1", "--context=64",
         f"--text={tinymodels.cached(tmp_path_factory, 'llama')}", f"--llama-server={program}"],
        cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [row.split() for row in done.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows] == [[clients, name] for clients in "13" for name in ("mpool", "llama-server")]
    for mine, peer in zip(rows[::2], rows[1::2]):
        ratio = float(peer[-1].removesuffix("x"))
        assert peer[-1].endswith("x") and ratio == pytest.approx(float(mine[2]) / float(peer[2]), rel=0.1)
    options = json.loads((tmp_path / "options.json").read_text())
    assert (options["-np"], options["-c"], options["-t"], options["-tb"]) == ("3", "192", "1", "1")


def test_masks_runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The cost of grammar-constrained completions is measured."""
    pytest.importorskip("llguidance")
    llama = tinymodels.cached(tmp_path_factory, "llama")
    done = subprocess.run([sys.executable, "-m", "benchmarks", "masks", f"--model={llama}", "--rounds=1", "--tokens=20",
                           "--threads=1"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert [row[:16].rstrip() for row in rows[2:]] == ["any JSON", "a schema", "an expression"]
    assert all(any(char.isdigit() for char in row[16:]) for row in rows[2:])


def test_the_load_generator_reports_incomplete_responses() -> None:
    """A response without its last token, a refused request and a client that runs out of requests are errors."""
    whole = b'data: {"choices": [{"text": "a", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
    cut = whole.replace(b'"length"', b"null")

    async def ask(response: bytes, status: bytes, seconds: float) -> http_client.Load:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 " + status + b"\r\n\r\n" + response)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await http_client.load(port, "/v1/completions", [[{}, {}]] * 3, seconds)

    found = asyncio.run(ask(whole, b"200 OK", 0.0))
    assert found.responses == len(found.first) == 3 and found.seconds > 0
    for response, status, seconds, words in (
            (cut, b"200 OK", 0.0, "before it had all"), (b"", b"200 OK", 0.0, "before"),
            (whole, b"503 Busy", 0.0, "503"), (whole, b"200 OK", 60.0, "ran out of")):
        with pytest.raises(RuntimeError, match=words):
            asyncio.run(ask(response, status, seconds))


def test_wrong_arguments() -> None:
    """The error for an unknown engine lists the existing ones."""
    done = subprocess.run([sys.executable, "-m", "benchmarks", "--engines", "other"], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 2 and "sentence-transformers" in done.stderr


@pytest.mark.slow
def test_vision_engines_sample_the_same_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the same image and question, on a small model in float32."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from benchmarks import vision_engines

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    monkeypatch.setitem(vision_engines.SHAPES, "small", (sizes, sizes))
    vision_engines.make_folder("small", tmp_path)
    mine, theirs = vision_engines.Mpool("float32"), vision_engines.Torch("")
    mine.load(str(tmp_path), 2)
    theirs.load(str(tmp_path), 2)
    sampled = set()
    for seed in range(4):
        image = np.random.default_rng(seed).integers(0, 256, (336, 336, 3), dtype=np.uint8)
        token = theirs.first(image, f"w{200 + seed} w9")
        assert mine.first(image, f"w{200 + seed} w9") == token
        sampled.add(token)
    assert len(sampled) > 1
    mine.pool.close()


@pytest.mark.slow
def test_images_run(tmp_path: Path) -> None:
    """On a small model, mpool and torch compute the same embeddings."""
    pytest.importorskip("transformers")
    command = ["-m", "benchmarks", "images", "--quick", "--rounds", "1", "--shapes", "dinov2-s", "--engines",
               "mpool:float32,torch", "--json", str(tmp_path / "record.json")]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["agreement"]["dinov2-s: least cosine to torch"]["mpool:float32"] >= 0.9999
    assert set(record["summary"]["dinov2-s"]) >= {"list images/s", "files images/s", "one image ms"}


@pytest.mark.parametrize("kind", [kind for kind in synthetic.TYPES if kind != "F32"])
def test_random_blocks_have_values_of_weights(kind: str) -> None:
    """Larger values would overflow, and smaller ones would make all attention weights equal."""
    gguf = pytest.importorskip("gguf")
    raw = synthetic.blocks(np.random.default_rng(1), kind, 2000)
    values = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert np.isfinite(values).all() and 0.01 < values.std() < 0.05


@pytest.mark.sample(3)
@pytest.mark.parametrize(("write", "sizes", "read"), [
    (synthetic.qwen3, {"heads": 4, "kv_heads": 2, "feed": 256, "experts": 16, "used": 2}, "token_embd"),
    (synthetic.qwen3, {"heads": 4, "kv_heads": 2, "feed": 256}, "token_embd"),
    (synthetic.qwen3, {"heads": 4, "kv_heads": 2, "feed": 256, "linear": "IQ2_XS"}, "token_embd"),
    (synthetic.gpt_oss, {"heads": 8, "experts": 8}, "output"),
    (synthetic.deepseek, {"heads": 4, "feed": 256, "experts": 64}, "output")])
def test_synthetic_models_are_loaded(write: Any, sizes: dict[str, Any], read: str, tmp_path: Path) -> None:
    """A small model of each shape generates text, and the bytes that a token reads are those of the used weights."""
    gguf = pytest.importorskip("gguf")
    path, vocabulary = str(tmp_path / "model.gguf"), quantisedfiles.write("llama", "F32", tmp_path)
    count = write(path, str(vocabulary), layers=1, width=256, words=2000, **sizes)
    with mpool.Pool() as pool:
        done = pool.generate([1, 2, 3], model=path, max_tokens=4, temperature=0, ignore_eos=True)
    assert done.usage.completion_tokens == 4
    expected = 0.0
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.data.ndim >= 2 and (not tensor.name.startswith("token_embd") or read == "token_embd"):
            used = {"qwen3": 2 / 16, "gpt_oss": 4 / 8, "deepseek": 8 / 64}[write.__name__]
            if not tensor.name.endswith(".bias"):
                expected += tensor.n_bytes * (used if "_exps" in tensor.name else 1)
            if "linear" in sizes and not tensor.name.startswith("token_embd"):
                assert tensor.tensor_type.name == sizes["linear"]
    assert count == expected
