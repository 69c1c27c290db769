"""Folders with weights in AWQ, GPTQ and FP8, compared with transformers, which computes with the float values of the
weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import _core
from mpool.models.formats.hf_folder import describe_folder
from mpool.models.quantizing.quantize import quantize

import quantisedfiles
import quantisedmodels
from corelib import logits
from paritymodels import torch

gguf = pytest.importorskip("gguf")

TOLERANCE = 1e-4
#: Name -> family, settings of the model, settings of :func:`quantisedmodels.save`.
FOLDERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "awq": ("llama", {}, {"method": "awq"}),
    "awq_one_group": ("qwen3", {}, {"method": "awq", "group": -1}),
    "awq_128": ("qwen2", {"hidden": 384, "inner": 256}, {"method": "awq", "group": 128}),
    "gptq": ("llama", {}, {"method": "gptq"}),
    "gptq_v2": ("qwen2", {}, {"method": "gptq", "v2": True, "group": -1}),
    "gptq_symmetric": ("llama", {}, {"method": "gptq", "symmetric": True, "group": 64}),  # the last group is shorter
    "gptq_ordered": ("llama", {}, {"method": "gptq", "ordered": True}),
    "fp8": ("llama", {"hidden": 288, "inner": 160}, {"method": "fp8"}),
    "fp8_small_blocks": ("qwen3", {}, {"method": "fp8", "block": (24, 64)}),
    "fp8_tensor": ("qwen2", {}, {"method": "fp8", "block": None, "scale_name": "weight_scale"}),
    "fp8_channel": ("llama", {}, {"method": "compressed-tensors", "block": None, "channel": True,
                                  "scale_name": "weight_scale"}),
    "fp8_experts": ("qwen3moe", {"moe_intermediate_size": 64}, {"method": "fp8", "block": (32, 32)}),
    "awq_experts": ("qwen3moe", {"moe_intermediate_size": 64}, {"method": "awq"}),
    "gptq_experts": ("qwen3moe", {"moe_intermediate_size": 64}, {"method": "gptq", "ordered": True}),
    "fp8_deepseek": ("deepseek2", {"hidden": 160, "kv_lora_rank": 64, "q_lora_rank": 64, "moe_intermediate_size": 64},
                     {"method": "fp8"}),
}


@pytest.fixture(scope="module", params=list(FOLDERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    family, sizes, options = FOLDERS[request.param]
    path = tmp_path_factory.mktemp(request.param)
    model = quantisedmodels.decoder(family, **sizes)
    quantisedmodels.save(model, path, **options)
    tokens = np.random.default_rng(7).integers(2, 157, 50)
    with torch.no_grad():
        expected = model(torch.tensor(tokens[None])).logits[0].numpy()
    return str(path), tokens, expected


@pytest.mark.sample(4)
def test_float32_computes_the_formula(folder) -> None:
    path, tokens, expected = folder
    with mpool.Pool() as pool:
        got = logits(pool, path, tokens, "float32")
    assert np.abs(got - expected).max() <= TOLERANCE * max(1.0, np.abs(expected).max())


def test_stored_types_are_near_the_formula(folder) -> None:
    """Activations of 8 bits dominate the difference: it is that of a quantised GGUF file. The median leaves out the
    rows whose tokens are routed to other experts."""
    path, tokens, expected = folder
    with mpool.Pool() as pool:
        got = logits(pool, path, tokens)
    errors = np.sqrt(np.mean((got - expected) ** 2, axis=1) / np.mean(expected ** 2, axis=1))
    assert np.median(errors) <= 0.06


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["awq", "awq_one_group", "gptq", "gptq_v2", "gptq_symmetric", "gptq_ordered", "fp8",
                                  "fp8_small_blocks", "fp8_tensor", "fp8_channel", "fp8_experts", "awq_experts"])
def test_gguf_file_of_a_folder_computes_the_formula(tmp_path: Path, name: str) -> None:
    family, sizes, options = FOLDERS[name]
    model = quantisedmodels.decoder(family, vocab=quantisedfiles.ROWS, **sizes)
    quantisedmodels.save(model, tmp_path / "m", **options)
    quantisedfiles.write_tokenizer(tmp_path / "m", "qwen2")
    report = quantize(str(tmp_path / "m"), str(tmp_path / "q.gguf"), "F32")
    tokens = np.random.default_rng(7).integers(2, quantisedfiles.VOCAB, 50)
    with torch.no_grad():
        expected = model(torch.tensor(tokens[None])).logits[0].numpy()
    with mpool.Pool() as pool:
        got = logits(pool, report.path, tokens, "float32")
    assert np.abs(got - expected).max() <= TOLERANCE * max(1.0, np.abs(expected).max())


def test_gguf_file_has_the_values_of_the_formula(tmp_path: Path) -> None:
    model = quantisedmodels.decoder("qwen2", vocab=quantisedfiles.ROWS)
    quantisedmodels.save(model, tmp_path / "m", "gptq", ordered=True)
    quantisedfiles.write_tokenizer(tmp_path / "m", "qwen2")
    quantize(str(tmp_path / "m"), str(tmp_path / "q.gguf"), "F32")
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "q.gguf").tensors}
    for at, layer in enumerate(model.model.layers):
        for name, linear in (("ffn_down", layer.mlp.down_proj), ("attn_k", layer.self_attn.k_proj)):
            assert np.array_equal(stored[f"blk.{at}.{name}.weight"], linear.weight.detach().numpy()), (at, name)


@pytest.mark.parametrize("part, value, words", [
    ("scales", np.inf, "finite scales"), ("scales", 0, "scales that are not 0")])
def test_hostile_scales_are_not_written(tmp_path: Path, part: str, value: float, words: str) -> None:
    model = quantisedmodels.decoder("qwen2", vocab=quantisedfiles.ROWS)
    quantisedmodels.save(model, tmp_path / "m", "awq")
    quantisedfiles.write_tokenizer(tmp_path / "m", "qwen2")

    def edit(tensor: Any) -> Any:
        tensor[1, 3] = value
        return tensor

    quantisedmodels.change(tmp_path / "m", f"model.layers.1.mlp.up_proj.{part}", edit)
    with pytest.raises(mpool.errors.FormatError, match=words):
        quantize(str(tmp_path / "m"), str(tmp_path / "q.gguf"), "Q8_0")
    assert not (tmp_path / "q.gguf").exists()


def test_arguments_of_the_core(tmp_path: Path) -> None:
    model = quantisedmodels.decoder("qwen2", vocab=quantisedfiles.ROWS)
    quantisedmodels.save(model, tmp_path, "fp8")
    spec = describe_folder(str(tmp_path), key="k", ref="k").spec
    matrix = _core.Matrix(spec.to_core(), "blk.1.ffn_up.weight")
    whole = matrix.rows(0, 160)
    assert whole.shape == (160, 96) and whole.dtype == np.float32
    assert np.array_equal(matrix.rows(33, 40), whole[33:73]) and matrix.rows(160, 0).shape == (0, 96)
    for first, count in ((-1, 1), (0, -1), (160, 1), (0, 161), (2**62, 2**62)):
        with pytest.raises(mpool.InvalidArgument, match="must be within 0 to 159, got "):
            matrix.rows(first, count)
    with pytest.raises(mpool.InvalidArgument, match="must have a type whose scales are separate tensors"):
        _core.Matrix(spec.to_core(), "token_embd.weight")
    with pytest.raises(mpool.errors.FormatError, match="no.weight"):
        _core.Matrix(spec.to_core(), "no.weight")
    with pytest.raises(TypeError, match="expected a Spec"):
        _core.Matrix(None, "blk.1.ffn_up.weight")


def test_zero_biases_are_dropped(tmp_path: Path) -> None:
    """Converters to GPTQ add zero biases to layers that have none."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = quantisedmodels.decoder("llama")
    tensors = quantisedmodels.save(model, tmp_path, "gptq")
    name = "model.layers.1.mlp.down_proj.bias"
    tensors[name] = torch.zeros(96, dtype=torch.float16)
    safetensors.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with mpool.Pool() as pool:
        logits(pool, str(tmp_path), np.arange(4))
    tensors[name][95] = 0.5
    safetensors.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with mpool.Pool() as pool, pytest.raises(mpool.errors.FormatError, match="down_proj.bias"):
        pool.load(str(tmp_path))


Q = "model.layers.0.self_attn.q_proj."


def _first(value: float) -> Any:
    def edit(tensor: Any) -> Any:
        tensor.view(-1)[3] = value
        return tensor
    return edit


#: Method, options, tensor, edit, words of the error.
HOSTILE: list[tuple[str, dict[str, Any], str, Any, str]] = [
    ("awq", {}, Q + "qzeros", lambda t: None, "q_proj.qzeros missing"),
    ("awq", {}, Q + "scales", lambda t: None, "q_proj.scales missing"),
    ("gptq", {"ordered": True}, Q + "g_idx", lambda t: None, "q_proj.g_idx missing"),
    ("fp8", {}, Q + "weight_scale_inv", lambda t: None, "q_proj.weight_scale_inv missing"),
    ("awq", {}, Q + "qweight", lambda t: t[:40], r"shape of .*q_proj.qweight.*multiples of 8 outputs and of 32"),
    ("awq", {}, Q + "qweight", lambda t: t.float(), "q_proj.qweight.*an I32 matrix"),
    ("awq", {}, Q + "qweight", lambda t: t[:64], r"shape of .*q_proj.qzeros"),
    ("awq", {}, Q + "scales", lambda t: t[:1], r"shape of .*q_proj.scales.*\[3, 96\]"),
    ("awq", {}, Q + "scales", lambda t: t.to(torch.int32), r"type of .*q_proj.scales.*BF16, F16, F32"),
    ("gptq", {}, Q + "g_idx", _first(3), r"values of .*q_proj.g_idx.*3 at index 3.*groups 0 to 2"),
    ("gptq", {}, Q + "g_idx", _first(-1), r"values of .*q_proj.g_idx.*-1 at index 3.*groups 0 to 2"),
    ("gptq", {}, Q + "g_idx", lambda t: t[:9], r"shape of .*q_proj.g_idx.*\[96\]"),
    ("awq", {}, Q + "scales", _first(float("nan")), r"blk.0.attn_q.scales.*nan at index 3.*finite"),
    ("awq", {}, Q + "scales", _first(float("inf")), r"blk.0.attn_q.scales.*inf at index 3.*finite"),
    ("gptq", {}, Q + "scales", _first(0.0), r"blk.0.attn_q.scales.*0 at index 3.*not 0"),
    ("gptq", {}, Q + "scales", _first(5000.0), r"blk.0.attn_q.scales.*at most 4094"),
    ("fp8", {}, Q + "weight_scale_inv", lambda t: t * float("nan"), r"blk.0.attn_q.scales.*nan at index 0.*finite"),
    ("fp8", {}, Q + "weight_scale_inv", lambda t: t * 0, r"blk.0.attn_q.scales.*0 at index 0.*not 0"),
    ("fp8", {}, Q + "weight_scale_inv", lambda t: t.repeat(2, 3),
     r"shape of .*weight_scale_inv.*\[1, 1\] or \[96, 1\]"),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("method, options, name, edit, words", HOSTILE)
def test_hostile_tensors(tmp_path: Path, method: str, options: dict[str, Any], name: str, edit: Any,
                         words: str) -> None:
    quantisedmodels.save(quantisedmodels.decoder("llama", layers=1), tmp_path, method, **options)
    quantisedmodels.change(tmp_path, name, edit)
    with mpool.Pool() as pool, pytest.raises(mpool.errors.FormatError, match=f"(?s){words}"):
        pool.load(str(tmp_path))


@pytest.mark.sample(4)
@pytest.mark.parametrize("method, changes, error, words", [
    ("awq", {"bits": 8}, mpool.Unsupported, "bits is 8, mpool supports only 4"),
    ("awq", {"version": "gemv"}, mpool.Unsupported, "version is 'gemv', mpool supports only 'gemm'"),
    ("awq", {"zero_point": False}, mpool.Unsupported, "zero_point is false"),
    ("awq", {"group_size": 48}, mpool.errors.FormatError, "group_size.*48.*a multiple of 32"),
    ("gptq", {"group_size": 0}, mpool.errors.FormatError, "group_size.*-1 .one group., or a multiple of 32"),
    ("gptq", {"group_size": (1 << 20) + 32}, mpool.errors.FormatError, "group_size.*1048608.*1048576"),
    ("fp8", {"weight_block_size": [(1 << 20) + 1, 128]}, mpool.errors.FormatError, "two sizes from 1 to 1048576"),
    ("gptq", {"bits": 3}, mpool.Unsupported, "bits is 3, mpool supports only 4"),
    ("gptq", {"checkpoint_format": "marlin"}, mpool.Unsupported, "checkpoint_format is 'marlin'"),
    ("fp8", {"fmt": "e5m2"}, mpool.Unsupported, "fmt is 'e5m2'"),
    ("fp8", {"weight_block_size": [128, 0]}, mpool.errors.FormatError, "weight_block_size.*two sizes from 1"),
    ("fp8", {"weight_block_size": [1 << 40, 128]}, mpool.errors.FormatError, "weight_block_size.*two sizes from 1"),
    ("fp8", {"quant_method": "bitsandbytes"}, mpool.Unsupported, "quantised by bitsandbytes.*awq .*gptq .*fp8"),
    ("compressed-tensors", {"format": "pack-quantized"}, mpool.Unsupported, "format is 'pack-quantized'")])
def test_unsupported_options(tmp_path: Path, method: str, changes: dict[str, Any], error: type[Exception],
                             words: str) -> None:
    options: dict[str, Any] = {"block": None, "scale_name": "weight_scale"} if method == "compressed-tensors" else {}
    quantisedmodels.save(quantisedmodels.decoder("llama", layers=1), tmp_path, method, changes=changes, **options)
    with mpool.Pool() as pool, pytest.raises(error, match=f"(?s){words}"):
        pool.load(str(tmp_path))
