"""Adapters of language models: requests choose one by name, rows of all adapters share a pass, and the bytes of a
result do not depend on the others. Adapters that are malformed or do not fit are refused with their names."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapterfiles import ATTENTION, matrices, save_gguf, save_peft, save_tensors

import mpool
from mpool.errors import (
    FileError,
    FormatError,
    IntegrityError,
    InvalidArgument,
    LimitError,
    MpoolError,
    UnsafeFormat,
    Unsupported,
)
from mpool.models import describe
from mpool.models.formats.adapters import read_adapter
from mpool.runtime.entry import Entry

PROMPTS = ["Once", "Once upon a time", "A cat sat on the mat, and the dog barked at it twice. " * 4, "x" * 150]
NAMES = [None, "one", "two", None, "gguf", "one"]
OPTIONS: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True, "logprobs": True}


@pytest.fixture(scope="module")
def model(llama: Path) -> Path:
    """The model's folder, from which the shapes of the matrices are read."""
    return llama


@pytest.fixture(scope="module")
def adapters(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of PEFT for all layers, one for a few, and a GGUF file."""
    folder = tmp_path_factory.mktemp("adapters")
    return {"one": save_peft(folder / "one", matrices(model, 8, 1), 16.0),
            "two": save_peft(folder / "two", matrices(model, 3, 2, ("q_proj", "down_proj")), 6.0),
            "gguf": save_gguf(folder / "three.gguf", matrices(model, 5, 3, ATTENTION), 10.0,
                              {"q_proj": 4, "k_proj": 2})}


def value(done: mpool.Completion) -> tuple[Any, ...]:
    return done.token_ids, tuple(one.logprob for one in done.logprobs or ())


def alone(llama: Path, adapters: dict[str, Path] | None, calls: list[tuple[str, str | None]],
          **config: Any) -> list[tuple[Any, ...]]:
    with mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1, **config)) as pool:
        pool.load(llama, adapters=adapters)
        return [value(pool.generate(prompt, llama, adapter=name, tenant=number + 1, **OPTIONS))
                for number, (prompt, name) in enumerate(calls)]


CALLS = [(prompt, name) for prompt in PROMPTS for name in NAMES]


@pytest.fixture(scope="module")
def expected(llama: Path, adapters: dict[str, Path]) -> list[tuple[Any, ...]]:
    return alone(llama, adapters, CALLS)


def test_requests_without_an_adapter_have_the_bytes_of_the_model(llama: Path, expected: list[Any]) -> None:
    plain = [(at, call) for at, call in enumerate(CALLS) if call[1] is None]
    assert alone(llama, None, [call for _, call in plain]) == [expected[at] for at, _ in plain]


def test_adapters_change_the_results(expected: list[Any]) -> None:
    for at in range(0, len(CALLS), len(NAMES)):
        group = expected[at:at + len(NAMES)]
        assert len(set(group)) == 4 and group[0] == group[3] and group[1] == group[5]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_mixed_rows_have_the_same_bytes(llama: Path, adapters: dict[str, Path], expected: list[Any],
                                        isolation: str) -> None:
    """All requests at once: decode rows and prefill slices of all adapters and of none share the passes."""
    config = mpool.PoolConfig(threads=2, max_workers_per_model=1, isolation=isolation)
    with mpool.Pool(config) as pool:
        pool.load(llama, adapters=adapters)
        for repeat in range(2):
            jobs = [pool.submit("text_to_text", prompt=prompt, model=llama, adapter=name, **OPTIONS)
                    for prompt, name in CALLS]
            assert [value(job.result()) for job in jobs] == expected, repeat


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_prefixes_are_shared_by_requests_of_one_adapter_only(llama: Path, adapters: dict[str, Path],
                                                             isolation: str) -> None:
    prompt = "A cat sat on the mat, and the dog barked at it twice. " * 12
    with mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1, isolation=isolation)) as pool:
        pool.load(llama, adapters=adapters)
        found = {}
        for name in (None, "one", "two", "gguf"):
            first = pool.generate(prompt, llama, adapter=name, **OPTIONS)
            again = pool.generate(prompt, llama, adapter=name, **OPTIONS)
            assert first.usage.cached_tokens == 0 and again.usage.cached_tokens > 64
            assert value(first) == value(again)
            found[name] = value(first)
        assert len(set(found.values())) == 4


def test_several_choices_chats_and_streams(llama: Path, adapters: dict[str, Path]) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    with mpool.Pool() as pool:
        handle = pool.load(llama, adapters=adapters)
        done = handle.chat(messages, adapter="one", n=3, max_tokens=12, seed=5)
        assert [choice.token_ids for choice in done.choices] == [
            choice.token_ids for choice in handle.chat(messages, adapter="one", n=3, max_tokens=12, seed=5).choices]
        assert done.token_ids != handle.chat(messages, n=3, max_tokens=12, seed=5).token_ids
        with handle.generate("Once", adapter="two", stream=True, max_tokens=12, seed=5) as stream:
            text = "".join(chunk.text for chunk in stream)
        assert text == handle.generate("Once", adapter="two", max_tokens=12, seed=5).text


def test_speculation_keeps_the_bytes(llama: Path, adapters: dict[str, Path], expected: list[Any],
                                     tmp_path: Path) -> None:
    program = ("import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]; import json, test_adapters as t\n"
               "from pathlib import Path\n"
               "import mpool\n"
               "with mpool.Pool(mpool.PoolConfig(threads=2, max_workers_per_model=1)) as pool:\n"
               "    pool.load(sys.argv[3], adapters=json.loads(sys.argv[4]), draft=sys.argv[5])\n"
               "    jobs = [pool.submit('text_to_text', prompt=prompt, model=sys.argv[3], adapter=name, **t.OPTIONS)\n"
               "            for prompt, name in t.CALLS]\n"
               "    print(json.dumps([t.value(job.result()) for job in jobs]))\n"
               "    assert pool.metrics()['draft_tokens'] > 50\n")
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", program, str(here), str(here.parent / "helpers"), str(llama),
                           json.dumps({name: str(path) for name, path in adapters.items()}),
                           str(shutil.copytree(llama, tmp_path / "twin"))],
                          capture_output=True, text=True, timeout=300, env={**os.environ, "MPOOL_SPECULATION": "2"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert [tuple(map(tuple, one)) for one in json.loads(done.stdout)] == expected


# ---- loading, unloading ----------------------------------------------------------------------------------------------

def test_memory_and_removal(llama: Path, adapters: dict[str, Path]) -> None:
    with mpool.Pool() as pool:
        pool.load(llama)
        before = pool.ps()[0].model_bytes
        pool.load(llama, adapters=adapters)
        assert pool.ps()[0].model_bytes > before + 4 * 5000
        pool.load(llama)  # unchanged
        assert pool.generate("x", llama, adapter="two", max_tokens=1, ignore_eos=True).token_ids
        pool.unload(llama)
        assert pool.generate("x", llama, adapter="two", max_tokens=1, ignore_eos=True).token_ids
        pool.load(llama, adapters={"two": adapters["two"]})
        with pytest.raises(InvalidArgument, match="adapter.*two or None.*'one'"):
            pool.generate("x", llama, adapter="one", max_tokens=1)
        pool.load(llama, adapters={})
        assert pool.ps()[0].model_bytes == before
        with pytest.raises(InvalidArgument, match="the model has no adapters"):
            pool.generate("x", llama, adapter="two", max_tokens=1)


def test_a_running_request_completes_with_its_adapter(llama: Path, adapters: dict[str, Path]) -> None:
    options = {**OPTIONS, "max_tokens": 1500}
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        pool.load(llama, adapters=adapters)
        whole = value(pool.generate("Once", llama, adapter="one", **options))
        results: list[Any] = []
        with pool.generate("Once", llama, adapter="one", stream=True, **options) as stream:
            next(stream)
            thread = threading.Thread(target=lambda: results.append(pool.load(llama, adapters={})))
            thread.start()
            for _ in stream:
                pass
            assert value(stream.result()) == whole
        thread.join(60)
        assert len(results) == 1
        with pytest.raises(InvalidArgument, match="no adapters"):
            pool.generate("x", llama, adapter="one", max_tokens=1)


def test_a_changed_adapter_is_read_again(llama: Path, model: Any, adapters: dict[str, Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(adapters["one"], tmp_path / "copy"))
    with mpool.Pool() as pool:
        handle = pool.load(llama, adapters={"it": copy})
        first = value(handle.generate("Once", adapter="it", **OPTIONS))
        assert handle._entry.changed() is None
        save_peft(copy, matrices(model, 8, 17), 16.0)
        assert handle._entry.changed() in (str(copy / "adapter_config.json"), str(copy / "adapter_model.safetensors"))
        pool.load(llama)
        assert value(handle.generate("Once", adapter="it", **OPTIONS)) != first


def test_handles_and_names_carry_them(llama: Path, adapters: dict[str, Path]) -> None:
    with mpool.Pool() as pool, mpool.Pool() as other:
        handle = pickle.loads(pickle.dumps(pool.register("adapted", llama, adapters={"one": adapters["one"]})))
        again = other._restore(*handle.__reduce__()[1][1:])
        assert again._entry.loading.adapters == (("one", str(adapters["one"])),)
        assert value(again.generate("Once", adapter="one", **OPTIONS)) == value(
            pool.generate("Once", "adapted", adapter="one", **OPTIONS))
        pool.swap("adapted", llama, adapters={"two": adapters["two"]})
        assert pool.generate("Once", "adapted", adapter="two", max_tokens=1, ignore_eos=True).token_ids
        pool.swap("adapted", llama)
        assert pool.generate("Once", "adapted", adapter="two", max_tokens=1, ignore_eos=True).token_ids
        pool.swap("adapted", llama, adapters={})
        with pytest.raises(InvalidArgument, match="no adapters"):
            pool.generate("Once", "adapted", adapter="two", max_tokens=1)


def test_two_threads_change_the_options_of_a_model(llama: Path, adapters: dict[str, Path],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread reads files while the other adds an adapter: the adapter stays."""
    read, inside, proceed = Entry._read_adapters, threading.Event(), threading.Event()

    def slow(entry: Entry, options: Any) -> Any:
        found = read(entry, options)
        if threading.current_thread().name == "first" and not inside.is_set():
            inside.set()
            assert proceed.wait(30)
        return found

    monkeypatch.setattr(Entry, "_read_adapters", slow)
    with mpool.Pool() as pool:
        pool.load(llama)
        first = threading.Thread(target=lambda: pool.load(llama, weights="packed"), name="first")
        first.start()
        assert inside.wait(30)
        pool.load(llama, adapters={"one": adapters["one"]})
        want = value(pool.generate("Once", llama, adapter="one", **OPTIONS))
        proceed.set()
        first.join()
        assert value(pool.generate("Once", llama, adapter="one", **OPTIONS)) == want
        assert pool.get(llama)._entry.uses_weights == "packed"


def test_a_load_that_fails_leaves_no_adapter_behind(llama: Path, adapters: dict[str, Path]) -> None:
    for loaded in (False, True):
        with mpool.Pool() as pool:
            if loaded:
                pool.load(llama)
            with pytest.raises(InvalidArgument, match="compute"):
                pool.load(llama, adapters={"one": adapters["one"]}, compute="none")  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument, match="the model has no adapters"):
                pool.generate("Once", llama, adapter="one", max_tokens=1)
            pool.load(llama, adapters={"two": adapters["two"]})
            assert pool.generate("Once", llama, adapter="two", max_tokens=1, ignore_eos=True).token_ids


# ---- refusals --------------------------------------------------------------------------------------------------------

class NoPath(os.PathLike[str]):
    def __fspath__(self) -> Any:
        return 7


@pytest.mark.parametrize(("given", "param"), [
    (7, "adapters"), (["a"], "adapters"), ({1: "a"}, "adapters"), ({"a:b": "a"}, "adapters"), ({"": "a"}, "adapters"),
    ({"a": 7}, "adapters['a']"), ({"a": ""}, "adapters['a']"), ({"a": NoPath()}, "adapters['a']"),
    ({f"n{i}": "a" for i in range(65)}, "adapters")])
def test_other_values_are_refused(llama: Path, given: Any, param: str) -> None:
    with mpool.Pool() as pool:
        for call in (pool.load, lambda *args, **options: pool.register("x", *args, **options)):
            with pytest.raises(InvalidArgument) as caught:
                call(llama, adapters=given)
            assert caught.value.param == param


@pytest.mark.parametrize("name", [7, "", "three", "ONE", True])
def test_unknown_names_are_refused(llama: Path, adapters: dict[str, Path], name: Any) -> None:
    with mpool.Pool() as pool:
        pool.load(llama, adapters={"one": adapters["one"]})
        with pytest.raises(InvalidArgument, match="or None, got|one or None") as caught:
            pool.generate("x", llama, adapter=name)
        assert caught.value.param == "adapter"


def test_other_models_are_refused(bert: Path, qwen2: Path, llama: Path, adapters: dict[str, Path]) -> None:
    with mpool.Pool() as pool:
        with pytest.raises(Unsupported, match=r"updates model\.layers\.0\..* adapters of query, key, value, dense"):
            pool.load(bert, adapters={"one": adapters["one"]})
        with pytest.raises(FormatError, match="general.architecture.*llama.*qwen2"):
            pool.load(qwen2, adapters={"gguf": adapters["gguf"]})
        with pytest.raises(FileError, match="no such file or folder"):
            pool.load(llama, adapters={"none": "/nowhere/at/all"})
        with pytest.raises(FormatError, match="general.type|GGUF|magic"):
            pool.load(llama, adapters={"wrong": llama / "config.json"})
        with pytest.raises(FormatError, match="adapter_config.json"):
            pool.load(llama, adapters={"wrong": llama})
        assert pool.generate("x", llama, max_tokens=1).token_ids  # the model itself still serves


CONFIGS: list[tuple[dict[str, Any], type[MpoolError], str]] = [
    ({"peft_type": "IA3"}, Unsupported, "peft_type.*IA3"),
    ({"peft_type": None}, FormatError, "peft_type"),
    ({"use_dora": True}, Unsupported, "use_dora.*DoRA"),
    ({"modules_to_save": ["lm_head"]}, Unsupported, "modules_to_save"),
    ({"bias": "all"}, Unsupported, "bias"),
    ({"lora_bias": True}, Unsupported, "lora_bias"),
    ({"fan_in_fan_out": True}, Unsupported, "fan_in_fan_out"),
    ({"init_lora_weights": "pissa_niter_4"}, Unsupported, "init_lora_weights"),
    ({"lora_alpha": 0}, FormatError, "lora_alpha"),
    ({"lora_alpha": 1e300}, FormatError, "lora_alpha"),
    ({"lora_alpha": "16"}, FormatError, "lora_alpha"),
    ({"lora_alpha": None}, FormatError, "lora_alpha"),
    ({"lora_alpha": True}, FormatError, "lora_alpha"),
    ({"r": 0}, FormatError, " r "),
    ({"r": 9}, FormatError, "rank of"),
    ({"r": "8"}, FormatError, " r "),
    ({"use_rslora": 1}, FormatError, "use_rslora"),
    ({"rank_pattern": ["q_proj"]}, FormatError, "rank_pattern"),
    ({"rank_pattern": {"self_attn.q_proj": 7}}, FormatError, "rank of.*7, the value of rank_pattern.self_attn.q_proj"),
    ({"rank_pattern": {"q_proj": "8"}}, FormatError, "rank_pattern.q_proj"),
    *(({name: {key: 3}}, Unsupported, f"{name}.*regular expression") for name in ("alpha_pattern", "rank_pattern")
      for key in ("(q|k)+_proj", "(a+)+b", ".*q_proj", "q_proj$", r"\d_proj", "[qk]_proj", "^", "", "q_proj\n", "q^")),
    ({"alpha_pattern": {"q_proj": 0}}, FormatError, "alpha_pattern.q_proj"),
    ({"alpha_pattern": {f"x{at}": 1 for at in range(4097)}}, LimitError, "alpha_pattern has 4,097 entries"),
]


@pytest.mark.parametrize(("config", "error", "words"), CONFIGS,
                         ids=[json.dumps(config)[:60] for config, _, _ in CONFIGS])
def test_configurations_are_refused(llama: Path, model: Any, tmp_path: Path, config: dict[str, Any],
                                    error: type[MpoolError], words: str) -> None:
    save_peft(tmp_path, matrices(model, 8, 1, ("q_proj",)), 16.0, **config)
    refused(llama, tmp_path, error, words)


def refused(llama: Path, path: Path, error: type[MpoolError], words: str) -> None:
    with mpool.Pool() as pool:
        with pytest.raises(error, match=words) as caught:
            pool.load(llama, adapters={"it": path})
        assert type(caught.value) is error, caught.value
        assert len(str(caught.value)) < 2000


def test_long_keys_of_patterns_take_no_time(llama: Path, model: Any, tmp_path: Path) -> None:
    """Keys that are longer than all names of modules never match, and compiling them would take half a minute."""
    keys = {"." * 5000 + str(at): 3.0 for at in range(4095)}
    save_peft(tmp_path, matrices(model, 8, 1, ("q_proj",)), 16.0, alpha_pattern={**keys, "q.proj": 4.0})
    description = describe(str(llama))
    begin = time.thread_time()
    found = read_adapter(tmp_path, description)
    assert time.thread_time() - begin < 10
    assert {update.scale for update in found.updates} == {4.0 / 8}


@pytest.mark.parametrize("alpha", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_alpha_must_be_finite(llama: Path, model: Any, tmp_path: Path, alpha: str) -> None:
    save_peft(tmp_path, matrices(model, 8, 1, ("q_proj",)), 16.0)
    text = (tmp_path / "adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(text.replace("16.0", alpha))
    refused(llama, tmp_path, FormatError, "adapter_config.json")


def tensors_of(model: Any) -> dict[str, Any]:
    return {f"base_model.model.{name}.lora_{side}.weight": matrix
            for name, pair in matrices(model, 8, 1, ("q_proj",)).items() for side, matrix in zip("AB", pair)}


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def case(name: str, model: Any) -> tuple[dict[str, Any], type[MpoolError], str]:
    """Return the tensors of a hostile adapter, the error, and words of its message."""
    found = tensors_of(model)
    a, b = list(found)[:2]
    if name == "no tensors":
        return {}, FormatError, "no matrix of an adapter"
    if name == "only A":
        del found[b]
        return found, FormatError, "no matrix B"
    if name == "other rank in B":
        found[b] = zeros(64, 7)
        return found, FormatError, "shape of .*lora_B"
    if name == "other outputs":
        found[b] = zeros(63, 8)
        return found, FormatError, r"shape of .*lora_B.*\[63, 8\].*\[64, 8\]"
    if name == "other inputs":
        found[a] = zeros(8, 65)
        return found, FormatError, r"shape of .*lora_A.*\[8, 65\].*\[8, 64\]"
    if name == "three dimensions":
        found[a] = zeros(8, 8, 8)
        return found, FormatError, "two positive sizes"
    if name == "no rank":
        found[a], found[b] = zeros(0, 64), zeros(64, 0)
        return found, FormatError, "two positive sizes"
    if name == "large rank":
        found[a], found[b] = zeros(1025, 64), zeros(64, 1025)
        return found, LimitError, "rank 1025"
    if name == "integers":
        found[a] = np.zeros((8, 64), np.int8)
        return found, Unsupported, "dtype I8"
    if name == "NaN":
        found[b] = np.full((64, 8), np.nan, np.float32)
        return found, FormatError, "lora_b.*infinity or NaN at index 0"
    if name == "infinity":
        found[a] = found[a].copy()
        found[a][3, 5] = np.inf
        return found, FormatError, f"lora_a.*infinity or NaN at index {3 * 64 + 5}"
    if name == "twice":
        return {**found, a.replace(".weight", ".default.weight"): found[a].copy()}, FormatError, "two matrices"
    others = {"lm_head": "base_model.model.lm_head.lora_A.weight",
              "layer 2": "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight",
              "embedding": "base_model.model.model.embed_tokens.lora_embedding_A",
              "DoRA": a.replace("lora_A.weight", "lora_magnitude_vector"),
              "bias": "base_model.model.model.layers.0.self_attn.q_proj.bias",
              "module": "base_model.model.lm_head.modules_to_save.weight",
              "nonsense": "x" * 300}
    words = {"lm_head": "lm_head.*q_proj", "layer 2": "layers.2", "embedding": "embedding", "DoRA": "DoRA",
             "bias": "bias", "module": "trained as a whole", "nonsense": "not a matrix"}
    return {**found, others[name]: zeros(8, 64)}, Unsupported, words[name]


@pytest.mark.parametrize("name", [
    "no tensors", "only A", "other rank in B", "other outputs", "other inputs", "three dimensions", "no rank",
    "large rank", "integers", "NaN", "infinity", "twice", "lm_head", "layer 2", "embedding", "DoRA", "bias", "module",
    "nonsense"])
def test_tensors_are_refused(llama: Path, model: Any, tmp_path: Path, name: str) -> None:
    save_peft(tmp_path, matrices(model, 8, 1, ("q_proj",)), 16.0,
              **({"rank_pattern": {"q_proj": 8}} if name in ("large rank", "other rank in B") else {}))
    found, error, words = case(name, model)
    save_tensors(tmp_path / "adapter_model.safetensors", found)
    refused(llama, tmp_path, error, words)


def test_truncated_files_and_pickles_are_refused(llama: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(adapters["one"], tmp_path / "one"))
    weights = folder / "adapter_model.safetensors"
    data = weights.read_bytes()
    for size in (0, 7, 60, len(data) - 1):
        weights.write_bytes(data[:size])
        refused(llama, folder, FormatError, "adapter_model.safetensors")
    weights.unlink()
    refused(llama, folder, FormatError, "adapter_model.safetensors")
    (folder / "adapter_model.bin").write_bytes(b"x")
    refused(llama, folder, UnsafeFormat, r"To convert the adapter, .*glob\('adapter_model.bin'\).*, "
            r"'adapter_model.safetensors', \{'format'")
    outside = tmp_path / "elsewhere.safetensors"
    outside.write_bytes(data)
    weights.symlink_to(outside)
    refused(llama, folder, FormatError, "inside the folder")
    cut = tmp_path / "cut.gguf"
    whole = adapters["gguf"].read_bytes()
    for size in (3, 40, len(whole) - 100):
        cut.write_bytes(whole[:size])
        refused(llama, cut, FormatError, "cut.gguf")


@pytest.mark.parametrize(("keys", "alpha", "error", "words"), [
    ({"general_type": "model"}, 8.0, FormatError, "general.type"),
    ({"adapter_type": "control_vector"}, 8.0, Unsupported, "adapter.type"),
    ({}, 0.0, FormatError, "adapter.lora.alpha"),
    ({}, float("nan"), FormatError, "adapter.lora.alpha"),
    ({}, float("inf"), FormatError, "adapter.lora.alpha")])
def test_gguf_keys_are_refused(llama: Path, model: Any, tmp_path: Path, keys: dict[str, str], alpha: float,
                               error: type[MpoolError], words: str) -> None:
    refused(llama, save_gguf(tmp_path / "it.gguf", matrices(model, 4, 1, ("q_proj",)), alpha, **keys), error, words)


@pytest.mark.parametrize(("rename", "error", "words"), [
    ({"model.layers.0.self_attn.q_proj": "model.layers.9.self_attn.q_proj"}, Unsupported, "blk.9.attn_q.*attn_output"),
    ({"model.layers.0.self_attn.q_proj": "model.layers.0.self_attn.ffn_gate_exps"}, Unsupported, "ffn_gate_exps")])
def test_gguf_layers_are_refused(llama: Path, model: Any, tmp_path: Path, rename: dict[str, str],
                                 error: type[MpoolError], words: str) -> None:
    found = {rename.get(name, name): pair for name, pair in matrices(model, 4, 1, ("q_proj",)).items()}
    refused(llama, save_gguf(tmp_path / "it.gguf", found, 8.0), error, words)


def test_a_file_that_changes_in_use_is_noticed(llama: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(adapters["one"], tmp_path / "one"))
    with mpool.Pool() as pool:
        pool.load(llama, adapters={"one": folder})
        pool.unload(llama)
        data = bytearray((folder / "adapter_model.safetensors").read_bytes())
        (length,) = struct.unpack("<Q", data[:8])
        data[8 + length:8 + length + 4] = np.float32(7.0).tobytes()
        (folder / "adapter_model.safetensors").write_bytes(data)
        try:  # reads the new file, or says that it changed; never computes with a mixture
            assert pool.generate("x", llama, adapter="one", max_tokens=1, ignore_eos=True).token_ids
        except IntegrityError:
            pass
