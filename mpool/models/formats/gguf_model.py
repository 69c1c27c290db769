"""Reader of GGUF files: checks the keys, fills in defaults, and finds tokenizer, chat template and end tokens.

The C core parses the file (``mpool._core.read_gguf``). This module interprets its tables with the same architecture
rows as a transformers folder. The keys are documented in
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import FormatError, InvalidArgument, LimitError, Unsupported
from ...records import logger
from .. import architectures, origins
from ..families.llama import complete_windows
from ..families.reading import ACTIVATIONS, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH, activation
from ..families.rows import Architecture
from ..families.table import ROWS
from ..fields import Fields, describe
from ..files import Folder
from ..layout import is_projector
from ..spec import (
    EmbeddingSettings,
    GenerationSettings,
    ModelDescription,
    ModelSpec,
    TensorEntry,
    TokenizerSource,
    Value,
)
from . import ollama_gguf
from .chat_templates import HARMONY_ENDS, template
from .gguf_tables import FILE_TYPES, GGUFKeys, read_gguf

log = logger("mpool.models")

#: GGUF's ``pooling_type`` -> mpool's name of the pooling (0 means "none", 4 means "rank", a reranker).
_POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}
_RANK = 4

#: Keys (without the architecture's prefix) that mpool does not implement -> values for which they have no effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,), "expert_used_count": (0,), "expert_shared_count": (0,), "attention.scale": (),
    "attention.clamp_kqv": (0.0,), "attention.max_alibi_bias": (0.0,), "logit_scale": (1.0,),
    "residual_scale": (1.0,), "embedding_scale": (1.0,), "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,), "use_parallel_residual": (False,), "rope.scale_linear": (1.0,),
    "expert_weights_scale": (0.0, 1.0), "expert_gating_func": (0, 1, 3),
    "rope.scaling.attn_factor": (1.0,), "rope.scaling.yarn_log_multiplier": (0.0,), "interleave_moe_layer_step": (),
    "moe_latent_size": (0,),
}

#: Keys that some converters write as a list with one value per layer.
_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")

#: Texts of control tokens that end a turn in the common families, in addition to ``eos_token_id``.
_END_OF_TURN = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
                          "<|eom_id|>", "<EOT>", "<|endofturn|>", "<turn|>", "<|tool_response>"})
_CONTROL, _USER_DEFINED = 3, 4


def find_projector(folder: Folder) -> str | None:
    """Return the name of the projector file in a folder, or None if there is none.

    Raises:
        InvalidArgument: the folder has several projector files.
    """
    found = sorted(filter(is_projector, folder.names()))
    if len(found) > 1:
        raise InvalidArgument(f"{folder.path} has {len(found)} projector files: {', '.join(found[:8])}", param="model",
                              got=folder.path, allowed="a folder with one projector file",
                              hint="Keep only one of them in the folder")
    return found[0] if found else None


def describe_gguf(path: str, *, key: str, ref: str) -> ModelDescription:
    """Describe the model in a GGUF file.

    Args:
        path: the file; for a split model, its first part.
        key, ref: key and reference of the model, stored in the result.

    Raises:
        FormatError: the file is malformed, or lacks a key or tensor of its architecture.
        Unsupported: the file selects a computation that mpool does not implement.
        LimitError: a size exceeds mpool's maximum.
    """
    path = os.path.abspath(path)
    raw, tensors, files = read_gguf(path)
    architecture = raw.get("general.architecture")
    if architecture in ("flux", "sd3", None):
        from . import pipeline_tensors
        from .pipelines import describe_with_gguf

        if architecture is not None or pipeline_tensors.has_published_names(entry.name for entry in tensors):
            return describe_with_gguf(path, tensors, files, key=key, ref=ref)
    kv, used = ollama_gguf.translated(raw, tensors)
    return describe_tables(kv, used, files, key=key, ref=ref, own=None if kv is raw else ollama_gguf.own_keys(raw))


def describe_tables(raw: Mapping[str, Any], tensors: Sequence[TensorEntry], files: Sequence[str], *, key: str,
                    ref: str, own: Callable[[str], str] | None = None) -> ModelDescription:
    """Describe the model in a GGUF file whose tables were already read.

    Args:
        raw: keys of the file, under llama.cpp's names.
        tensors: tensors of all parts of the file.
        files: paths of all parts.
        key, ref: key and reference of the model, stored in the result.
        own: function that returns the file's name of a key; None: the file has llama.cpp's names.

    Raises:
        FormatError, Unsupported, LimitError: on the conditions of :func:`describe_gguf`.
    """
    path = files[0]
    table = Fields(raw, file=path, own=own)
    name = table.str("general.architecture")
    rows = architectures.find(architectures.IN_GGUF, name, file=path, field="general.architecture")
    rows = architectures.filter_by_capability(rows, table.int(f"{name}.pooling_type", 0) in (*_POOLING, _RANK)
                                              or not table.bool(f"{name}.attention.causal", True))
    row = architectures.filter_by_marker(rows, lambda: [entry.name for entry in tensors], gguf=True)[0]
    kv = {row.name + key[len(name):]: value for key, value in _with_prefix(raw, name + ".").items()}
    _merge_layer_sizes(kv, row, table, name)
    tensors = _without_draft_layers(table, name, row, kv, tensors)
    shapes = {entry.name: entry.shape for entry in tensors}
    kv[f"{row.name}.vocab_size"] = _vocabulary_rows(table, name, shapes, path)
    types = _first_size(shapes, "token_types.weight", path) if "token_types.weight" in shapes else 0
    _add_defaults(table, row, name, kv)
    size = architectures.sizes(row, kv, file=path, token_types=types,
                               own=lambda key: table.name(origins.key_in_gguf(key, row.name, name)))
    kv.setdefault(f"{row.name}.attention.head_count_kv", kv[f"{row.name}.attention.head_count"])
    if row.rope:
        kv.setdefault(f"{row.name}.rope.dimension_count", 2 * size["R"])
    heads: dict[str, str] = {}
    score_rows: list[TensorEntry] = []
    chat = table.get("tokenizer.chat_template")
    reranks = table.int(f"{name}.pooling_type", 0) == _RANK
    if reranks:
        from . import scoring

        if kv.get(f"{row.name}.attention.causal"):
            score_rows, chat = scoring.read_gguf_decoder(table, tensors, kv)
        elif row.gguf_head is not None:
            epsilon = table.number(f"{name}.{row.epsilon}", above=0.0)
            heads = scoring.read_gguf_head(shapes, path, row.gguf_head, epsilon, kv)
    dense = _dense_names(shapes, path) if row.capability == "text_embedding" else {}
    head_names = heads | dense
    used = architectures.map_gguf(row, size, [entry for entry in tensors if entry.name not in head_names
                                              and not (score_rows and entry.name == "cls.output.weight")], files)
    used += tuple(replace(entry, name=head_names[entry.name]) for entry in tensors if entry.name in head_names)
    used += tuple(score_rows)
    tokens = _tokens(table)
    embedding = generation = None
    if row.capability == "text_embedding":
        embedding = EmbeddingSettings(
            max_tokens=size["P"], hidden_size=size["D"], output_size=1, pooling=("lasttoken" if score_rows else "cls",),
            normalize=False, scores=True, score_activation="sigmoid", answering=False if score_rows else None
        ) if heads or score_rows else _embedding(table, name, kv, size, [shapes[stored] for stored in dense])
    else:
        generation = _generation(table, tokens, size)
    return ModelDescription(
        key=key, ref=ref, capability=row.capability,
        spec=ModelSpec(row.name, tuple(os.path.abspath(file) for file in files), kv, used,
                       origins=origins.in_gguf(path, kv, row.name, name, table.name)),
        tokenizer=TokenizerSource(gguf=_with_prefix(raw, "tokenizer."), config={"file": path}),
        chat_template=template(chat, file=path, field="tokenizer.chat_template",
                               tool_use=table.get("tokenizer.chat_template.tool_use")),
        embedding=embedding, generation=generation, license=_license(table),
        file_type=FILE_TYPES.get(kind) if isinstance(kind := table.get("general.file_type"), int) else None)


def _with_prefix(raw: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """Return the keys that begin with ``prefix``."""
    if isinstance(raw, GGUFKeys):
        return raw.with_prefix(prefix)
    return {name: value for name, value in raw.items() if name.startswith(prefix)}


def _merge_layer_sizes(kv: dict[str, Value], row: Architecture, table: Fields, name: str) -> None:
    """Replace sizes stored as one value per layer by a single value; ``table`` and ``name`` as in
    :func:`_add_defaults`.

    Raises:
        FormatError: a list has another number of values than the model has layers.
        Unsupported: the layers differ.
    """
    a = row.name
    for suffix in (suffix for suffix in _PER_LAYER if suffix not in row.by_layer):
        values = kv.get(f"{a}.{suffix}")
        if isinstance(values, list):
            layers = kv.get(f"{a}.block_count")
            if not values or isinstance(layers, int) and len(values) != layers:
                table.fail(f"{name}.{suffix}", f"{len(values):,} values" if values else "an empty list",
                           f"{layers:,} values, one per layer" if values else "one value per layer")
            sizes: list[Any] = list(values)
            if suffix in row.handled:
                sizes = [size for size in sizes if size] or [1]  # 0: the layer has no such block
            if suffix == "attention.head_count_kv" and 0 in sizes:
                raise Unsupported(f"{table.file}: {table.name(f'{name}.{suffix}')} has layers without KV heads, and so "
                                  f"without attention; mpool supports {name} only with attention in every layer")
            if any(size != sizes[0] for size in sizes):
                raise Unsupported(f"{table.file}: {table.name(f'{name}.{suffix}')} differs between layers; mpool "
                                  "supports layers of equal size")
            kv[f"{a}.{suffix}"] = sizes[0]


def _without_draft_layers(table: Fields, name: str, row: Architecture, kv: dict[str, Value],
                          tensors: Sequence[TensorEntry]) -> Sequence[TensorEntry]:
    """Return the tensors without those of the last layers, which only predict further tokens (multi-token prediction),
    and take these layers from ``block_count``."""
    drafts, layers = table.int(f"{name}.nextn_predict_layers", 0, low=0), kv.get(f"{row.name}.block_count")
    if not drafts or not isinstance(layers, int):
        return tensors
    if drafts >= layers:
        table.fail(f"{name}.nextn_predict_layers", drafts, f"less than the {layers} layers of {name}.block_count")
    kv[f"{row.name}.block_count"] = layers - drafts
    dropped = tuple(f"blk.{i}." for i in range(layers - drafts, min(layers, MAX_LAYERS)))
    return [entry for entry in tensors if not entry.name.startswith(dropped)]


def _vocabulary_rows(table: Fields, name: str, shapes: Mapping[str, tuple[int, ...]], path: str) -> int:
    """Return the number of rows of the token embedding.

    ``vocab_size`` may be missing. In some files it is the number of tokens, which may be less than the number of rows.
    """
    if "token_embd.weight" not in shapes:
        raise architectures.missing(["token_embd.weight"], file=path)
    rows = _first_size(shapes, "token_embd.weight", path)
    stated = table.int(f"{name}.vocab_size", rows, low=1)
    tokens = table.list("tokenizer.ggml.tokens")
    for field, count in ((f"{name}.vocab_size", stated), ("tokenizer.ggml.tokens", len(tokens))):
        if count > rows:
            table.fail(field, count, f"at most {rows}, the number of rows of token_embd.weight")
    if not tokens:
        table.fail("tokenizer.ggml.tokens", "empty", "at least one token")
    return rows


def _first_size(shapes: Mapping[str, tuple[int, ...]], name: str, path: str) -> int:
    """Return the number of rows of a matrix."""
    shape = shapes[name]
    if len(shape) != 2 or shape[0] < 1:
        raise FormatError(file=path, field=f"shape of {name}", got=list(shape), allowed="two positive sizes")
    return shape[0]


def _add_defaults(table: Fields, row: Architecture, name: str, kv: dict[str, Value]) -> None:
    """Fill in the architecture's default hyper-parameters and check that mpool implements every setting.

    Args:
        table: keys of the file.
        row: the architecture.
        name: name of the architecture in the file.
        kv: hyper-parameters under the name of ``row``, which are completed in place.

    Raises:
        FormatError: a value is malformed.
        Unsupported: a setting selects a computation that mpool does not implement.
    """
    architectures.check_layers(table, name)
    table.int(f"{name}.embedding_length", low=1, high=MAX_WIDTH)
    for key in kv:
        suffix = key[len(row.name) + 1:]
        neutral = None if suffix in row.handled else _NEUTRAL.get(suffix)
        if neutral is not None and kv[key] not in neutral:
            raise Unsupported(f"{table.file}: {table.name(f'{name}.{suffix}')} is {describe(kv[key])}, which mpool "
                              f"does not support for {name}")
    kv["mpool.activation"] = row.activation
    if f"{name}.hidden_activation" in table:
        found = activation(table, f"{name}.hidden_activation", "", tuple(ACTIVATIONS.values()))
        if found != row.activation and row.name != "modern_bert":
            raise Unsupported(f"{table.file}: {name}.hidden_activation is {found}; for {name}, mpool supports "
                              f"{row.activation}")
        kv["mpool.activation"] = found
    if row.capability == "text_embedding":
        if table.bool(f"{name}.attention.causal", False) and "attention.causal" not in row.handled:
            raise Unsupported(f"{table.file}: {name}.attention.causal is true; mpool supports {name} with "
                              "bidirectional attention only")
        kv.setdefault(f"{row.name}.attention.causal", False)
        if row.complete is not None:
            row.complete(table, name, kv)
        return
    if not table.bool(f"{name}.attention.causal", True) or table.int(f"{name}.pooling_type", 0) != 0:
        raise Unsupported(f"{table.file}: the file is an embedding model of architecture {name}; mpool supports {name} "
                          "for text generation only")
    kv.setdefault(f"{row.name}.rope.freq_base", 10000.0)
    scaling = table.str(f"{name}.rope.scaling.type", "none")
    if scaling not in ("none", "linear", "yarn"):
        raise Unsupported(f"{table.file}: {name}.rope.scaling.type is {describe(scaling)}; mpool supports none, linear "
                          "and yarn")
    if scaling != "none":
        table.number(f"{name}.rope.scaling.factor", above=0.0)
    table.int(f"{name}.attention.sliding_window", 0, low=0)
    if kv.get(f"{row.name}.expert_count"):
        kv.setdefault(f"{row.name}.expert_feed_forward_length", kv.get(f"{row.name}.feed_forward_length", 0))
    complete_windows(table, name, row, kv)
    if row.complete is not None:
        row.complete(table, name, kv)


def _tokens(table: Fields) -> list[Any]:
    """Return the texts of all tokens; raise LimitError if there are more than MAX_VOCABULARY."""
    tokens = table.list("tokenizer.ggml.tokens", limit=1 << 40)
    if len(tokens) > MAX_VOCABULARY:
        raise LimitError(f"{table.file}: tokenizer.ggml.tokens has {len(tokens):,} entries, the limit is "
                         f"{MAX_VOCABULARY:,}")
    return tokens


def _dense_names(shapes: Mapping[str, tuple[int, ...]], path: str) -> dict[str, str]:
    """Return the dense layers after EmbeddingGemma's pooling, which are optional in a file.

    Returns:
        Tensor name in the file -> tensor name in the core; empty if the file has none of them.
    """
    found = {name: f"dense.{number}.weight" for number, name in enumerate(("dense_2.weight", "dense_3.weight"))}
    absent = [name for name in found if name not in shapes]
    if len(absent) == 1:
        raise architectures.missing(absent, file=path)
    for name in found if not absent else ():
        _first_size(shapes, name, path)
    return {} if absent else found


def _embedding(table: Fields, name: str, kv: dict[str, Value], size: Mapping[str, int],
               dense: Sequence[tuple[int, ...]]) -> EmbeddingSettings:
    """Return the embedding settings and add the pooling's hyper-parameters to ``kv``.

    Args:
        table: keys of the file.
        name: name of the architecture in the file.
        kv: hyper-parameters, which are completed in place.
        size: sizes of the network by letter (:mod:`mpool.models.architectures`).
        dense: shapes of the dense layers after the pooling.
    """
    kind = table.int(f"{name}.pooling_type", 0, low=0)
    if kind == _RANK:
        known = ", ".join(sorted({other for row in ROWS if row.gguf_head is not None for other in row.in_gguf}))
        raise Unsupported(f"{table.file}: {name}.pooling_type is 4, a reranker; mpool supports rerankers in GGUF files "
                          f"for the architectures {known}",
                          hint="Use a reranker of one of these architectures, or a transformers folder of a "
                               "cross-encoder with one label")
    if kind and kind not in _POOLING:
        table.fail(f"{name}.pooling_type", kind, "0 (none), 1 (mean), 2 (cls) or 3 (last)")
    if not kind:
        log.info("%s does not set pooling_type: mpool uses mean pooling", table.file)
    pooling = _POOLING.get(kind, "mean")
    kv["mpool.pooling"], kv["mpool.normalize"], kv["mpool.dense_count"] = [pooling], True, len(dense)
    return EmbeddingSettings(max_tokens=size["P"], hidden_size=size["D"],
                             output_size=dense[-1][0] if dense else size["D"], pooling=(pooling,), normalize=True)


def _generation(table: Fields, tokens: Sequence[Any], size: Mapping[str, int]) -> GenerationSettings:
    """Return the generation settings: the special tokens of the vocabulary and the context length."""
    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "eot", "eom"):
        ids[name] = table.int(f"tokenizer.ggml.{name}_token_id", None, low=0, high=len(tokens) - 1)
    ends = {i for name, i in ids.items() if name != "bos" and i is not None}
    kinds = table.list("tokenizer.ggml.token_type", None, of=int)
    if kinds is not None and len(kinds) != len(tokens):
        table.fail("tokenizer.ggml.token_type", f"{len(kinds)} entries", f"{len(tokens)} entries, one per token")
    end_texts = _END_OF_TURN if "<|return|>" not in tokens else HARMONY_ENDS
    for text in end_texts.intersection(tokens):  # index() is unique: the tokenizer rejects duplicate tokens
        i = tokens.index(text)
        if kinds is None or kinds[i] in (_CONTROL, _USER_DEFINED):
            ends.add(i)
    if not ends:
        log.info("%s defines no end token: generation ends at max_tokens or at a stop string", table.file)
    # llama.cpp's default: SentencePiece vocabularies start with BOS, byte-level ones do not
    spm = table.str("tokenizer.ggml.model", "") == "llama"
    add_bos = table.bool("tokenizer.ggml.add_bos_token", spm and ids["bos"] is not None)
    if add_bos and ids["bos"] is None:
        table.fail("tokenizer.ggml.bos_token_id", "missing", "a token id, because add_bos_token is true")
    return GenerationSettings(context_length=size["P"], eog_token_ids=tuple(sorted(ends)), bos_token_id=ids["bos"],
                              add_bos=add_bos)


def _license(table: Fields) -> str | None:
    """Return ``general.license`` if it is a text of at most 200 characters, else None."""
    value = table.get("general.license")
    return value if isinstance(value, str) and len(value) <= 200 else None
