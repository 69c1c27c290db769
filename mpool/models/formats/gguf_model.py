"""A GGUF file as a model: its keys checked and completed, its tokenizer, template and ends of generation found.

The C core parses the file (``mpool._core.read_gguf``); here its tables are given meaning, by the same rows as a
transformers folder. Keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...errors import FormatError, LimitError, Unsupported
from .. import architectures
from ..families import ROWS, Architecture
from ..families.reading import ACTIVATIONS, MAX_VOCABULARY, MAX_WIDTH, activation
from ..fields import Fields, describe
from ..spec import (
    EmbeddingSettings,
    GenerationSettings,
    ModelDescription,
    ModelSpec,
    TensorEntry,
    TokenizerSource,
    Value,
)
from . import ollama_gguf, pipeline_names, scoring
from .chat_templates import HARMONY_ENDS, template
from .gguf_tables import GGUFKeys, read_gguf
from .pipelines import describe_with_gguf

log = logging.getLogger("mpool.models")

#: ``pooling_type`` -> pooling here (0 is "none", 4 is "rank").
_POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}
_RANK = 4

#: Keys below the architecture's that would change the computation -> values under which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,), "expert_used_count": (0,), "expert_shared_count": (0,), "attention.scale": (),
    "attention.clamp_kqv": (0.0,), "attention.max_alibi_bias": (0.0,), "logit_scale": (1.0,),
    "residual_scale": (1.0,), "embedding_scale": (1.0,), "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,), "use_parallel_residual": (False,), "rope.scale_linear": (1.0,),
    "expert_weights_scale": (0.0, 1.0), "expert_gating_func": (0, 1, 3),
    "rope.scaling.attn_factor": (1.0,), "rope.scaling.yarn_log_multiplier": (0.0,), "interleave_moe_layer_step": (),
}

#: Keys that some converters write as a list, one value a layer.
_BY_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")

#: Texts of control tokens that end a turn in the common families, whatever ``eos_token_id`` says.
_END_OF_TURN = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
                          "<|eom_id|>", "<EOT>", "<|endofturn|>"})
_CONTROL, _USER_DEFINED = 3, 4


def describe_gguf(path: str, *, key: str, ref: str) -> ModelDescription:
    """A model from a GGUF file; for a split model, its first file.

    Args:
        path: the file.
        key, ref: stored in the result.

    Raises:
        FormatError: the file is malformed, or lacks a key or tensor of its architecture.
        Unsupported: it asks for a computation that mpool does not have.
        LimitError: a size beyond mpool's caps.
    """
    path = os.path.abspath(path)
    raw, tensors, files = read_gguf(path)
    architecture = raw.get("general.architecture")
    if architecture in ("flux", "sd3") or architecture is None and pipeline_names.published(
            entry.name for entry in tensors):
        return describe_with_gguf(path, tensors, files, key=key, ref=ref)
    return describe_tables(*ollama_gguf.translated(raw, tensors), files, key=key, ref=ref)


def describe_tables(raw: Mapping[str, Any], tensors: Sequence[TensorEntry], files: Sequence[str], *, key: str,
                    ref: str) -> ModelDescription:
    """As :func:`describe_gguf`, from tables that were already read."""
    path = files[0]
    table = Fields(raw, file=path)
    name = table.str("general.architecture")
    rows = architectures.find(architectures.IN_GGUF, name, file=path, field="general.architecture")
    rows = architectures.of_capability(rows, table.int(f"{name}.pooling_type", 0) in (*_POOLING, _RANK)
                                       or not table.bool(f"{name}.attention.causal", True))
    row = architectures.marked(rows, lambda: [entry.name for entry in tensors], gguf=True)[0]
    kv = {row.name + key[len(name):]: value for key, value in _below(raw, name + ".").items()}
    _equal_layers(kv, row.name, path)
    shapes = {entry.name: entry.shape for entry in tensors}
    kv[f"{row.name}.vocab_size"] = _vocabulary(table, name, shapes, path)
    types = _rows(shapes, "token_types.weight", path) if "token_types.weight" in shapes else 0
    _complete(table, row, name, kv)
    size = architectures.sizes(row, kv, file=path, token_types=types)
    kv.setdefault(f"{row.name}.attention.head_count_kv", kv[f"{row.name}.attention.head_count"])
    if row.rope:
        kv.setdefault(f"{row.name}.rope.dimension_count", 2 * size["R"])
    heads: dict[str, str] = {}
    answers: list[TensorEntry] = []
    chat = table.get("tokenizer.chat_template")
    ranks = table.int(f"{name}.pooling_type", 0) == _RANK
    if ranks and kv.get(f"{row.name}.attention.causal"):
        answers, chat = scoring.gguf_logits(table, tensors, kv)
    elif row.gguf_head is not None and ranks:
        epsilon = table.number(f"{name}.{row.epsilon}", above=0.0)
        heads = scoring.gguf_head(shapes, path, row.gguf_head, epsilon, kv)
    dense = _dense(shapes, path) if row.capability == "text_embedding" else {}
    others = heads | dense
    used = architectures.map_gguf(row, size, [entry for entry in tensors if entry.name not in others
                                              and not (answers and entry.name == "cls.output.weight")], files)
    used += (*(replace(entry, name=others[entry.name]) for entry in tensors if entry.name in others), *answers)
    tokens = _tokens(table)
    embedding = generation = None
    if row.capability == "text_embedding":
        embedding = EmbeddingSettings(
            max_tokens=size["P"], hidden_size=size["D"], output_size=1, pooling=("lasttoken" if answers else "cls",),
            normalize=False, scores=True, answering=False if answers else None
        ) if heads or answers else _embedding(table, name, kv, size, [shapes[there] for there in dense])
    else:
        generation = _generation(table, row, tokens, size)
    return ModelDescription(
        key=key, ref=ref, capability=row.capability,
        spec=ModelSpec(row.name, tuple(os.path.abspath(file) for file in files), kv, used),
        tokenizer=TokenizerSource(gguf=_below(raw, "tokenizer."), config={"file": path}),
        chat_template=template(chat, file=path, field="tokenizer.chat_template"),
        embedding=embedding, generation=generation, license=_license(table))


def _below(raw: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """The keys that begin with ``prefix``."""
    if isinstance(raw, GGUFKeys):
        return raw.below(prefix)
    return {name: value for name, value in raw.items() if name.startswith(prefix)}


def _equal_layers(kv: dict[str, Value], a: str, path: str) -> None:
    """Sizes that a file gives layer by layer, as one number."""
    for below in _BY_LAYER:
        values = kv.get(f"{a}.{below}")
        if isinstance(values, list):
            if not values:
                raise FormatError(file=path, field=f"{a}.{below}", got="an empty list", allowed="one value a layer")
            if below == "attention.head_count_kv" and 0 in values:
                raise Unsupported(f"{path}: layers without KV heads, which are state-space layers (Mamba's); mpool "
                                  "computes models whose layers are all of attention")
            if any(value != values[0] for value in values):
                raise Unsupported(f"{path}: {below} differs from layer to layer; mpool computes layers of one size")
            kv[f"{a}.{below}"] = values[0]


def _vocabulary(table: Fields, name: str, shapes: Mapping[str, tuple[int, ...]], path: str) -> int:
    """Rows of the embedding. ``vocab_size`` may be missing, and files exist in which it counts tokens, not rows."""
    if "token_embd.weight" not in shapes:
        raise architectures.missing(["token_embd.weight"], file=path)
    rows = _rows(shapes, "token_embd.weight", path)
    stated = table.int(f"{name}.vocab_size", rows, low=1)
    tokens = table.list("tokenizer.ggml.tokens")
    for what, count in ((f"{name}.vocab_size", stated), ("tokenizer.ggml.tokens", len(tokens))):
        if count > rows:
            table.fail(what, count, f"at most {rows}, the rows of token_embd.weight")
    if not tokens:
        table.fail("tokenizer.ggml.tokens", "empty", "at least one token")
    return rows


def _rows(shapes: Mapping[str, tuple[int, ...]], name: str, path: str) -> int:
    """First size of a matrix."""
    shape = shapes[name]
    if len(shape) != 2 or shape[0] < 1:
        raise FormatError(file=path, field=f"shape of {name}", got=list(shape), allowed="two sizes above 0")
    return shape[0]


def _complete(table: Fields, row: Architecture, name: str, kv: dict[str, Value]) -> None:
    """Adds conventional defaults, and refuses settings that mpool would compute wrongly. The file's architecture is
    ``name``."""
    architectures.check_layers(table, name)
    table.int(f"{name}.embedding_length", low=1, high=MAX_WIDTH)
    for key in kv:
        below = key[len(row.name) + 1:]
        neutral = None if below in row.handled else _NEUTRAL.get(below)
        if neutral is not None and kv[key] not in neutral:
            raise Unsupported(f"{table.file}: {name}.{below} is {describe(kv[key])}; mpool's {name} is without it")
    kv["mpool.activation"] = row.activation
    if f"{name}.hidden_activation" in table:
        found = activation(table, f"{name}.hidden_activation", "", tuple(ACTIVATIONS.values()))
        if found != row.activation and row.name != "modern_bert":
            raise Unsupported(f"{table.file}: {name}.hidden_activation is {found}; mpool's {name} has {row.activation}")
        kv["mpool.activation"] = found
    if row.capability == "text_embedding":
        if table.bool(f"{name}.attention.causal", False) and "attention.causal" not in row.handled:
            raise Unsupported(f"{table.file}: {name}.attention.causal is true; mpool's {name} looks both ways")
        kv.setdefault(f"{row.name}.attention.causal", False)
        if row.complete is not None:
            row.complete(table, name, kv)
        return
    if not table.bool(f"{name}.attention.causal", True) or table.int(f"{name}.pooling_type", 0) != 0:
        raise Unsupported(f"{table.file}: a {name} model for embeddings; mpool computes {name} as a text generator")
    kv.setdefault(f"{row.name}.rope.freq_base", 10000.0)
    scaling = table.str(f"{name}.rope.scaling.type", "none")
    if scaling not in ("none", "linear", "yarn"):
        raise Unsupported(f"{table.file}: {name}.rope.scaling.type is {describe(scaling)}; mpool computes none, linear "
                          "and yarn")
    if scaling != "none":
        table.number(f"{name}.rope.scaling.factor", above=0.0)
    table.int(f"{name}.attention.sliding_window", 0, low=0)
    if row.complete is not None:
        row.complete(table, name, kv)


def _tokens(table: Fields) -> list[Any]:
    tokens = table.list("tokenizer.ggml.tokens", limit=1 << 40)
    if len(tokens) > MAX_VOCABULARY:
        raise LimitError(f"{table.file}: tokenizer.ggml.tokens has {len(tokens)} entries, mpool takes at most "
                         f"{MAX_VOCABULARY}")
    return tokens


def _dense(shapes: Mapping[str, tuple[int, ...]], path: str) -> dict[str, str]:
    """The layers behind EmbeddingGemma's pooling, which a file has or has not: names there -> names here."""
    found = {there: f"dense.{number}.weight" for number, there in enumerate(("dense_2.weight", "dense_3.weight"))}
    absent = [there for there in found if there not in shapes]
    if len(absent) == 1:
        raise architectures.missing(absent, file=path)
    for there in found if not absent else ():
        _rows(shapes, there, path)
    return {} if absent else found


def _embedding(table: Fields, name: str, kv: dict[str, Value], size: Mapping[str, int],
               dense: Sequence[tuple[int, ...]]) -> EmbeddingSettings:
    kind = table.int(f"{name}.pooling_type", 0, low=0)
    if kind == _RANK:
        known = ", ".join(sorted({there for row in ROWS if row.gguf_head is not None for there in row.in_gguf}))
        raise Unsupported(f"{table.file}: {name}.pooling_type is 4, a reranker; mpool reranks with GGUF files of "
                          f"{known}",
                          hint="Use a reranker of one of these, or a cross-encoder with one label as transformers "
                               "saves it")
    if kind and kind not in _POOLING:
        table.fail(f"{name}.pooling_type", kind, "0 (none), 1 (mean), 2 (cls) or 3 (last)")
    if not kind:
        log.info("%s names no pooling: mean pooling is used", table.file)
    pooling = _POOLING.get(kind, "mean")
    kv["mpool.pooling"], kv["mpool.normalize"], kv["mpool.dense_count"] = [pooling], True, len(dense)
    return EmbeddingSettings(max_tokens=size["P"], hidden_size=size["D"],
                             output_size=dense[-1][0] if dense else size["D"], pooling=(pooling,), normalize=True)


def _generation(table: Fields, row: Architecture, tokens: Sequence[Any], size: Mapping[str, int]) -> GenerationSettings:
    ids: dict[str, int | None] = {}
    for name in ("bos", "eos", "eot", "eom"):
        ids[name] = table.int(f"tokenizer.ggml.{name}_token_id", None, low=0, high=len(tokens) - 1)
    ends = {i for name, i in ids.items() if name != "bos" and i is not None}
    kinds = table.list("tokenizer.ggml.token_type", None, of=int)
    if kinds is not None and len(kinds) != len(tokens):
        table.fail("tokenizer.ggml.token_type", f"{len(kinds)} entries", f"{len(tokens)}, one a token")
    ending = _END_OF_TURN if "<|return|>" not in tokens else HARMONY_ENDS
    for text in ending.intersection(tokens):  # no token stands there twice: the tokenizer refuses that
        i = tokens.index(text)
        if kinds is None or kinds[i] in (_CONTROL, _USER_DEFINED):
            ends.add(i)
    if not ends:
        log.info("%s names no token that ends a generation", table.file)
    # llama.cpp's default: SentencePiece vocabularies start with BOS, byte-level ones do not
    spm = table.str("tokenizer.ggml.model", "") == "llama"
    add_bos = table.bool("tokenizer.ggml.add_bos_token", spm and ids["bos"] is not None)
    if add_bos and ids["bos"] is None:
        table.fail("tokenizer.ggml.bos_token_id", "missing", "a token id, because add_bos_token is true")
    return GenerationSettings(context_length=size["P"], eog_token_ids=tuple(sorted(ends)), bos_token_id=ids["bos"],
                              add_bos=add_bos)


def _license(table: Fields) -> str | None:
    value = table.get("general.license")
    return value if isinstance(value, str) and len(value) <= 200 else None
