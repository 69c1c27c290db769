"""Seeded low-rank adapters: matrices, folders of PEFT, GGUF files of llama.cpp, and models with merged weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ATTENTION, FEED_FORWARD = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
ALL = (*ATTENTION, *FEED_FORWARD)
_GGUF = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
         "up_proj": "ffn_up", "down_proj": "ffn_down"}

Matrices = dict[str, tuple[np.ndarray, np.ndarray]]


def matrices(model: Any, rank: int, seed: int, targets: tuple[str, ...] = ALL, size: float = 0.15) -> Matrices:
    """Return random matrices A and B for every linear layer of a causal language model that is among ``targets``, by
    the layer's name in the model."""
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(seed)
    found: Matrices = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets:
            a = generator.normal(0, size, (rank, module.in_features)).astype(np.float32)
            b = generator.normal(0, size / rank**0.5, (module.out_features, rank)).astype(np.float32)
            found[name] = a, b
    return found


def save_peft(folder: Path, found: Matrices, alpha: float, dtype: str = "float32", **config: Any) -> Path:
    """Write a folder of PEFT. ``config``: keys of adapter_config.json besides the required ones; None: omit the key."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    rank = next(iter(found.values()))[0].shape[0] if found else 1
    given = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "r": rank,
             "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "target_modules": sorted(
                 {name.rpartition(".")[2] for name in found}), **config}
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in given.items() if v is not None}))
    tensors = {f"base_model.model.{name}.lora_{side}.weight": torch.from_numpy(matrix).to(getattr(torch, dtype))
               for name, pair in found.items() for side, matrix in zip("AB", pair)}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def save_gguf(path: Path, found: Matrices, alpha: float, heads: dict[str, int] | None = None,
              architecture: str = "llama", **keys: str) -> Path:
    """Write a GGUF adapter as llama.cpp's convert_lora_to_gguf.py does.

    Args:
        heads: numbers of heads of ``q_proj`` and ``k_proj``, whose halves are interleaved; None: no layer's are.
        keys: text keys that replace others, with ``_`` for ``.``.
    """
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {"general_type": "adapter", "adapter_type": "lora", **keys}.items():
        writer.add_string(name.replace("_", "."), value)
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, (a, b) in found.items():
        layer, kind = name.split(".")[2], name.rpartition(".")[2]
        if heads and kind in heads:
            b = b.reshape(heads[kind], 2, -1, b.shape[1]).swapaxes(1, 2).reshape(b.shape)
        for side, matrix in zip("ab", (a, b)):
            writer.add_tensor(f"blk.{layer}.{_GGUF.get(kind, kind)}.weight.lora_{side}", np.ascontiguousarray(matrix))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merged(model: Any, found: Matrices, scale: float) -> Any:
    """Return a copy of a model with the updates added to its weights."""
    torch = pytest.importorskip("torch")
    whole = copy.deepcopy(model)
    layers = dict(whole.named_modules())
    for name, (a, b) in found.items():
        layers[name].weight.data += scale * (torch.from_numpy(b) @ torch.from_numpy(a))
    return whole.eval()
