"""Seeded low-rank adapters: matrices, folders of PEFT, GGUF files of llama.cpp, and models with merged weights."""

import copy
import hashlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ATTENTION, FEED_FORWARD = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
ALL = (*ATTENTION, *FEED_FORWARD)
_GGUF = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
         "up_proj": "ffn_up", "down_proj": "ffn_down", "in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate",
         "in_proj_b": "ssm_beta", "in_proj_a": "ssm_alpha", "out_proj": "ssm_out",
         "query": "attn_q", "key": "attn_k", "value": "attn_v",
         "attention.output.dense": "attn_output", "intermediate.dense": "ffn_up", "output.dense": "ffn_down"}

Matrices = dict[str, tuple[np.ndarray, np.ndarray]]


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the matrices of a model, or of a folder with one safetensors file, without ``.weight``."""
    if not isinstance(model, Path):
        torch = pytest.importorskip("torch")
        return {name: tuple(module.weight.shape) for name, module in model.named_modules()
                if isinstance(module, torch.nn.Linear)}
    data = (model / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    return {name.removesuffix(".weight"): tuple(entry["shape"]) for name, entry in sorted(header.items())
            if name.endswith(".weight") and len(entry["shape"]) == 2}


def matrices(model: Any, rank: int, seed: int, targets: tuple[str, ...] = ALL, size: float = 0.15) -> Matrices:
    """Return random matrices A and B for the linear layers of a model whose names end in one of ``targets``, by the
    layer's name. ``model``: a model of torch, or its folder."""
    generator = np.random.default_rng(seed)
    found: Matrices = {}
    for name, (outputs, inputs) in _shapes(model).items():
        if name.rpartition(".")[2] in targets and "pooler" not in name:
            a = generator.normal(0, size, (rank, inputs)).astype(np.float32)
            b = generator.normal(0, size / rank**0.5, (outputs, rank)).astype(np.float32)
            found[name] = a, b
    return found


def _stored(matrix: np.ndarray, dtype: str) -> bytes:
    """Return the bytes of a float32 matrix in another type, rounded to nearest even."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(matrix, dtype).tobytes()
    bits = np.ascontiguousarray(matrix, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes()


def save_tensors(path: Path, tensors: dict[str, np.ndarray], dtype: str = "float32") -> None:
    """Write a safetensors file (https://huggingface.co/docs/safetensors). ``dtype``: type of the float32 matrices."""
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, at = [], 0
    for name, matrix in tensors.items():
        kind = dtype if matrix.dtype == np.float32 else str(matrix.dtype)
        parts.append(_stored(matrix, kind))
        header[name] = {"dtype": names[kind], "shape": list(matrix.shape), "data_offsets": [at, at + len(parts[-1])]}
        at += len(parts[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def smaller(model: Path, folder: Path) -> Path:
    """Copy a model without its last layer: adapters of the whole model do not fit."""
    import safetensors.numpy

    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    (folder / "config.json").write_text(json.dumps(config))
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    safetensors.numpy.save_file({name: tensor for name, tensor in weights.items()
                                 if f".layers.{config['num_hidden_layers']}." not in name},
                                folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def digest_of(*folders: Path) -> str:
    """Return the hash of the tensors and their names in folders: recorded results belong to these weights."""
    from safetensors.numpy import load_file

    found = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            found.update(f"{path.name} {name} {tensor.dtype} {tensor.shape}".encode() + tensor.tobytes())
    return found.hexdigest()


def save_peft(folder: Path, found: Matrices, alpha: float, dtype: str = "float32", **config: Any) -> Path:
    """Write a folder of PEFT. ``config``: keys of adapter_config.json besides the required ones; None: omit the key."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = next(iter(found.values()))[0].shape[0] if found else 1
    given = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "r": rank,
             "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none", "target_modules": sorted(
                 {name.rpartition(".")[2] for name in found}), **config}
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in given.items() if v is not None}))
    save_tensors(folder / "adapter_model.safetensors", {
        f"base_model.model.{name}.lora_{side}.weight": matrix
        for name, pair in found.items() for side, matrix in zip("AB", pair)}, dtype)
    return folder


def two_adapters(model: Path, folder: Path, first: int = 0) -> dict[str, Path]:
    """Write the adapters ``one`` and ``two`` of an encoder as folders of PEFT. ``first``: seed of ``one``."""
    targets = ("query", "key", "value")
    return {name: save_peft(folder / name, matrices(model, 4, seed, targets), 9.0, task_type="FEATURE_EXTRACTION")
            for seed, name in enumerate(("one", "two"), first)}


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
        stored = next((to for end, to in _GGUF.items() if name.endswith("." + end)), kind)
        for side, matrix in zip("ab", (a, b)):
            writer.add_tensor(f"blk.{layer}.{stored}.weight.lora_{side}", np.ascontiguousarray(matrix))
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
