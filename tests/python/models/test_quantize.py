"""``mpool quantize``: bytes and errors of the quantisers, recipes, folders as GGUF files, and failures of the write."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import _core
from mpool.models.quantizing import inputs, quantize as writing
from mpool.models.quantizing.quantize import quantize
from mpool.models.quantizing.recipes import RECIPES

gguf = pytest.importorskip("gguf")

import quantisedfiles  # noqa: E402
from corelib import greedy, logits  # noqa: E402
from filehash import file_hash  # noqa: E402
from paritymodels import torch, transformers  # noqa: E402

GOLDENS = Path(__file__).resolve().parents[2] / "parity" / "decoder"
sys.path.insert(0, str(GOLDENS))

import make_quantised_goldens as goldens  # noqa: E402

RECORDED = json.loads((GOLDENS / "quantised.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantised")


# ---- quantisers ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_bytes_are_those_of_the_gguf_package(dtype: str) -> None:
    for values in (*goldens.rows().values(), np.zeros((2, 64), np.float32), np.full((2, 64), -1e-6, np.float32)):
        expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[dtype]).tobytes()
        assert _core.quantize(dtype, "F32", values.tobytes(), values.size) == expected


@pytest.mark.parametrize("dtype", list(goldens.SEARCHED))
def test_errors_are_near_those_of_ggml(dtype: str) -> None:
    for name, values in goldens.rows().items():
        stored = _core.quantize(dtype, "F32", values.tobytes(), values.size)
        back = _core.dequantize(dtype, stored, values.size).reshape(values.shape)
        error = np.sqrt(np.mean((back - values) ** 2) / np.mean(values ** 2))
        assert error <= 1.02 * RECORDED["errors"][dtype][name], name


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    values = np.zeros(256, np.float32)
    values[200] = value
    with pytest.raises(mpool.errors.FormatError, match="NaN, infinite or outside the range of Q8_0"):
        _core.quantize("Q8_0", "F32", values.tobytes(), 256)
    with pytest.raises(mpool.errors.FormatError, match="outside the range of F16"):
        _core.quantize("F16", "F32", np.full(4, 1e6, np.float32).tobytes(), 4)


@pytest.mark.parametrize("arguments, words", [
    (("Q2_K", "F32", bytes(1024), 256), "does not quantise to"), (("Q8_0", "I32", bytes(128), 32), "no storage type"),
    (("Q8_0", "AWQ4", bytes(16), 32), "no storage type"), (("Q8_0", "F32", bytes(124), 31), "`n` must be .*got 31"),
    (("Q8_0", "F32", bytes(124), 32), "must have 128 bytes, got 124"),
    (("Q8_0", "F32", b"", -32), "`n` must be .*got -32"), (("Q8_0", "F32", b"", 1 << 62), "`n` must be ")])
def test_arguments_of_the_core(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(mpool.InvalidArgument, match=words):
        _core.quantize(*arguments)


# ---- files ---------------------------------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize("name", goldens.MIXED)
def test_types_are_those_of_llama_cpp(folder: Path, name: str) -> None:
    source = quantisedfiles.write(name, "F32", folder)
    for recipe in goldens.MIXED[name]:
        target = folder / "recipe.gguf"
        quantize(str(source), str(target), recipe, force=True)
        found = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(target).tensors}
        assert found == RECORDED["types"][name][recipe], recipe


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", list(quantisedfiles.FOLDERS))
def test_float_file_computes_the_same(folder: Path, name: str) -> None:
    path = quantisedfiles.write(name, "F32", folder)
    tokens = np.random.default_rng(3).integers(0, quantisedfiles.VOCAB, 120)
    with mpool.Pool() as pool:
        expected = logits(pool, str(folder / name), tokens, "float32")
        got = logits(pool, str(path), tokens, "float32")
        assert np.abs(got - expected).max() <= 1e-4
        messages = [{"role": "user", "content": "Hello"}]
        # readers of GGUF files take <|endoftext|> as an end of turn by its name
        options = {"max_tokens": 4, "temperature": 0, "compute": "float32", "logit_bias": {quantisedfiles.END: -100}}
        assert pool.chat(messages, str(path), **options).token_ids \
            == pool.chat(messages, str(folder / name), **options).token_ids
        assert pool.tokenize(quantisedfiles.TEXT, str(path)) == pool.tokenize(quantisedfiles.TEXT, str(folder / name))


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype, most", [("BF16", 0.002), ("F16", 0.0003), ("Q8_0", 0.006), ("Q6_K", 0.02),
                                         ("Q5_K_M", 0.04), ("Q5_0", 0.05), ("Q4_K_M", 0.08), ("Q4_K_S", 0.08),
                                         ("Q4_0", 0.1)])
def test_types_are_near_the_source(folder: Path, dtype: str, most: float) -> None:
    """The weights, whose rows are permuted in both files alike."""
    source = gguf.GGUFReader(quantisedfiles.write("llama", "F32", folder))
    weights = {tensor.name: tensor.data for tensor in source.tensors}
    for tensor in gguf.GGUFReader(quantisedfiles.write("llama", dtype, folder)).tensors:
        back, expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type), weights[tensor.name]
        assert np.sqrt(np.mean((back - expected) ** 2) / np.mean(expected ** 2)) <= most, tensor.name


@pytest.mark.parametrize("dtype, most", [("BF16", 0.02), ("F16", 0.002), ("Q8_0", 0.04), ("Q5_0", 0.3), ("Q4_0", 0.6)])
def test_logits_are_near_the_source(folder: Path, dtype: str, most: float) -> None:
    path = quantisedfiles.write("qwen3", dtype, folder)
    tokens = np.random.default_rng(3).integers(0, quantisedfiles.VOCAB, 60)
    with mpool.Pool() as pool:
        expected = logits(pool, str(folder / "qwen3"), tokens, "float32")
        got = logits(pool, str(path), tokens, "float32")
    assert np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected ** 2)) <= most


def unpacked(path: Path, folder: Path) -> Any:
    """Return the network of transformers with the weights of a GGUF file. The package gguf unpacks them, and has the
    names of the tensors."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = model.config
    weights = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
               for tensor in gguf.GGUFReader(path).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        values = weights.pop(names.get_name(name, try_suffixes=(".weight", ".bias")))
        if config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = values.reshape(heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        assert values.shape == tuple(parameter.shape), name
        parameter.data = torch.tensor(np.ascontiguousarray(values, np.float32))
    assert not weights, f"tensors that transformers does not have: {sorted(weights)}"
    return model


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", list(RECIPES))
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_every_type_gives_the_tokens_of_its_weights(folder: Path, name: str, dtype: str) -> None:
    """transformers with the unpacked weights gives the logits and the greedy tokens that mpool computes in float32."""
    path = quantisedfiles.write(name, dtype, folder)
    prompt = np.array(goldens.PROMPT)
    with mpool.Pool() as pool:
        tokens = greedy(pool, str(path), prompt, goldens.GREEDY, "float32")
        context = np.concatenate([prompt, tokens])
        got = logits(pool, str(path), context, "float32")
    with torch.no_grad():
        expected = unpacked(path, folder / name)(torch.tensor(context[None])).logits[0].numpy()[:, :got.shape[1]]
    assert np.abs(got - expected).max() <= 1e-4 * max(1, np.abs(expected).max())
    rows = expected[len(prompt) - 1:-1].copy()
    rows[:, [quantisedfiles.END, quantisedfiles.END - 2]] = -np.inf  # end tokens are not sampled
    assert len(tokens) == goldens.GREEDY and rows.argmax(axis=1).tolist() == tokens.tolist()


@pytest.mark.parametrize("name, dtype", quantisedfiles.FILES)
def test_llama_cpp_gives_the_same_tokens(folder: Path, name: str, dtype: str) -> None:
    path = quantisedfiles.write(name, dtype, folder)
    recorded = RECORDED["files"][path.stem]
    # the order and the values of keys and tensors do not depend on torch, whose random numbers the weights are
    assert goldens.header_hash(path) == recorded["header"], "the file is not the one that llama.cpp read"
    if recorded["hash"] != file_hash(path).tobytes().hex():
        release = torch.__version__.partition("+")[0]
        assert release != goldens.TORCH, f"torch {release} made the recorded file: mpool writes other bytes now"
        pytest.skip(f"torch {release} gives other weights than torch {goldens.TORCH}")
    with mpool.Pool() as pool:
        got = logits(pool, str(path), np.array(goldens.PROMPT))[-1][:32]
        expected = np.array(recorded["logits"])
        error = np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected ** 2))
        # quantised: both round activations to 8 bits, in blocks of different sizes
        assert error <= (1e-4 if dtype == "F32" else 0.15)
        if dtype == "F32":
            assert greedy(pool, str(path), np.array(goldens.PROMPT), goldens.GREEDY).tolist() == recorded["greedy"]
        assert pool.tokenize(RECORDED["text"], str(path), add_special=False) == recorded["ids"]


#: Endings of the names of tensors that stay floats in every recipe: vectors, convolutions, and routers.
FLOATS = ("norm.weight", "ffn_norm", ".bias", "conv1d.weight", "shortconv.conv.weight", "ssm_a", "ssm_d",
          "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "rope_freqs.weight")


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", quantisedfiles.AS_CONVERTED)
def test_a_folder_and_its_file_give_the_same_bytes(folder: Path, name: str) -> None:
    path = quantisedfiles.write(name, "Q4_K_M", folder)
    quantize(str(quantisedfiles.write(name, "F32", folder)), str(folder / "again.gguf"), "Q4_K_M", force=True)
    assert (folder / "again.gguf").read_bytes() == path.read_bytes()
    reader, pre = gguf.GGUFReader(path), quantisedfiles.FOLDERS[name][2]
    assert reader.fields["tokenizer.ggml.pre"].contents() == ("default" if pre.startswith("spm-") else pre)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert {one for one, dtype in types.items() if dtype == "F32"} == {one for one in types if one.endswith(FLOATS)}
    with mpool.Pool() as pool:
        assert len(greedy(pool, str(path), np.array(goldens.PROMPT), 4)) == 4


def test_a_vision_folder_is_written_without_its_eyes(folder: Path, tmp_path: Path) -> None:
    """All published folders of Qwen3.5 and 3.6 are vision models."""
    path = quantisedfiles.write("qwen35", "F32", folder)
    shutil.copytree(folder / "qwen35", tmp_path / "qwen35")
    (tmp_path / "qwen35" / "preprocessor_config.json").write_text("{}")
    _edit(tmp_path / "qwen35" / "config.json", lambda t: t.update(
        text_config=dict(t), model_type="qwen3_5", architectures=["Qwen3_5ForConditionalGeneration"]))
    quantize(str(tmp_path / "qwen35"), str(tmp_path / "q.gguf"), "F32")
    assert (tmp_path / "q.gguf").read_bytes() == path.read_bytes()


def test_old_files_with_a_tensor_per_expert(folder: Path, tmp_path: Path) -> None:
    """Such files of Mixtral are read as they are, and written with a tensor per layer."""
    path = quantisedfiles.write("llama_mixtral", "F32", folder)
    reader, old = gguf.GGUFReader(path), tmp_path / "old.gguf"
    writer = gguf.GGUFWriter(str(old), "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), *[gguf.GGUFValueType(kind) for kind in field.types[:2]])
    for tensor in reader.tensors:
        parts = {tensor.name: tensor.data} if "_exps" not in tensor.name else {
            tensor.name.replace("_exps", f".{i}"): rows for i, rows in enumerate(tensor.data)}
        for name, data in parts.items():
            writer.add_tensor(name, np.ascontiguousarray(data))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file,
                  writer.close):
        write()
    tokens = np.array(goldens.PROMPT)
    with mpool.Pool() as pool:
        assert np.array_equal(logits(pool, str(old), tokens), logits(pool, str(path), tokens))
    for one, target in ((path, "new.gguf"), (old, "joined.gguf")):
        quantize(str(one), str(tmp_path / target), "Q8_0")
    assert (tmp_path / "new.gguf").read_bytes() == (tmp_path / "joined.gguf").read_bytes()


def test_the_type_of_a_file_is_its_quantization_level(folder: Path, tmp_path: Path) -> None:
    """Ollama's API has the name of ``general.file_type``, not the type of most weights (here Q8_0, Q4_K or F32)."""
    from mpool.server import ollama_models
    from mpool.server.models import ServedModel

    source = quantisedfiles.write("llama_tied", "F32", folder)
    with mpool.Pool() as pool:
        for name in ("Q4_K_M", "Q4_0"):
            target = tmp_path / f"{name}.gguf"
            quantize(str(source), str(target), name)
            found = ollama_models.describe(ServedModel("x", pool.get(target), 0))
            assert found.details["quantization_level"] == name


def test_keys_of_a_file_are_kept(folder: Path, tmp_path: Path) -> None:
    source = quantisedfiles.write("llama_tied", "F32", folder)
    target = tmp_path / "q.gguf"
    report = quantize(str(source), str(target), "Q4_0")
    assert report.nbytes == target.stat().st_size and report.types == {"Q8_0": 1, "Q4_0": 14, "F32": 6}
    old, new = gguf.GGUFReader(source).fields, gguf.GGUFReader(target).fields
    assert old.keys() == new.keys()
    for name in old:
        if name not in ("general.file_type", "GGUF.tensor_count"):
            assert old[name].contents() == new[name].contents() and old[name].types == new[name].types, name
    assert new["general.file_type"].contents() == 2


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_small_tensors_of_a_file_keep_their_type(folder: Path, dtype: str) -> None:
    """As llama.cpp writes them. Those of a folder become F32."""
    small = {"output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"}
    path = quantisedfiles.write("llama", "F32", folder)
    for source, wanted in ((path, dtype), (folder / "llama", "F32")):
        model = inputs.read_input(str(source))
        found = {}
        for tensor in model.tensors:
            entries = tuple(replace(entry, dtype=dtype) for entry in tensor.parts)
            found[tensor.name] = writing._planned("Q8_0", model, replace(tensor, parts=entries)).dtype
        assert {found[name] for name in small} == {wanted} and found["blk.0.ffn_up.weight"] == "Q8_0"


def test_quantised_source(folder: Path, tmp_path: Path) -> None:
    source = quantisedfiles.write("llama", "Q8_0", folder)
    quantize(str(source), str(tmp_path / "q.gguf"), "Q8_0")
    assert (tmp_path / "q.gguf").read_bytes() == source.read_bytes()
    quantize(str(source), str(tmp_path / "k.gguf"), "Q4_K_M", threads=1, allow_requantize=True)
    quantize(str(source), str(tmp_path / "k.gguf"), "Q4_K_M", threads=3, force=True, allow_requantize=True)
    with mpool.Pool() as pool:
        logits(pool, str(tmp_path / "k.gguf"), np.arange(5))


# ---- failures ------------------------------------------------------------------------------------------------------

def _only(folder: Path, names: set[str]) -> None:
    assert {path.name for path in folder.iterdir()} == names


def test_target(folder: Path, tmp_path: Path) -> None:
    source = quantisedfiles.write("qwen2", "F32", folder)
    target = tmp_path / "q.gguf"
    target.write_text("mine")
    with pytest.raises(mpool.errors.FileError, match="q.gguf exists.*--force"):
        quantize(str(source), str(target), "Q8_0")
    assert target.read_text() == "mine"
    with pytest.raises(mpool.InvalidArgument, match="is a file to read"):
        quantize(str(source), str(source), "Q8_0", force=True)
    with pytest.raises(mpool.InvalidArgument, match="is a folder"):
        quantize(str(source), str(tmp_path), "Q8_0", force=True)
    with pytest.raises(mpool.errors.FileError, match="Create the folder first"):
        quantize(str(source), str(tmp_path / "none" / "q.gguf"), "Q8_0")
    for settings, words in (({"type": "Q9_K"}, "`type` must be one of Q4_K_M"), ({"threads": 0}, "1 to 64")):
        with pytest.raises(mpool.InvalidArgument, match=words):
            quantize(str(source), str(target), **{"type": "Q8_0", **settings})  # type: ignore[arg-type]
    _only(tmp_path, {"q.gguf"})


@pytest.mark.parametrize("first, second", [("Q8_0", "Q4_0"), ("Q4_K_M", "Q8_0")])
def test_quantising_twice_is_refused(folder: Path, tmp_path: Path, first: str, second: str,
                                     caplog: pytest.LogCaptureFixture) -> None:
    """As llama.cpp does, unless it is allowed. Floats, and the same type again, lose nothing."""
    source, target = quantisedfiles.write("qwen2", first, folder), tmp_path / "q.gguf"
    with pytest.raises(mpool.InvalidArgument, match="precision a second time.*--allow-requantize") as caught:
        quantize(str(source), str(target), second)
    types = ("of type Q8_0", "of type Q5_0")[first == "Q4_K_M"]  # rows of this model are too narrow for blocks of Q4_K
    assert types in str(caught.value) and not target.exists()
    for allowed in ("F16", "F32", first):
        quantize(str(source), str(target), allowed, force=True)
    assert "a second time" not in caplog.text
    quantize(str(source), str(target), second, force=True, allow_requantize=True)
    assert "a second time" in caplog.text


def test_target_that_appears_during_the_write(folder: Path, tmp_path: Path) -> None:
    source = quantisedfiles.write("qwen2", "F32", folder)
    target = tmp_path / "q.gguf"
    with pytest.raises(mpool.errors.FileError, match="q.gguf exists"):
        quantize(str(source), str(target), "Q8_0", progress=lambda done, total: target.write_text("other") and None)
    assert target.read_text() == "other"
    _only(tmp_path, {"q.gguf"})


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), MemoryError()])
def test_interruption_leaves_nothing(folder: Path, tmp_path: Path, failure: BaseException) -> None:
    def stop(done: int, total: int) -> None:
        raise failure

    with pytest.raises(type(failure)):
        quantize(str(quantisedfiles.write("qwen2", "F32", folder)), str(tmp_path / "q.gguf"), "Q8_0", progress=stop)
    _only(tmp_path, set())


def test_no_thread_can_be_started(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, start = str(quantisedfiles.write("qwen2", "F32", folder)), threading.Thread.start
    started: list[str] = []

    def second_fails(self: threading.Thread) -> None:
        if self.name == "mpool-quantize":
            started.append(self.name)
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", second_fails)
    with pytest.raises(mpool.SpawnFailed, match="ulimit -u.*ulimit -v"):
        quantize(source, str(tmp_path / "q.gguf"), "Q8_0", threads=3)
    assert len(started) == 2 and not any(thread.name == "mpool-quantize" and not thread.daemon
                                         for thread in threading.enumerate())
    _only(tmp_path, set())


def test_full_disk(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(quantisedfiles.write("qwen2", "F32", folder))

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(mpool.errors.FileError, match=r"the disk is full; the file needs 0\.\d MB"):
        quantize(source, str(tmp_path / "q.gguf"), "Q8_0")
    monkeypatch.undo()
    monkeypatch.setattr(os, "statvfs", lambda path: type("Disk", (), {"f_bavail": 1, "f_frsize": 512}))
    with pytest.raises(mpool.errors.FileError, match="the disk is full"):
        quantize(source, str(tmp_path / "q.gguf"), "Q8_0")
    _only(tmp_path, set())


def test_weights_that_are_not_finite(folder: Path, tmp_path: Path) -> None:
    import safetensors.torch

    quantisedfiles.save("qwen2", tmp_path / "m")
    tensors = safetensors.torch.load_file(tmp_path / "m" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    safetensors.torch.save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    with pytest.raises(mpool.errors.FormatError, match=r"blk.1.ffn_up.weight.*rows 0 to 159.*finite weights"):
        quantize(str(tmp_path / "m"), str(tmp_path / "q.gguf"), "Q8_0")
    _only(tmp_path, {"m"})


def _edit(path: Path, change: Any) -> None:
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


@pytest.mark.parametrize("file, change, words", [
    ("config.json", lambda t: t.update(hidden_act="gelu"),
     "config.json: a .gguf file of qwen2 cannot state hidden_act 'gelu'"),
    ("tokenizer.json", lambda t: t["model"].update(type="Unigram"), "mpool converts BPE tokenizers only"),
    ("tokenizer.json", lambda t: t["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
     "the pre-tokenizers of gpt-2, smollm, llama-bpe, qwen2, .*, tekken, seed-coder only"),
    ("tokenizer.json", lambda t: t["model"]["merges"].append(["a"]), "model.merges.*pairs of tokens"),
    ("tokenizer.json", lambda t: t["model"]["vocab"].update(zzzz=336), "id of a token.*336.*0 to 335"),
    ("tokenizer.json", lambda t: t["added_tokens"][0].update(id=-1), "id of a token.*-1.*0 to 335"),
    ("config.json", lambda t: (t.get("rope_parameters") or t).update(rope_theta=1e300),
     "config.json: .*rope_theta is 1e.300; GGUF files store 32-bit numbers")])
def test_folders_that_cannot_be_converted(tmp_path: Path, file: str, change: Any, words: str) -> None:
    quantisedfiles.save("qwen2", tmp_path / "m")
    _edit(tmp_path / "m" / file, change)
    with pytest.raises((mpool.Unsupported, mpool.errors.FormatError), match=words):
        quantize(str(tmp_path / "m"), str(tmp_path / "q.gguf"), "Q8_0")
    _only(tmp_path, {"m"})


@pytest.mark.parametrize("family, settings, words", [
    ("qwen3moe_shares", {}, "file of qwen3moe cannot state norm_topk_prob false"),
    ("qwen3moe_dense", {}, "file of qwen3moe cannot state (layers without experts, from mlp_only_layers|hidden_act)"),
    ("smollm3_interval", {}, "smollm3 cannot state rotary tables of layers, from no_rope_layer"),
    ("llama_mistral", {}, "llama cannot state .*sliding_window"),
    ("gemma2_scalar", {}, "gemma2 cannot state scale of attention, from query_pre_attn_scalar, 0"),
    ("gemma2", {"query_pre_attn_scalar": 32, "attn_logit_softcapping": None},
     "gemma2 cannot state attn_logit_softcapping"),
    ("gemma3", {"layers": 2}, "config.json: .* gemma3 cannot state layers with a window, from layer_types")])
def test_settings_that_files_cannot_express(tmp_path: Path, family: str, settings: dict[str, Any], words: str) -> None:
    if family == "gemma3":
        settings = {**settings, "layer_types": ["full_attention", "sliding_attention"]}
    quantisedfiles.save_as(tmp_path / "m", family, settings, "gpt-2")
    with pytest.raises(mpool.Unsupported, match=words):
        quantize(str(tmp_path / "m"), str(tmp_path / "q.gguf"), "Q8_0")
    _only(tmp_path, {"m"})


@pytest.mark.parametrize("change, words", [
    (lambda t: t["model"]["merges"].pop(3), "every split of a token is a merge"),
    (lambda t: t["model"]["merges"].append(t["model"]["merges"].pop(t["model"]["merges"].index(["▁He", "l"]))),
     "in the order of the scores"),
    (lambda t: t["model"]["vocab"].update({"<0x7g>": t["model"]["vocab"].pop("<0x7F>")}), "255 byte tokens.*256"),
    (lambda t: t["normalizer"]["normalizers"].append({"type": "Lowercase"}), "change no other character"),
    (lambda t: t["normalizer"]["normalizers"][0].update(prepend="x"), "change no other character"),
    (lambda t: t.update(normalizer=None), "change no other character"),
    (lambda t: t["model"]["vocab"].update({"x" * 20_000: t["model"]["vocab"].popitem()[1]}), "has long tokens")])
def test_sentencepiece_that_cannot_be_converted(tmp_path: Path, change: Any, words: str) -> None:
    quantisedfiles.save("phi3", tmp_path / "m")
    _edit(tmp_path / "m" / "tokenizer.json", change)
    with pytest.raises((mpool.Unsupported, mpool.errors.FormatError, mpool.LimitError), match=words):
        quantize(str(tmp_path / "m"), str(tmp_path / "q.gguf"), "Q8_0")
    _only(tmp_path, {"m"})


@pytest.mark.parametrize("family", ["gpt_oss", "bamba"])
def test_other_families_are_named(tmp_path: Path, family: str) -> None:
    import paritymodels

    model = paritymodels.decoder(family, 1, vocab=157)
    model.save_pretrained(tmp_path / "m")
    paritymodels.write_tokenizer(tmp_path / "m", 157)
    words = f"folders of the architectures llama, qwen2, .* got {family}"
    with pytest.raises(mpool.Unsupported, match=words) as caught:
        quantize(str(tmp_path / "m"), str(tmp_path / "q.gguf"), "Q8_0")
    hint = "sorts the rotary pairs of Bamba wrongly" if family == "bamba" else "Convert the folder with llama.cpp's"
    assert hint in str(caught.value)
    with pytest.raises(mpool.errors.FileError):
        quantize(str(tmp_path / "none.gguf"), str(tmp_path / "q.gguf"), "Q8_0")


def test_command(folder: Path, tmp_path: Path) -> None:
    source = quantisedfiles.write("qwen2", "F32", folder)
    command = [sys.executable, "-m", "mpool", "quantize", str(source), str(tmp_path / "q.gguf"), "--type", "Q8_0"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["bytes"] == (tmp_path / "q.gguf").stat().st_size
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 1 and "exists. Use --force" in again.stderr
