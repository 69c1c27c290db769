"""Translation of GGUF files from Ollama's own converter into the names of llama.cpp's converter.

For some model families, Ollama's library has files with other key and tensor names than llama.cpp writes
(https://github.com/ollama/ollama/blob/main/llama/compat/README.md lists them). If such a file also contains an image
encoder, mpool reads the language model only, and the model accepts text only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...records import logger
from ..spec import TensorEntry

log = logger("mpool.models")

_Tables = tuple[dict[str, Any], tuple[TensorEntry, ...]]
_IMAGE_PREFIXES = ("v.", "mm.")
#: Suffixes of tensor names in Ollama's files of GPT-OSS -> suffixes in llama.cpp's.
_GPT_OSS = {".attn_out.weight": ".attn_output.weight", ".attn_out.bias": ".attn_output.bias",
            ".attn_sinks": ".attn_sinks.weight", ".ffn_norm.weight": ".post_attention_norm.weight"}


def translated(raw: Mapping[str, Any], tensors: tuple[TensorEntry, ...]
               ) -> tuple[Mapping[str, Any], tuple[TensorEntry, ...]]:
    """Return a file's keys and tensors under llama.cpp's names.

    Args:
        raw: keys of the file.
        tensors: tensors of the file.

    Returns:
        The translated tables, or the arguments unchanged if Ollama's converter did not write the file.
    """
    name = raw.get("general.architecture")
    convert = _CONVERTERS.get(name) if isinstance(name, str) else None
    if convert is None or name == "gemma3" and not _is_ollama_gemma(raw, tensors):
        return raw, tensors
    log.info("the GGUF file was written by Ollama's converter: architecture %s", name)
    return convert(dict(raw), tensors)


def _rename_architecture(raw: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return the keys with the architecture ``old`` renamed to ``new``, in prefixes and in ``general.architecture``."""
    found = {new + key[len(old):] if key.startswith(f"{old}.") else key: value for key, value in raw.items()}
    return found | {"general.architecture": new}


def _without_image_tensors(tensors: tuple[TensorEntry, ...]) -> tuple[TensorEntry, ...]:
    """Return the tensors without those of the image encoder and the projector."""
    return tuple(entry for entry in tensors if not entry.name.startswith(_IMAGE_PREFIXES))


def _gpt_oss(raw: dict[str, Any], tensors: tuple[TensorEntry, ...]) -> _Tables:
    """Translate a GPT-OSS file."""
    # GPT-OSS always uses the pre-tokenizer gpt-4o, also if the file has another value.
    kv = _rename_architecture(raw, "gptoss", "gpt-oss") | {"tokenizer.ggml.pre": "gpt-4o"}
    kv.setdefault("gpt-oss.rope.scaling.type", "yarn")
    named = []
    for entry in tensors:
        end = next((end for end in _GPT_OSS if entry.name.endswith(end)), None)
        named.append(entry if end is None else replace(entry, name=entry.name.removesuffix(end) + _GPT_OSS[end]))
    return kv, tuple(named)


def _qwen25vl(raw: dict[str, Any], tensors: tuple[TensorEntry, ...]) -> _Tables:
    """Translate the language model of a Qwen2.5-VL file."""
    kv = _rename_architecture(raw, "qwen25vl", "qwen2vl")
    sections = kv.get("qwen2vl.rope.mrope_section")
    if isinstance(sections, list):
        kv["qwen2vl.rope.dimension_sections"] = [*sections, 0]
    return kv, _without_image_tensors(tensors)


def _is_ollama_gemma(raw: Mapping[str, Any], tensors: tuple[TensorEntry, ...]) -> bool:
    """Return True if Ollama's converter wrote a file of the architecture gemma3, which llama.cpp uses too."""
    return "gemma3.attention.layer_norm_rms_epsilon" not in raw or "gemma3.rope.local.freq_base" in raw \
        or any(entry.name.startswith((*_IMAGE_PREFIXES, "dense.")) for entry in tensors)


#: Tensor names of EmbeddingGemma in Ollama's files -> in llama.cpp's. Ollama stores it as a Gemma 3 with dense layers.
_EMBEDDING_GEMMA = {"dense.0.weight": "dense_2.weight", "dense.1.weight": "dense_3.weight",
                    "norm.weight": "output_norm.weight"}


def _gemma3(kv: dict[str, Any], tensors: tuple[TensorEntry, ...]) -> _Tables:
    """Translate the language model of a Gemma 3 file, or an EmbeddingGemma file."""
    for key, value in (("rope.freq_base", kv.get("gemma3.rope.global.freq_base", 1e6)),
                       ("rope.freq_base_swa", kv.get("gemma3.rope.local.freq_base", 10000.0)),
                       ("attention.layer_norm_rms_epsilon", 1e-6)):
        kv.setdefault(f"gemma3.{key}", value)
    context = kv.get("gemma3.context_length")
    if isinstance(context, int) and context >= 131072:  # only models with 4B or more parameters have RoPE scaling
        kv.setdefault("gemma3.rope.scaling.type", "linear")
        kv.setdefault("gemma3.rope.scaling.factor", 8.0)
    rows = next((entry.shape[0] for entry in tensors if entry.name == "token_embd.weight"), 0)
    for key in ("tokens", "scores", "token_type"):  # image tokens at the end of the vocabulary have no embedding row
        values = kv.get(f"tokenizer.ggml.{key}")
        if isinstance(values, list) and rows:
            kv[f"tokenizer.ggml.{key}"] = values[:rows]
    if any(entry.name == "dense.0.weight" for entry in tensors):
        kv = _rename_architecture(kv, "gemma3", "gemma-embedding") | {"gemma-embedding.attention.causal": False}
        tensors = tuple(replace(entry, name=_EMBEDDING_GEMMA.get(entry.name, entry.name)) for entry in tensors)
    return kv, _without_image_tensors(tensors)


_CONVERTERS: dict[str, Callable[[dict[str, Any], tuple[TensorEntry, ...]], _Tables]] = {
    "gptoss": _gpt_oss, "qwen25vl": _qwen25vl, "gemma3": _gemma3}
