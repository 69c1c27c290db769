"""Adapters against recorded results of PEFT and llama.cpp: largest difference 1e-4 of the largest value.
``tests/parity/libraries/make_library_goldens.py`` recorded them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import librarycases as cases
from adapterfiles import save_gguf
from corelib import logits

GOLDENS = Path(__file__).resolve().parents[2] / "parity" / "libraries"


def recorded(library: str = "peft") -> dict[str, Any]:
    with np.load(GOLDENS / f"{library}.npz") as found:
        return dict(found)


def close(found: Any, wanted: Any) -> bool:
    """Return True if the shapes are equal, and no difference is above 1e-4 of the largest value."""
    return found.shape == wanted.shape and bool(np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("name", cases.ADAPTERS)
def test_adapters_match_peft(tmp_path: Path, name: str) -> None:
    golden = recorded()
    folder, adapter = cases.write_adapted(tmp_path, name)
    assert cases.digest_of(folder, adapter) == str(golden[f"{name}.sha256"]), "these are not the recorded weights"
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        pool.load(folder, adapters={"it": adapter}, compute="float32")
        options: dict[str, Any] = {"function_to_apply": "none", "compute": "float32"}
        assert close(pool.classify(cases.TEXTS, folder, adapter="it", **options).scores, golden[name])
        assert not close(pool.classify(cases.TEXTS, folder, **options).scores, golden[name])


@pytest.mark.parametrize("name", cases.DECODERS)
def test_adapters_of_decoders_match_peft(tmp_path: Path, name: str) -> None:
    golden = recorded()
    folder, adapter = cases.write_adapted(tmp_path, name)
    assert cases.digest_of(folder, adapter) == str(golden[f"{name}.sha256"]), "these are not the recorded weights"
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        pool.load(folder, adapters={"it": adapter}, compute="float32")
        assert close(logits(pool, str(folder), cases.TOKENS, "float32", "it"), golden[name])
        assert not close(logits(pool, str(folder), cases.TOKENS, "float32"), golden[name])


@pytest.mark.parametrize("base", ["folder", "gguf"])
@pytest.mark.parametrize("adapter", ["gguf", "peft"])
def test_adapters_match_llama_cpp(tmp_path: Path, adapter: str, base: str) -> None:
    """llama.cpp's converter wrote the GGUF adapter: in it, the halves of each head are interleaved in the rows of the
    queries and keys. llama.cpp computed with float32 weights, keys and values, so only the order of sums differs."""
    golden = recorded("llama_cpp_python")
    folder, peft = cases.write_adapted(tmp_path, "llama")
    assert cases.digest_of(folder, peft) == str(golden["sha256"]), "these are not the recorded weights"
    gguf = tmp_path / "adapter.gguf"
    gguf.write_bytes(golden["adapter"].tobytes())
    place = str(folder)
    if base == "gguf":
        import tinygguf

        place = str(tinygguf.write(tmp_path / "base.gguf", cases.make_decoder("llama")))
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        pool.load(place, adapters={"it": gguf if adapter == "gguf" else peft}, compute="float32")
        assert close(logits(pool, place, cases.TOKENS, "float32"), golden["plain"])
        found = logits(pool, place, cases.TOKENS, "float32", "it")
    assert close(found, golden["logits"]) and not close(found, golden["plain"])


def test_adapter_files_of_the_tests_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """``save_gguf`` writes the adapters of other tests: the same tensors as llama.cpp's converter, and the same keys
    that are read."""
    gguf = pytest.importorskip("gguf")
    converted = tmp_path / "converted.gguf"
    converted.write_bytes(recorded("llama_cpp_python")["adapter"].tobytes())
    found = cases.decoder_matrices("llama", cases.make_decoder("llama"))
    own = save_gguf(tmp_path / "own.gguf", found, cases.ALPHA, {"q_proj": 6, "k_proj": 2})
    one, other = gguf.GGUFReader(own), gguf.GGUFReader(converted)
    assert {tensor.name for tensor in one.tensors} == {tensor.name for tensor in other.tensors}
    tensors = {tensor.name: tensor for tensor in other.tensors}
    for tensor in one.tensors:
        same = tensors[tensor.name]
        assert tensor.tensor_type == same.tensor_type and np.array_equal(tensor.data, same.data), tensor.name
    for key in ("general.type", "general.architecture", "adapter.type", "adapter.lora.alpha"):
        assert one.fields[key].contents() == other.fields[key].contents(), key
