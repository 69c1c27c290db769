"""Folders of seeded models whose linear layers are quantised as AWQ, GPTQ and FP8 checkpoints store them.

The layouts are written from the descriptions of the formats, independently of mpool's reader. AWQ and GPTQ follow the
reference dequantisers of AutoAWQ (``awq/utils/packing_utils.py``: nibble i of a word is column ``ORDER[i]``, weight =
(code - zero) * scale) and GPTQModel (v1 stores zeros less one). The weights of the model are replaced by the values
that the formula gives in float64.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paritymodels
from paritymodels import torch

#: Columns of the nibbles of a word in AWQ.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def decoder(family: str, layers: int = 2, hidden: int = 96, inner: int = 160, vocab: int = 157, **more: Any) -> Any:
    """Create a seeded decoder whose sizes are multiples of 32."""
    model = paritymodels.decoder(family, layers, hidden=hidden, vocab=vocab, **more)
    model.config.intermediate_size = inner
    model = type(model)(model.config).eval()
    paritymodels.randomise(model, 4)
    return model


def pack(codes: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Pack 4-bit codes into int32 along an axis; nibble i of a word is code ``order[i]`` of eight."""
    words = np.moveaxis(codes, axis, -1).astype(np.uint32)
    words = words.reshape(*words.shape[:-1], -1, 8)
    packed = sum(words[..., order[i]] << np.uint32(4 * i) for i in range(8))
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32)


def quantise(weight: np.ndarray, groups: np.ndarray, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantise a weight [outputs, inputs] to 4 bits. ``groups``: the group of each input.

    Returns:
        codes [inputs, outputs], zeros [groups, outputs] from 1 to 15, and scales [groups, outputs] in float16.
    """
    columns, count = weight.T, int(groups.max()) + 1
    codes = np.empty(columns.shape, np.int64)
    zeros, scales = np.empty((2, count, columns.shape[1]))
    for group in range(count):
        rows = columns[groups == group]
        low, high = np.minimum(rows.min(0), -1e-3), np.maximum(rows.max(0), 1e-3)
        scale = (2 * np.maximum(-low, high) if symmetric else high - low) / 15
        scales[group] = scale.astype(np.float16)
        zeros[group] = 8 if symmetric else np.clip(np.rint(-low / scale), 1, 15)
        codes[groups == group] = np.clip(np.rint(rows / scales[group]) + zeros[group], 0, 15)
    return codes, zeros.astype(np.int64), scales.astype(np.float16)


def values(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the weight [outputs, inputs] in float64: scale * (code - zero)."""
    return (scales.astype(np.float64)[groups] * (codes - zeros[groups])).T


def integers(weight: np.ndarray, method: str, group: int, *, symmetric: bool = False, ordered: bool = False,
             v2: bool = False, seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the tensors of a weight in AWQ or GPTQ by suffix, and its values."""
    inputs = weight.shape[1]
    size = inputs if group == -1 else group
    groups = np.arange(inputs) // size
    if ordered:
        groups = np.random.default_rng(seed).permutation(groups)
    codes, zeros, scales = quantise(weight, groups, symmetric)
    exact = values(codes, zeros, scales, groups)
    if method == "awq":
        return {"qweight": pack(codes, 1, ORDER), "qzeros": pack(zeros, 1, ORDER), "scales": scales}, exact
    return {"qweight": pack(codes, 0), "qzeros": pack(zeros if v2 else zeros - 1, 1), "scales": scales,
            "g_idx": groups.astype(np.int32)}, exact


def fp8(weight: np.ndarray, block: tuple[int, int]) -> tuple[Any, np.ndarray, np.ndarray]:
    """Return a weight in E4M3 [outputs, inputs], its scales in float32, one per block, and its values."""
    rows, columns = (-(-size // part) for size, part in zip(weight.shape, block))
    spread = np.ones((rows, columns))
    for r in range(rows):
        for c in range(columns):
            part = weight[r * block[0]:(r + 1) * block[0], c * block[1]:(c + 1) * block[1]]
            spread[r, c] = np.abs(part).max() / 448
    scales = spread.astype(np.float32)
    full = scales.repeat(block[0], 0).repeat(block[1], 1)[:weight.shape[0], :weight.shape[1]].astype(np.float64)
    codes = torch.tensor(weight / full).to(torch.float32).to(torch.float8_e4m3fn)
    return codes, scales, codes.to(torch.float64).numpy() * full


def is_quantised(name: str, tensor: Any) -> bool:
    """Return True for the weights that published checkpoints quantise."""
    return (tensor.ndim == 2 and name.endswith("_proj.weight") or "kv_a_proj_with_mqa" in name and tensor.ndim == 2)


def save(model: Any, folder: Path, method: str, *, group: int = 32, block: tuple[int, int] | None = (128, 128),
         bits: int = 4, changes: dict[str, Any] | None = None, scale_name: str = "weight_scale_inv",
         channel: bool = False, **options: Any) -> dict[str, Any]:
    """Save a model with quantised weights, and replace its own weights by the quantised values.

    Args:
        method: ``"awq"``, ``"gptq"``, ``"fp8"`` or ``"compressed-tensors"``.
        group: inputs per scale (AWQ, GPTQ).
        block: outputs and inputs per scale (FP8); None: one scale per weight, or with ``channel`` per output.
        changes: replaced keys of ``quantization_config``.
        options: of :func:`integers`.

    Returns:
        the stored tensors by name.
    """
    safetensors = pytest.importorskip("safetensors.torch")
    model.save_pretrained(folder)
    tensors = safetensors.load_file(folder / "model.safetensors")
    own = dict(model.named_parameters())
    for seed, name in enumerate([name for name in tensors if is_quantised(name, tensors[name])]):
        weight = tensors.pop(name).double().numpy()
        stem = name.removesuffix("weight")
        if method in ("awq", "gptq"):
            parts, exact = integers(weight, method, group, seed=seed, **options)
            tensors.update({stem + suffix: torch.tensor(part) for suffix, part in parts.items()})
        else:
            codes, scales, exact = fp8(weight, block or ((1 if channel else weight.shape[0]), weight.shape[1]))
            tensors[name] = codes
            tensors[stem + scale_name] = torch.tensor(scales if block or channel else scales.reshape(1))
        if name in own:
            own[name].data = torch.tensor(exact).float()
        else:  # transformers holds the experts of a layer in one tensor
            set_expert(own, name, torch.tensor(exact).float())
    safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    table: dict[str, Any] = {"quant_method": method}
    if method in ("awq", "gptq"):
        table |= {"bits": bits, "group_size": group}
    if method == "awq":
        table |= {"version": "gemm", "zero_point": True, "modules_to_not_convert": None}
    elif method == "gptq":
        table |= {"desc_act": options.get("ordered", False), "sym": options.get("symmetric", False),
                  "checkpoint_format": "gptq_v2" if options.get("v2") else "gptq"}
    elif method == "fp8":
        table |= {"activation_scheme": "dynamic", "fmt": "e4m3"}
        if block:
            table["weight_block_size"] = list(block)
    else:
        weights = {"num_bits": 8, "type": "float", "strategy": "channel" if channel else "tensor"}
        table |= {"format": "float-quantized", "config_groups": {"group_0": {"weights": weights,
                                                                             "targets": ["Linear"]}}}
    config["quantization_config"] = table | (changes or {})
    (folder / "config.json").write_text(json.dumps(config))
    paritymodels.write_tokenizer(folder, 157)
    return tensors


def set_expert(own: dict[str, Any], name: str, weight: Any) -> None:
    """Set one matrix of an expert: a part of ``experts.gate_up_proj`` or ``experts.down_proj``."""
    before, _, after = name.partition(".experts.")
    number, part = after.split(".")[:2]
    if part == "down_proj":
        own[f"{before}.experts.down_proj"].data[int(number)] = weight
        return
    half = weight.shape[0]
    first = 0 if part == "gate_proj" else half
    own[f"{before}.experts.gate_up_proj"].data[int(number), first:first + half] = weight


def change(folder: Path, name: str, edit: Any) -> None:
    """Replace a stored tensor by ``edit(tensor)``; None removes it."""
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = safetensors.load_file(folder / "model.safetensors")
    changed = edit(tensors.pop(name).clone())
    if changed is not None:
        tensors[name] = changed.contiguous()
    safetensors.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
