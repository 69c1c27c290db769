"""GGUF files of Ollama's own converter, as the converter of llama.cpp writes the same models.

Ollama's library has files of a few families that say the same in other words (a list of them is
https://github.com/ollama/ollama/blob/main/llama/compat/README.md). Of those with an image network in the same file the
decoder is read, and its texts are what the model takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..spec import TensorEntry

log = logging.getLogger("mpool.models")

_Tables = tuple[dict[str, Any], tuple[TensorEntry, ...]]
_IMAGES = ("v.", "mm.")
#: Ends of names in such files of GPT-OSS -> in others.
_GPT_OSS = {".attn_out.weight": ".attn_output.weight", ".attn_out.bias": ".attn_output.bias",
            ".attn_sinks": ".attn_sinks.weight", ".ffn_norm.weight": ".post_attention_norm.weight"}


def translated(raw: Mapping[str, Any], tensors: tuple[TensorEntry, ...]
               ) -> tuple[Mapping[str, Any], tuple[TensorEntry, ...]]:
    """Keys and tensors of a file as others have them; those of any other file as they are."""
    name = raw.get("general.architecture")
    make = _MAKERS.get(name) if isinstance(name, str) else None
    if make is None or name == "gemma3" and not _is_ollamas_gemma(raw, tensors):
        return raw, tensors
    log.info("a file of Ollama's converter: %s", name)
    return make(dict(raw), tensors)


def _renamed(raw: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Keys under another architecture's name."""
    found = {new + key[len(old):] if key.startswith(f"{old}.") else key: value for key, value in raw.items()}
    return found | {"general.architecture": new}


def _without_images(tensors: tuple[TensorEntry, ...]) -> tuple[TensorEntry, ...]:
    return tuple(entry for entry in tensors if not entry.name.startswith(_IMAGES))


def _gpt_oss(raw: dict[str, Any], tensors: tuple[TensorEntry, ...]) -> _Tables:
    kv = _renamed(raw, "gptoss", "gpt-oss") | {"tokenizer.ggml.pre": "gpt-4o"}  # whatever the file says
    kv.setdefault("gpt-oss.rope.scaling.type", "yarn")
    named = []
    for entry in tensors:
        end = next((end for end in _GPT_OSS if entry.name.endswith(end)), None)
        named.append(entry if end is None else replace(entry, name=entry.name.removesuffix(end) + _GPT_OSS[end]))
    return kv, tuple(named)


def _qwen25vl(raw: dict[str, Any], tensors: tuple[TensorEntry, ...]) -> _Tables:
    kv = _renamed(raw, "qwen25vl", "qwen2vl")
    sections = kv.get("qwen2vl.rope.mrope_section")
    if isinstance(sections, list):
        kv["qwen2vl.rope.dimension_sections"] = [*sections, 0]
    return kv, _without_images(tensors)


def _is_ollamas_gemma(raw: Mapping[str, Any], tensors: tuple[TensorEntry, ...]) -> bool:
    return "gemma3.attention.layer_norm_rms_epsilon" not in raw or "gemma3.rope.local.freq_base" in raw \
        or any(entry.name.startswith((*_IMAGES, "dense.")) for entry in tensors)


#: Tensors of EmbeddingGemma there, a Gemma 3 with layers behind its pooling, and here.
_EMBEDDING_GEMMA = {"dense.0.weight": "dense_2.weight", "dense.1.weight": "dense_3.weight",
                    "norm.weight": "output_norm.weight"}


def _gemma3(kv: dict[str, Any], tensors: tuple[TensorEntry, ...]) -> _Tables:
    for key, value in (("rope.freq_base", kv.get("gemma3.rope.global.freq_base", 1e6)),
                       ("rope.freq_base_swa", kv.get("gemma3.rope.local.freq_base", 10000.0)),
                       ("attention.layer_norm_rms_epsilon", 1e-6)):
        kv.setdefault(f"gemma3.{key}", value)
    context = kv.get("gemma3.context_length")
    if isinstance(context, int) and context >= 131072:  # models of 4B and more; smaller ones have no RoPE scaling
        kv.setdefault("gemma3.rope.scaling.type", "linear")
        kv.setdefault("gemma3.rope.scaling.factor", 8.0)
    rows = next((entry.shape[0] for entry in tensors if entry.name == "token_embd.weight"), 0)
    for key in ("tokens", "scores", "token_type"):  # tokens of images have no row
        values = kv.get(f"tokenizer.ggml.{key}")
        if isinstance(values, list) and rows:
            kv[f"tokenizer.ggml.{key}"] = values[:rows]
    if any(entry.name == "dense.0.weight" for entry in tensors):
        kv = _renamed(kv, "gemma3", "gemma-embedding") | {"gemma-embedding.attention.causal": False}
        tensors = tuple(replace(entry, name=_EMBEDDING_GEMMA.get(entry.name, entry.name)) for entry in tensors)
    return kv, _without_images(tensors)


_MAKERS: dict[str, Callable[[dict[str, Any], tuple[TensorEntry, ...]], _Tables]] = {
    "gptoss": _gpt_oss, "qwen25vl": _qwen25vl, "gemma3": _gemma3}
