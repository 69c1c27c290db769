"""Translation of GGUF files from Ollama's own converter into the names of llama.cpp's converter.

For some model families, Ollama's library has files with other key and tensor names than llama.cpp writes
(https://github.com/ollama/ollama/blob/main/llama/compat/README.md lists them). Such a file may also contain an image
encoder. :func:`image_tables` translates those of Gemma 3 and 4, Mistral 3 and Qwen; of other families, mpool reads the
language model only, and the model accepts text only. Ollama has no converter for InternVL, so its models are pairs of
llama.cpp's files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from ...records import logger
from ..families.reading import MAX_LAYERS
from ..spec import TensorEntry

log = logger("mpool.models")

_Tables = tuple[dict[str, Any], tuple[TensorEntry, ...]]
#: Key of the translated tables: True if the two components of a rotary pair are half a head apart. No file has it.
ROPE_HALVES = "clip.rope.halves"
_IMAGE_PREFIXES = ("v.", "mm.")
#: Prefixes of the tensors of image and audio encoders.
_OTHER_PREFIXES = (*_IMAGE_PREFIXES, "a.")
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
    if convert is None or name == "gemma3" and not _is_ollama_gemma(raw, tensors) \
            or str(name).startswith("qwen3") and not _is_ollama_qwen(raw, tensors) \
            or name == "mistral3" and not _is_ollama_mistral(raw, tensors) \
            or name == "gemma4" and not any(entry.name.startswith(_OTHER_PREFIXES) for entry in tensors):
        return raw, tensors
    log.info("the GGUF file was written by Ollama's converter: architecture %s", name)
    return convert(dict(raw), tensors)


#: Architectures in Ollama's files -> in llama.cpp's, if they differ.
_RENAMED = {"gptoss": "gpt-oss", "qwen25vl": "qwen2vl", "gemma3": "gemma-embedding"}
#: Keys without their first word: llama.cpp's -> those that Ollama's converter writes instead.
_OWN_KEYS = {"rope.dimension_sections": "rope.mrope_section", "rope.freq_base": "rope.global.freq_base",
             "rope.freq_base_swa": "rope.local.freq_base", "vision.image_min_pixels": "vision.shortest_edge",
             "vision.image_max_pixels": "vision.longest_edge", "vision.n_wa_pattern": "vision.fullatt_block_indexes",
             "vision.is_deepstack_layers": "vision.deepstack_visual_indexes",
             "vision.projector.scale_factor": "mm.tokens_per_image", "vision.spatial_merge_size": "spatial_merge_size",
             "rope.scaling.yarn_beta_fast": "rope.scaling.beta_fast",
             "rope.scaling.yarn_beta_slow": "rope.scaling.beta_slow",
             "rope.scaling.yarn_log_multiplier": "rope.scaling.mscale_all_dim",
             "attention.temperature_scale": "rope.scaling_beta"}


def own_keys(raw: Mapping[str, Any]) -> Callable[[str], str]:
    """Return the function that gives the name of a key in a file of Ollama's converter, for llama.cpp's name.

    Args:
        raw: keys of the file.
    """
    old = str(raw.get("general.architecture"))
    starts = (f"{_RENAMED.get(old, old)}.", f"{old}.", "clip.")

    def own(key: str) -> str:
        start = next((start for start in starts if key.startswith(start)), "")
        if key in raw or not start:
            return key
        tail = key[len(start):]
        other = f"{old}.{_OWN_KEYS.get(tail, tail)}"
        return other if other in raw else f"{old}.{tail}"

    return own


def _rename_architecture(raw: Mapping[str, Any], old: str) -> dict[str, Any]:
    """Return the keys with the architecture ``old`` renamed, in prefixes and in ``general.architecture``."""
    new = _RENAMED[old]
    found = {new + key[len(old):] if key.startswith(f"{old}.") else key: value for key, value in raw.items()}
    return found | {"general.architecture": new}


def _without_image_tensors(tensors: tuple[TensorEntry, ...]) -> tuple[TensorEntry, ...]:
    """Return the tensors without those of the image encoder and the projector."""
    return tuple(entry for entry in tensors if not entry.name.startswith(_IMAGE_PREFIXES))


def _gpt_oss(raw: dict[str, Any], tensors: tuple[TensorEntry, ...]) -> _Tables:
    """Translate a GPT-OSS file."""
    # GPT-OSS always uses the pre-tokenizer gpt-4o, also if the file has another value.
    kv = _rename_architecture(raw, "gptoss") | {"tokenizer.ggml.pre": "gpt-4o"}
    kv.setdefault("gpt-oss.rope.scaling.type", "yarn")
    named = []
    for entry in tensors:
        end = next((end for end in _GPT_OSS if entry.name.endswith(end)), None)
        named.append(entry if end is None else replace(entry, name=entry.name.removesuffix(end) + _GPT_OSS[end]))
    return kv, tuple(named)


def _qwen25vl(raw: dict[str, Any], tensors: tuple[TensorEntry, ...]) -> _Tables:
    """Translate the language model of a Qwen2.5-VL file."""
    kv = _rename_architecture(raw, "qwen25vl")
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
        kv = _rename_architecture(kv, "gemma3") | {"gemma-embedding.attention.causal": False}
        tensors = tuple(replace(entry, name=_EMBEDDING_GEMMA.get(entry.name, entry.name)) for entry in tensors)
    return kv, _without_image_tensors(tensors)


def _gemma4(kv: dict[str, Any], tensors: tuple[TensorEntry, ...]) -> _Tables:
    """Translate the language model of a Gemma 4 file."""
    if kv.get("tokenizer.ggml.pre") == "gemma4":
        kv["tokenizer.ggml.model"] = "gemma4"
    return kv, tuple(entry for entry in tensors if not entry.name.startswith(_OTHER_PREFIXES))


def _is_ollama_qwen(raw: Mapping[str, Any], tensors: tuple[TensorEntry, ...]) -> bool:
    """Return True if Ollama's converter wrote a file of Qwen3-VL or Qwen3.5, whose architectures llama.cpp uses too."""
    return f"{raw.get('general.architecture')}.vision.block_count" in raw \
        or any(entry.name.startswith((*_IMAGE_PREFIXES, "mtp.")) or entry.name.endswith(".ssm_dt") for entry in tensors)


def _qwen3(kv: dict[str, Any], tensors: tuple[TensorEntry, ...]) -> _Tables:
    """Translate the language model of a Qwen3-VL or Qwen3.5 file."""
    name = kv["general.architecture"]
    usual = [24, 20, 20] if name.startswith("qwen3vl") else [11, 11, 10]
    kv.setdefault(f"{name}.rope.dimension_sections", kv.get(f"{name}.rope.mrope_section", usual))
    heads = kv.get(f"{name}.attention.head_count_kv")
    if isinstance(heads, list) and heads and all(type(count) is int for count in heads):
        kv[f"{name}.attention.head_count_kv"] = max(heads)  # layers with delta nets have 0
    experts = next((entry.shape for entry in tensors if entry.name == "blk.0.ffn_up_exps.weight"), ())
    if len(experts) == 3:
        kv.setdefault(f"{name}.expert_feed_forward_length", experts[1])
    return kv, tuple(replace(entry, name=entry.name + ".bias") if entry.name.endswith(".ssm_dt") else entry
                     for entry in _without_image_tensors(tensors) if not entry.name.startswith("mtp."))


#: Keys of Mistral 3 in Ollama's files -> in llama.cpp's. A file without YaRN has them, too, with the value 0 or "".
_MISTRAL_KEYS = {"rope.scaling.beta_fast": "rope.scaling.yarn_beta_fast",
                 "rope.scaling.beta_slow": "rope.scaling.yarn_beta_slow", "rope.scaling.mscale": "",
                 "rope.scaling.mscale_all_dim": "rope.scaling.yarn_log_multiplier",
                 "rope.scaling_beta": "attention.temperature_scale", "rope.scaling.type": "rope.scaling.type",
                 "rope.scaling.factor": "rope.scaling.factor"}


def _is_ollama_mistral(raw: Mapping[str, Any], tensors: tuple[TensorEntry, ...]) -> bool:
    """Return True if Ollama's converter wrote a file of Mistral 3, whose architecture llama.cpp uses too."""
    return any(f"mistral3.{key}" in raw for key in ("rope.scaling.beta_fast", "rope.scaling_beta")) \
        or any(entry.name.startswith(_IMAGE_PREFIXES) for entry in tensors)


def _mistral3(kv: dict[str, Any], tensors: tuple[TensorEntry, ...]) -> _Tables:
    """Translate the language model of a Mistral Small 3.1 or a Ministral 3 file."""
    for old, new in _MISTRAL_KEYS.items():
        value = kv.pop(f"mistral3.{old}", None)
        if value and new:
            kv[f"mistral3.{new}"] = value
    if kv.get("tokenizer.ggml.pre", "default") == "default":
        kv["tokenizer.ggml.pre"] = "tekken"
    return kv, _without_image_tensors(tensors)


_CONVERTERS: dict[str, Callable[[dict[str, Any], tuple[TensorEntry, ...]], _Tables]] = {
    "gptoss": _gpt_oss, "qwen25vl": _qwen25vl, "gemma3": _gemma3, "gemma4": _gemma4, "qwen3vl": _qwen3,
    "qwen3vlmoe": _qwen3, "qwen35": _qwen3, "qwen35moe": _qwen3, "mistral3": _mistral3}

#: Parts of tensor names of Qwen's image encoders in Ollama's files -> in llama.cpp's projector files.
_IMAGE_NAMES = {"v.patch_embd_0.": "v.patch_embd.", "v.patch_embd_1.weight": "v.patch_embd.weight.1",
                "v.patch_embed.": "v.patch_embd.", "v.pos_embed.": "v.position_embd.", "v.merger.norm.": "v.post_ln.",
                "v.merger.ln_q.": "v.post_ln.", "v.merger.linear_fc1.": "mm.0.", "v.merger.linear_fc2.": "mm.2.",
                "v.merger.mlp.": "mm.", ".mlp.linear_fc1.": ".ffn_up.", ".mlp.linear_fc2.": ".ffn_down.",
                ".norm1.": ".ln1.", ".norm2.": ".ln2."}
#: Keys of image encoders in Ollama's files -> in llama.cpp's projector files.
_IMAGE_KEYS = {name: name for name in (
    "block_count", "embedding_length", "attention.head_count", "attention.layer_norm_epsilon", "patch_size",
    "spatial_merge_size", "window_size", "image_mean", "image_std")} | {
        "shortest_edge": "image_min_pixels", "longest_edge": "image_max_pixels"}
#: Normalisation of the pixels in Qwen2.5-VL, which its files do not state.
_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}


#: Parts of tensor names of Gemma 3's image encoder in Ollama's files -> in llama.cpp's projector files.
_GEMMA_IMAGE_NAMES = {"v.patch_embedding.": "v.patch_embd.", "v.position_embedding.": "v.position_embd.",
                      "v.post_layernorm.": "v.post_ln.", ".layer_norm1.": ".ln1.", ".layer_norm2.": ".ln2.",
                      ".attn_output.": ".attn_out.", ".mlp.fc1.": ".ffn_up.", ".mlp.fc2.": ".ffn_down.",
                      "mm.mm_": "mm."}


def _gemma_images(raw: Mapping[str, Any], tensors: tuple[TensorEntry, ...]) -> _Tables:
    """Translate the image encoder of a Gemma 3 file."""
    kv: dict[str, Any] = {f"clip.vision.{key}": raw[f"gemma3.vision.{key}"] for key in (
        "block_count", "embedding_length", "feed_forward_length", "image_size", "patch_size", "attention.head_count",
        "attention.layer_norm_epsilon") if f"gemma3.vision.{key}" in raw}
    kv |= {"general.architecture": "clip", "clip.projector_type": "gemma3", "clip.use_gelu": True,
           "clip.vision.image_mean": [0.5] * 3, "clip.vision.image_std": [0.5] * 3}
    sizes = [kv.get("clip.vision.image_size"), kv.get("clip.vision.patch_size"),
             raw.get("gemma3.mm.tokens_per_image", 256)]
    side, patch, rows = (value if type(value) is int and value > 0 else 0 for value in sizes)
    if patch and rows:
        kv["clip.vision.projector.scale_factor"] = side // patch // isqrt(rows)
    return kv, _renamed(tensors, _GEMMA_IMAGE_NAMES)


def _renamed(tensors: tuple[TensorEntry, ...], parts: Mapping[str, str]) -> tuple[TensorEntry, ...]:
    """Return the tensors with other parts of names."""
    named = []
    for entry in tensors:
        name = entry.name
        for old, new in parts.items():
            name = name.replace(old, new)
        named.append(replace(entry, name=name))
    return tuple(named)


#: Parts of a layer of Gemma 4's image encoder, and their bounds, in the order of the tensor of all bounds.
_BOUNDED = ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def _gemma4_images(raw: Mapping[str, Any], tensors: tuple[TensorEntry, ...]) -> _Tables:
    """Translate the image encoder of a Gemma 4 file, in which one tensor has all bounds."""
    kv: dict[str, Any] = {f"clip.vision.{key}": raw[f"gemma4.vision.{key}"] for key in (
        "block_count", "embedding_length", "feed_forward_length", "patch_size", "attention.head_count",
        "attention.layer_norm_epsilon", "projector.scale_factor") if f"gemma4.vision.{key}" in raw}
    layers = kv.get("clip.vision.block_count")
    names = [f"v.blk.{layer}.{part}.{bound}" for layer in range(min(layers, MAX_LAYERS)) for part in _BOUNDED
             for bound in _BOUNDS] if type(layers) is int else []
    named = list[TensorEntry]()
    for entry in tensors:
        # the last four bounds are the projector's, which has none
        if entry.name == "v.clamp_data" and entry.shape == (len(names) + 4,) and entry.nbytes == 4 * (len(names) + 4):
            named += [replace(entry, name=name, shape=(1,), offset=entry.offset + 4 * at, nbytes=4)
                      for at, name in enumerate(names)]
        else:
            named.append(entry)
    return kv | {"general.architecture": "clip", "clip.projector_type": "gemma4v",
                 "clip.vision.image_mean": [0.0] * 3, "clip.vision.image_std": [1.0] * 3}, tuple(named)


#: Parts of tensor names of Mistral 3's image encoder in Ollama's files -> in llama.cpp's projector files.
_MISTRAL_IMAGE_NAMES = {"v.patch_conv.": "v.patch_embd.", "v.encoder_norm.": "v.pre_ln.",
                        ".attn_output.": ".attn_out.", ".attn_norm.": ".ln1.", ".ffn_norm.": ".ln2.",
                        "mm.linear_": "mm.", "mm.norm.": "mm.input_norm.",
                        "mm.patch_merger.merging_layer.": "mm.patch_merger."}


def _mistral_images(raw: Mapping[str, Any], tensors: tuple[TensorEntry, ...]) -> _Tables:
    """Translate the image encoder of a Mistral 3 file. Unlike llama.cpp's converter, Ollama's leaves queries and keys
    in the order of transformers."""
    kv: dict[str, Any] = {f"clip.vision.{key}": raw[f"mistral3.vision.{key}"] for key in (
        "block_count", "embedding_length", "feed_forward_length", "image_size", "patch_size", "attention.head_count"
        ) if f"mistral3.vision.{key}" in raw}
    for key, old in (("clip.vision.spatial_merge_size", "spatial_merge_size"),
                     ("clip.rope.freq_base", "vision.rope.freq_base")):
        if f"mistral3.{old}" in raw:
            kv[key] = raw[f"mistral3.{old}"]
    kv |= {"general.architecture": "clip", "clip.projector_type": "pixtral", "clip.use_silu": True, ROPE_HALVES: True,
           "clip.vision.attention.layer_norm_epsilon": 1e-5, **{f"clip.vision.{key}": value for key, value in
                                                                _CLIP.items()}}
    return kv, _renamed(tensors, _MISTRAL_IMAGE_NAMES)


def image_tables(raw: Mapping[str, Any], tensors: tuple[TensorEntry, ...]) -> _Tables | None:
    """Return the keys and tensors of the image encoder in a file of Ollama's converter, as llama.cpp's projector files
    have them; None: the file has no encoder, or one of another family than Gemma 3 and 4, Mistral 3 and Qwen."""
    name = raw.get("general.architecture")
    old = name == "qwen25vl"
    found = tuple(entry for entry in tensors if entry.name.startswith(_IMAGE_PREFIXES))
    if found and name == "gemma3":
        return _gemma_images(raw, found)
    if found and name == "gemma4":
        return _gemma4_images(raw, found)
    if found and name == "mistral3":
        return _mistral_images(raw, found)
    if not found or not old and _CONVERTERS.get(str(name)) is not _qwen3:
        return None
    lists = ("fullatt_block_indexes", "deepstack_visual_indexes")
    own = {key: raw[f"{name}.vision.{key}"] for key in (*_IMAGE_KEYS, *lists) if f"{name}.vision.{key}" in raw}
    kv: dict[str, Any] = {f"clip.vision.{_IMAGE_KEYS[key]}": value for key, value in own.items() if key in _IMAGE_KEYS}
    kv |= {"general.architecture": "clip", "clip.projector_type": "qwen2.5vl_merger" if old else "qwen3vl_merger",
           "clip.use_silu" if old else "clip.use_gelu": True}
    taps, full = _layers(own, "deepstack_visual_indexes"), _layers(own, "fullatt_block_indexes")
    if old:
        kv |= {f"clip.vision.{key}": value for key, value in _CLIP.items()}
        kv["clip.vision.n_wa_pattern"] = full[0] + 1 if full else 0
    elif isinstance(layers := own.get("block_count"), int):
        kv["clip.vision.is_deepstack_layers"] = [i in taps for i in range(min(layers, MAX_LAYERS))]
    numbered = {str(number): layer for number, layer in enumerate(taps)}
    named = [_image_tensor(entry, numbered) for entry in found]
    shapes = {entry.name: entry.shape for entry in named}
    kv["clip.vision.feed_forward_length"] = shapes.get("v.blk.0.ffn_up.weight", (0,))[0]
    if not old and isinstance(patch := own.get("patch_size"), int):
        kv["clip.vision.image_size"] = isqrt(shapes.get("v.position_embd.weight", (0,))[0]) * patch
    return kv, tuple(named)


def _layers(own: Mapping[str, Any], key: str) -> list[int]:
    """Return a list of layers, or an empty list if the value is something else."""
    value = own.get(key)
    return [i for i in value[:MAX_LAYERS] if type(i) is int] if isinstance(value, list) else []


def _image_tensor(entry: TensorEntry, taps: Mapping[str, int]) -> TensorEntry:
    name, shape = entry.name, entry.shape
    for old, new in _IMAGE_NAMES.items():
        name = name.replace(old, new)
    number, _, part = name.removeprefix("v.deepstack_merger.").partition(".")
    if number in taps and name.startswith("v.deepstack_merger."):
        name = f"v.deepstack.{taps[number]}.{part.replace('linear_', '')}"
    if name == "v.patch_embd.weight" and len(shape) == 4 and shape[1] == 2:  # rows are outputs and channels
        shape = (shape[0] // 3, 6 * shape[2] * shape[3])
    return replace(entry, name=name, shape=shape)
