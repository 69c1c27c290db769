"""Keys and tensors of a model, from a GGUF file or a model folder, as they are written to a GGUF file."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import Unsupported
from ..files import Folder
from ..formats.gguf_model import describe_gguf
from ..formats.gguf_tables import read_gguf
from ..formats.hf_folder import describe_folder
from ..formats.safetensors_header import WEIGHT_DTYPES
from ..spec import TensorEntry, Value
from .gguf_layout import read_values, value
from .recipes import Model
from .vocabulary import tokenizer_keys

#: Architectures of folders -> kinds of tensors whose rows llama.cpp orders differently (the halves of each head
#: interleaved).
FOLDERS: dict[str, tuple[str, ...]] = {"llama": ("attn_q", "attn_k"), "qwen2": (), "qwen3": ()}
#: Keys of a file that describe that file only.
_OF_THE_FILE = ("split.", "general.alignment", "general.quantization_version", "general.file_type")


@dataclass(frozen=True)
class Tensor:
    """A tensor to write.

    Attributes:
        name: GGUF's name.
        shape: shape, outermost dimension first.
        entry: where its values are; None: in ``data``.
        heads: heads whose halves are interleaved; 0: rows are copied in their order.
        data: values in float32, if they are not in a file.
        folder: True if the tensor is from a folder: small tensors are then written as F32.
    """

    name: str
    shape: tuple[int, ...]
    entry: TensorEntry | None
    heads: int = 0
    data: bytes = b""
    folder: bool = False


@dataclass(frozen=True)
class Input:
    """A model to write.

    Attributes:
        keys: keys, as stored with their types, without ``general.file_type``.
        tensors: all tensors.
        paths: files of the tensors.
        model: facts for the recipe.
    """

    keys: Mapping[str, bytes]
    tensors: tuple[Tensor, ...]
    paths: tuple[str, ...]
    model: Model


def read_input(path: str) -> Input:
    """Read a GGUF file or a model folder, without its weights.

    Raises:
        FormatError, UnsafeFormat, LimitError, Unsupported: mpool cannot read or convert the model.
        FileError: a file is missing.
    """
    return _from_folder(path) if os.path.isdir(path) else _from_gguf(path)


def _model(name: str, kv: Mapping[str, Value], names: set[str]) -> Model:
    def number(key: str) -> int:
        found = kv.get(f"{name}.{key}", 0)
        return found if type(found) is int else 0

    heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")
    return Model(layers=number("block_count"), experts=number("expert_count"), tied="output.weight" not in names,
                 is_70b=number("block_count") == 80 and name in ("llama", "qwen2") and heads != kv_heads)


def _from_gguf(path: str) -> Input:
    described = describe_gguf(path, key=path, ref=path)
    if described.spec.architecture in ("flux", "sd3"):
        raise Unsupported(f"{path}: mpool quantises text models, got {described.spec.architecture}",
                          hint="Use stable-diffusion.cpp for image generation")
    _, tensors, files = read_gguf(path)
    end = min((entry.offset for entry in tensors if entry.file == 0), default=os.path.getsize(path))
    keys = {key: content for key, content in read_values(files[0], end).items() if not key.startswith(_OF_THE_FILE)}
    return Input(keys, tuple(Tensor(entry.name, entry.shape, entry) for entry in tensors), files,
                 _model(described.spec.architecture, described.spec.kv, {entry.name for entry in tensors}))


def _from_folder(path: str) -> Input:
    model = describe_folder(path, key=path, ref=path)
    spec, name = model.spec, model.spec.architecture
    if name not in FOLDERS or model.capability != "text_to_text":
        raise Unsupported(f"{path}: mpool converts folders of {', '.join(FOLDERS)}, got {name}",
                          hint="Convert the folder with llama.cpp's convert_hf_to_gguf.py; mpool quantises the .gguf")
    stored = next((entry for entry in spec.tensors if entry.dtype not in WEIGHT_DTYPES), None)
    if stored is not None:
        raise Unsupported(f"{path}: {stored.name} is {stored.dtype}; mpool converts folders with weights of "
                          f"{', '.join(sorted(WEIGHT_DTYPES))}", hint="Use the folder of the unquantised model")
    keys, factors = _parameters(path, spec.kv, name)
    rows = next(entry.shape[0] for entry in spec.tensors if entry.name == "token_embd.weight")
    keys |= tokenizer_keys(Folder(path), model, rows)
    heads = {"attn_q": _integer(spec.kv, f"{name}.attention.head_count"),
             "attn_k": _integer(spec.kv, f"{name}.attention.head_count_kv")}
    tensors = [Tensor(entry.name, entry.shape, entry, _interleaved(name, entry.name, heads), folder=True)
               for entry in spec.tensors]
    if factors:
        tensors.append(Tensor("rope_freqs.weight", (len(factors),), None,
                              data=struct.pack(f"<{len(factors)}f", *factors)))
    general = {"general.architecture": value(name), "general.type": value("model"),
               "general.name": value(os.path.basename(os.path.abspath(path)))}
    return Input(general | keys, tuple(tensors), spec.files,
                 _model(name, spec.kv, {entry.name for entry in spec.tensors}))


def _integer(kv: Mapping[str, Value], key: str) -> int:
    found = kv[key]
    assert isinstance(found, int)
    return found


def _interleaved(architecture: str, name: str, heads: Mapping[str, int]) -> int:
    part = name.split(".")[2] if name.startswith("blk.") else ""
    return heads[part] if part in FOLDERS[architecture] else 0


def _parameters(path: str, kv: Mapping[str, Value], a: str) -> tuple[dict[str, bytes], list[float]]:
    """Return the hyper-parameters as keys, and the factors of Llama 3's RoPE, which are a tensor."""
    rest = dict(kv)
    kind = rest.get(f"{a}.rope.scaling.type", "none")
    factor = float(rest.get(f"{a}.rope.scaling.factor", 1.0))  # type: ignore[arg-type]
    neutral: dict[str, tuple[Value, ...]] = {"mpool.rope_neox": (True,), "mpool.activation": ("silu",)}
    if kind == "yarn":
        neutral |= {"mpool.rope_yarn_truncate": (True,), f"{a}.rope.scaling.yarn_beta_fast": (32.0,),
                    f"{a}.rope.scaling.yarn_beta_slow": (1.0,)}
        inferred = rest.pop("mpool.rope_attention_factor", 1.0)
        usual = 0.1 * math.log(max(factor, 1.0)) + 1
        if not math.isclose(float(inferred), usual, rel_tol=1e-6):  # type: ignore[arg-type]
            rest["mpool.rope_attention_factor"] = inferred
    for key, allowed in neutral.items():
        if rest.get(key, allowed[0]) in allowed:
            rest.pop(key, None)
    factors: list[float] = []
    if kind == "llama3":
        factors = _llama3_factors(rest, a, factor)
        rest = {key: one for key, one in rest.items() if ".rope.scaling." not in key}
    for key in rest:
        if key.startswith("mpool.") or key.endswith("attention.sliding_window"):
            raise Unsupported(f"{path}: mpool does not convert {a} with the setting {key.removeprefix('mpool.')}",
                              hint="Convert the folder with llama.cpp's convert_hf_to_gguf.py; mpool quantises the "
                                   ".gguf")
    return {key: value(one) for key, one in rest.items()}, factors  # type: ignore[arg-type]


def _llama3_factors(kv: Mapping[str, Value], a: str, factor: float) -> list[float]:
    """Return the divisor of the frequency of each rotated pair.

    Short wavelengths are kept, long ones are divided by ``factor``, and the divisor changes gradually between them
    (transformers' ``rope_type`` llama3).
    """
    def number(key: str) -> float:
        found = kv[f"{a}.rope.{key}"]
        assert isinstance(found, (int, float))
        return float(found)

    low, high = number("scaling.low_freq_factor"), number("scaling.high_freq_factor")
    original, base = number("scaling.original_context_length"), number("freq_base")
    size = int(number("dimension_count"))
    factors = []
    for i in range(0, size, 2):
        turns = original / (2 * math.pi * base ** (i / size))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors
