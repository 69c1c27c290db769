"""Reader of static embeddings: model2vec folders, and StaticEmbedding modules of sentence-transformers.

A folder of model2vec has ``config.json`` with ``"model_type": "model2vec"``, ``tokenizer.json`` and
``model.safetensors`` with ``embeddings`` and, since version 0.7, optionally ``weights`` (a factor per token) and
``mapping`` (the row of each token). Its rules are those of ``StaticModel.encode`` of version 0.10
(https://github.com/MinishLab/model2vec): no special tokens; texts are cut to ``max_length`` (512) times the median
length of the vocabulary's tokens, in characters, then to ``max_length`` tokens; unknown tokens are left out.

A StaticEmbedding module (https://sbert.net) is the mean of an EmbeddingBag over all tokens, without a limit.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from ...errors import FormatError, Unsupported
from .. import layout
from ..fields import Fields
from ..files import Folder
from ..json_strict import shorten
from ..spec import EmbeddingSettings, ModelDescription, ModelSpec, TensorEntry, Value
from . import safetensors_header, sentence_folder
from .hf_parts import CONFIG_NAME, TOKENIZER_CONFIG_NAME, refuse_weights, tokenizer_of

_ARCHITECTURE = "static_embedding"
#: model2vec's limit if config.json states none; and the limit of folders without one, in tokens.
_MAX_LENGTH, _NO_LIMIT = 512, 1 << 20
#: Names of the table, and dtypes that the core reads.
_TABLE = ("embeddings", "embedding.weight")
_DTYPES = {"token_embd.weight": ("F32", "F16", "BF16", "I8"), "token_embd.factor": ("F32", "F16", "BF16", "F64"),
           "token_embd.mapping": ("I32", "I64")}


def describe_static(folder: Folder, *, key: str, ref: str) -> ModelDescription | None:
    """Describe the static embedding in a folder; None if it is another model.

    Raises:
        FormatError: a file is missing or malformed, or the sizes of two tensors differ.
        Unsupported: the module is followed by other modules than Normalize, or a tensor has another type.
    """
    modules = folder.has(layout.MODULES_NAME) and _is_static(folder.json(layout.MODULES_NAME))
    config = folder.fields(CONFIG_NAME, missing_ok=True)
    distilled = config.get("model_type") == "model2vec" and (modules or not folder.has(layout.MODULES_NAME))
    if not modules and not distilled:
        return None
    settings = sentence_folder.ModuleSettings(folder)
    if modules:
        settings.transformer, settings.normalize = sentence_folder.static_modules(folder)
    sentence_folder.read_model_config(folder, settings)
    weights = settings.transformer
    found = safetensors_header.read_folder(weights)
    if found is None:
        refuse_weights(weights)
    paths, entries = found
    tensors = _tensors(entries, paths)
    table = tensors["token_embd.weight"]
    rows, dim = table.shape
    vocab = tensors["token_embd.mapping"].shape[0] if "token_embd.mapping" in tensors else rows
    for name in ("token_embd.factor", "token_embd.mapping"):
        if name in tensors and tensors[name].shape != (vocab,):
            raise FormatError(file=paths[0], field=f"shape of {name.rpartition('.')[2]}", got=tensors[name].shape,
                              allowed=f"({vocab},), a number for each token")
    limit = _NO_LIMIT
    kv: dict[str, Value] = {}
    if distilled:
        settings.normalize = config.bool("normalize", False)
        if "max_length" not in config or config.get("max_length") is not None:
            limit = config.int("max_length", _MAX_LENGTH, low=1, high=_NO_LIMIT)
        unknown = _unknown_token(weights)
        if unknown is not None and unknown < vocab:
            kv["mpool.ignored_token"] = unknown
    kv |= {f"{_ARCHITECTURE}.embedding_length": dim, f"{_ARCHITECTURE}.context_length": limit,
           f"{_ARCHITECTURE}.vocab_size": vocab, "mpool.normalize": settings.normalize}
    truncate = settings.truncate_dim
    return ModelDescription(
        key=key, ref=ref, capability="text_embedding",
        spec=ModelSpec(_ARCHITECTURE, tuple(paths), kv, tuple(tensors.values())),
        tokenizer=tokenizer_of(weights, weights.fields(TOKENIZER_CONFIG_NAME, missing_ok=True, wide_ints=True), False,
                               ()),
        embedding=EmbeddingSettings(
            max_tokens=limit, hidden_size=dim, output_size=dim, pooling=("mean",), normalize=settings.normalize,
            prompts=settings.prompts, default_prompt_name=settings.default_prompt_name,
            similarity=settings.similarity, truncate_dim=None if truncate is None or truncate > dim else truncate,
            special_tokens=False, cut_characters=distilled and limit < _NO_LIMIT))


def _is_static(rows: Any) -> bool:
    return isinstance(rows, list) and any(isinstance(row, dict) and isinstance(row.get("type"), str)
                                          and sentence_folder.CLASSES.get(row["type"]) == "StaticEmbedding"
                                          for row in rows[:sentence_folder.MAX_MODULES])


def _tensors(entries: Any, paths: tuple[str, ...]) -> dict[str, TensorEntry]:
    """Return the tensors by the core's names."""
    names = {**dict.fromkeys(_TABLE, "token_embd.weight"), "weights": "token_embd.factor",
             "mapping": "token_embd.mapping"}
    found: dict[str, TensorEntry] = {}
    for stored, entry in entries.items():
        name = names.get(stored)
        if name is None or name in found:
            raise FormatError(file=paths[entry.file], field="tensors", got=shorten(stored),
                              allowed="embeddings or embedding.weight, and optionally weights and mapping")
        if entry.dtype not in _DTYPES[name]:
            raise Unsupported(f"{paths[entry.file]}: {stored} has the type {entry.dtype}; mpool supports "
                              + ", ".join(_DTYPES[name]))
        found[name] = replace(entry, name=name)
    table = found.get("token_embd.weight")
    if table is None or len(table.shape) != 2 or 0 in table.shape:
        raise FormatError(file=paths[0], field="embeddings", got="missing" if table is None else table.shape,
                          allowed="a matrix [tokens, components]")
    mapping = found.get("token_embd.mapping")
    if mapping is not None and len(mapping.shape) != 1:
        raise FormatError(file=paths[mapping.file], field="mapping", got=mapping.shape, allowed="one dimension")
    return found


def _unknown_token(folder: Folder) -> int | None:
    """Return the id of the unknown token of a folder's tokenizer, as model2vec finds it; None if there is none."""
    if not folder.has(layout.TOKENIZER_NAME):
        return None
    file = os.path.join(folder.path, layout.TOKENIZER_NAME)
    tokenizer = folder.fields(layout.TOKENIZER_NAME)
    model = Fields.of(tokenizer.get("model"), file=file, at="model")
    if isinstance(model.get("vocab"), list):  # unigram
        number: int | None = model.int("unk_id", None, low=0)
        return number
    text = model.str("unk_token", None)
    vocab = model.get("vocab")
    if text is None or not isinstance(vocab, dict):
        return None
    for added in tokenizer.list("added_tokens", []):
        if isinstance(added, dict) and added.get("content") == text and type(added.get("id")) is int:
            return int(added["id"])
    token = vocab.get(text)
    return token if type(token) is int and token >= 0 else None
