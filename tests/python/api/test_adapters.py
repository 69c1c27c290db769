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
from adapterfiles import ATTENTION, matrices, save_gguf, save_peft

import mpool
from mpool.errors import (
    FileError,
    FormatError,
    IntegrityError,
    InvalidArgument,
    MpoolError,
    UnsafeFormat,
    Unsupported,
)
from mpool.models import describe
from mpool.models.formats.adapters import read_adapter

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
