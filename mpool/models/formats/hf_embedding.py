"""Readers of heads beside pooling: sparse vectors over the vocabulary, and one vector per token.

Sparse encoders are folders of sentence-transformers' SparseEncoder: the head of a masked language model with
SpladePooling, optionally with a table of weights for queries (Router). Token vectors are folders of its
MultiVectorEncoder, of PyLate (https://lightonai.github.io/pylate), and of Stanford's ColBERT
(https://github.com/stanford-futuredata/ColBERT). BGE-M3 (arXiv:2402.03216) has both heads beside a dense one; they are
published as pickles, which mpool never reads: ``colbert_linear.safetensors`` and ``sparse_linear.safetensors`` beside
the model hold the same tensors.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import FormatError, Unsupported
from ..architectures import check_shape, missing
from ..fields import Fields, describe
from ..files import Folder, refuse_missing_weights
from ..json_strict import shorten
from ..layout import MODEL_CONFIG, MODULES_NAME, STANFORD_METADATA, TRANSFORMER_CONFIGS
from ..spec import EmbeddingSettings, StoredVector, TensorEntry, TokenVectorSettings, Value
from . import safetensors_header, sentence_folder

#: Files of BGE-M3's heads beside the model, without their suffix.
COLBERT_LINEAR, SPARSE_LINEAR = "colbert_linear", "sparse_linear"
#: Files that name special tokens, and the keys of the special tokens that get no sparse weight, because they are not
#: part of a text. As in FlagEmbedding, the mask token and other special tokens in a text do get weights.
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_UNWEIGHTED = ("bos_token", "cls_token", "eos_token", "pad_token", "sep_token", "unk_token")
_MAX_LENGTH = 1 << 20
#: Tokens of a document if a folder of PyLate or Stanford's ColBERT has no limit, as in PyLate.
_DOCUMENT_LENGTH = 180
_MAX_WORDS = 4096
#: Maximum number of components of a token vector.
_MAX_ROWS = 1 << 16


@dataclass(frozen=True)
class MaskedHead:
    """Names of the tensors of a masked-language-model head.

    Attributes:
        dense, norm: linear layer and norm of the transform, without ``.weight``.
        output: names of the matrix with one row per token; without any, the token embeddings are used.
        bias: names of the bias of that matrix, of which the first stored one is used: transformers computes with
            ``decoder.bias``, and ties it to the other unless ``tie_word_embeddings`` is false.
        activation: key of config.json that names the activation of the transform.
        epsilon: key of config.json with the epsilon of the norm.
    """

    dense: str
    norm: str
    output: tuple[str, ...]
    bias: tuple[str, ...]
    activation: str = "hidden_act"
    epsilon: str = "layer_norm_eps"


_ROBERTA = MaskedHead("lm_head.dense", "lm_head.layer_norm", ("lm_head.decoder.weight",),
                      ("lm_head.decoder.bias", "lm_head.bias"), activation="")
#: ``model_type`` in config.json -> head of its ForMaskedLM class.
MASKED_HEADS = {
    "bert": MaskedHead("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm",
                       ("cls.predictions.decoder.weight",), ("cls.predictions.decoder.bias", "cls.predictions.bias")),
    "roberta": _ROBERTA, "xlm-roberta": _ROBERTA, "camembert": _ROBERTA, "mpnet": _ROBERTA,
    "modernbert": MaskedHead("head.dense", "head.norm", ("decoder.weight",), ("decoder.bias",),
                             activation="classifier_activation", epsilon="norm_eps"),
    "distilbert": MaskedHead("vocab_transform", "vocab_layer_norm", ("vocab_projector.weight",),
                             ("vocab_projector.bias",), activation="activation", epsilon=""),
    # transformers saves no matrix of its own where it is that of the token embeddings, which may be narrower
    "electra": MaskedHead("generator_predictions.dense", "generator_predictions.LayerNorm",
                          ("generator_lm_head.weight", "electra.embeddings.word_embeddings.weight"),
                          ("generator_lm_head.bias",), activation=""),
}
_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "silu": "silu", "gelu_new": "gelu_tanh",
                "gelu_pytorch_tanh": "gelu_tanh"}


# ---- recognising folders -------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Module:
    """A module of a folder: the last part of its class name, its folder, and its name in messages."""

    kind: str
    folder: Folder
    at: str


#: Values of ``model_type`` in ``config_sentence_transformers.json`` of models without one dense vector per text.
MODEL_TYPES = ("SparseEncoder", "MultiVectorEncoder", "ColBERT")


@dataclass
class Found:
    """A folder whose output is not one dense vector per text.

    Attributes:
        folder: the model folder.
        encoder: folder of the encoder.
        sparse: True for sparse vectors, False for token vectors.
        modules: modules after the encoder.
        queries: folder of the table of weights for queries, or None.
    """

    folder: Folder
    encoder: Folder
    sparse: bool
    modules: list[Module] = field(default_factory=list)
    queries: Folder | None = None


def find(folder: Folder) -> Found | None:
    """Return the modules of a sparse encoder or of a model of token vectors; None for any other folder.

    Raises:
        FormatError: a module's class is unknown, its path is outside the folder, or the modules have another order.
        Unsupported: a module computes what mpool does not.
    """
    if not folder.has(MODULES_NAME):
        if not folder.has(STANFORD_METADATA):
            return None
        classes = folder.fields("config.json").list("architectures", [], of=str, limit=16)
        return Found(folder, folder, sparse=False) if "HF_ColBERT" in classes else None
    kind = folder.fields(MODEL_CONFIG, missing_ok=True).get("model_type")
    if kind not in MODEL_TYPES and not _names_special(folder):
        return None
    modules = _modules_of(folder)
    if kind == "SparseEncoder" or any(one.kind in ("SpladePooling", "SparseStaticEmbedding") for one in modules):
        return _sparse(folder, modules)
    if not modules or modules[0].kind != "Transformer":
        raise FormatError(file=folder.path, field=MODULES_NAME, got=", ".join(one.kind for one in modules) or "none",
                          allowed="Transformer, then Dense, MultiVectorMask and Normalize")
    return Found(folder, modules[0].folder, sparse=False, modules=modules[1:])


def _names_special(folder: Folder) -> bool:
    """Return True if a module has a class that only sparse encoders and models of token vectors have."""
    rows = folder.json(MODULES_NAME)
    types = [row.get("type") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return any(isinstance(name, str) and (name.startswith("pylate.") or name.rpartition(".")[2] in (
        "SpladePooling", "MLMTransformer", "MultiVectorMask")) for name in types)


_KINDS = ("Transformer", "MLMTransformer", "SpladePooling", "Router", "SparseStaticEmbedding", "IDF", "Dense",
          "MultiVectorMask", "Normalize")


def _kind(where: Fields, key: str) -> str:
    """Return the kind of a module from the class name under ``key``."""
    name = where.str(key)
    kind = name.rpartition(".")[2]
    if name in sentence_folder.CLASSES and kind not in _KINDS:
        raise Unsupported(f"{where.file}: {where.name(key)} is {name}; mpool supports " + ", ".join(_KINDS))
    sentence_folder.module_class(where, key, _KINDS)
    return {"MLMTransformer": "Transformer", "IDF": "SparseStaticEmbedding"}.get(kind, kind)


def _modules_of(folder: Folder) -> list[Module]:
    rows = folder.json(MODULES_NAME)
    path = folder.shown(MODULES_NAME)
    if not isinstance(rows, list) or not 1 <= len(rows) <= sentence_folder.MAX_MODULES:
        raise FormatError(file=path, field="JSON", allowed=f"a list of 1 to {sentence_folder.MAX_MODULES} modules",
                          got=f"{len(rows)} modules" if isinstance(rows, list) else describe(rows))
    found: list[Module] = []
    for at, value in enumerate(rows):
        row = Fields.of(value, file=path, at=f"[{at}]")
        kind = _kind(row, "type")
        if row.get("kwargs") not in (None, []) and not (kind == "Router" and row.get("kwargs") == ["task"]):
            row.fail("kwargs", describe(row.get("kwargs")), 'none, or ["task"] for a Router')
        found.append(Module(kind, folder.sub(row.str("path", ""), declared_in=path, field=row.name("path")),
                            row.name("type")))
    return found


def _sparse(folder: Folder, modules: list[Module]) -> Found:
    if [one.kind for one in modules] == ["Transformer", "SpladePooling"]:
        return Found(folder, modules[0].folder, sparse=True, modules=modules[1:])
    if [one.kind for one in modules] != ["Router"]:
        raise Unsupported(f"{folder.path}: the modules of the sparse encoder are "
                          + ", ".join(one.kind for one in modules)
                          + "; mpool supports Transformer and SpladePooling, or a Router of these for documents and a "
                          "SparseStaticEmbedding for queries")
    return _routed(folder, modules[0].folder)


def _routed(folder: Folder, router: Folder) -> Found:
    """Read the two sides of a Router."""
    config = router.fields("router_config.json")
    config.only({"types", "structure", "parameters"})
    types, structure = config.section("types"), config.section("structure")
    sides: dict[str, list[Module]] = {}
    for side in structure:
        names = structure.list(side, of=str, limit=sentence_folder.MAX_MODULES)
        sides[side] = [Module(_kind(types, name),
                              router.sub(name, declared_in=config.file, field=structure.name(side)),
                              types.name(name)) for name in names]
    if {side: [one.kind for one in found] for side, found in sides.items()} != {
            "query": ["SparseStaticEmbedding"], "document": ["Transformer", "SpladePooling"]}:
        raise Unsupported(f"{config.file}: structure is "
                          + "; ".join(f"{side}: {', '.join(one.kind for one in found)}"
                                      for side, found in sides.items())
                          + "; mpool supports query: SparseStaticEmbedding; document: Transformer, SpladePooling")
    return Found(folder, sides["document"][0].folder, sparse=True, modules=sides["document"][1:],
                 queries=sides["query"][0].folder)


# ---- tensors -------------------------------------------------------------------------------------------------------

@dataclass
class Tensors:
    """Weights of a model while its folder is read: paths of the files, and entries under the core's names."""

    paths: list[str]
    entries: list[TensorEntry]

    def add(self, name: str, entry: TensorEntry, path: str, shape: tuple[int, ...]) -> None:
        """Add a tensor of a file under the core's name.

        Raises:
            FormatError: its shape is another.
            Unsupported: its dtype cannot be a weight.
        """
        check_shape(entry, shape, path)
        safetensors_header.require_weight_dtype(entry, path)
        if path not in self.paths:
            self.paths.append(path)
        self.entries.append(replace(entry, name=name, file=self.paths.index(path)))


def _own_file(folder: Folder, stem: str) -> tuple[tuple[str, ...], dict[str, TensorEntry]] | None:
    return safetensors_header.read_folder(folder, stem) if folder.has(f"{stem}.safetensors") else None


# ---- sparse encoders -----------------------------------------------------------------------------------------------

def read_masked_head(config: Fields, stored: Mapping[str, TensorEntry], paths: tuple[str, ...],
                     size: Mapping[str, int], kv: dict[str, Value], tensors: Tensors) -> None:
    """Add the head of a masked language model as the core's vocabulary head.

    Raises:
        Unsupported: the architecture has no known head, or its activation is not supported.
        FormatError: a tensor is missing or has a wrong shape.
    """
    head = MASKED_HEADS.get(config.str("model_type"))
    if head is None:
        raise Unsupported(f"{config.file}: mpool supports sparse heads of " + ", ".join(sorted(MASKED_HEADS))
                          + f", not of {shorten(config.get('model_type'))}")
    act = config.str(head.activation, "gelu") if head.activation else "gelu"
    if act not in _ACTIVATIONS:
        raise Unsupported(f"{config.file}: {head.activation} is {shorten(act)}; mpool supports "
                          + ", ".join(_ACTIVATIONS))
    hidden, vocab = size["D"], size["V"]
    dense = stored.get(f"{head.dense}.weight")
    if dense is None:
        raise missing([f"{head.dense}.weight"], file=paths[0])
    inner = dense.shape[0] if len(dense.shape) == 2 else 0
    wanted = ((f"{head.dense}.weight", "sparse.0.weight", (inner, hidden), True),
              (f"{head.dense}.bias", "sparse.0.bias", (inner,), False),
              (f"{head.norm}.weight", "sparse.0.norm.weight", (inner,), True),
              (f"{head.norm}.bias", "sparse.0.norm.bias", (inner,), False))
    for name, core, shape, needed in wanted:
        if name in stored:
            tensors.add(core, stored[name], paths[stored[name].file], shape)
        elif needed:
            raise missing([name], file=paths[0])
    for names, core, shape in ((head.output, "sparse_output.weight", (vocab, inner)),
                               (head.bias, "sparse_output.bias", (vocab,))):
        entry = next((stored[name] for name in names if name in stored), None)
        if entry is not None:
            tensors.add(core, entry, paths[entry.file], shape)
        elif core == "sparse_output.weight" and inner != hidden:
            raise missing([names[0]], file=paths[0])
    kv |= {"mpool.sparse": "vocabulary", "mpool.sparse_count": 1, "mpool.sparse.0.activation": _ACTIVATIONS[act],
           "mpool.sparse.0.norm_epsilon": config.number(head.epsilon, 1e-12, above=0.0) if head.epsilon else 1e-12}


def _read_splade_pooling(module: Module, kv: dict[str, Value]) -> None:
    config = module.folder.fields("config.json")
    config.only({"pooling_strategy", "activation_function", "embedding_dimension", "word_embedding_dimension",
                 "chunk_size"})
    kv["mpool.sparse_sum"] = config.str("pooling_strategy", "max", choices=("max", "sum")) == "sum"
    kv["mpool.sparse_logs"] = 2 if config.str("activation_function", "relu",
                                              choices=("relu", "log1p_relu")) == "log1p_relu" else 1


def _read_query_weights(folder: Folder, vocab: int) -> StoredVector:
    """Return the table with the weight of each token in a query."""
    config = folder.fields("config.json", missing_ok=True)
    config.only({"frozen", "path", "tokenizer_name_or_path"})
    path = config.str("path", None)
    if path is not None and path.endswith(".json"):  # sentence-transformers then ignores model.safetensors
        raise Unsupported(f"{config.file}: path is {shorten(path)}; mpool supports weights in model.safetensors",
                          hint="Load the model with a current version of sentence-transformers, and save it again")
    found = safetensors_header.read_folder(folder)
    if found is None:
        refuse_missing_weights(folder, "model.safetensors",
                               hint="Save the model again with a current version of sentence-transformers")
    paths, entries = found
    sentence_folder.check_names(paths, entries, ("weight",))
    entry = entries["weight"]
    check_shape(entry, (vocab,), paths[entry.file])
    if entry.dtype != "F32":
        raise Unsupported(f"{paths[entry.file]}: weight is stored as {entry.dtype}; mpool supports F32")
    return StoredVector(paths[entry.file], entry.offset, vocab)


# ---- token vectors -------------------------------------------------------------------------------------------------

def _read_token_dense(found: Found, hidden: int, kv: dict[str, Value], tensors: Tensors) -> int:
    """Read the Dense modules of token vectors. Returns the number of components of a vector."""
    size, count = hidden, 0
    for module in found.modules:
        if module.kind != "Dense":
            continue
        dense = sentence_folder.read_dense(module.folder, size, "token_embeddings",
                                           "torch.nn.modules.linear.Identity", widest=_MAX_ROWS)
        for name, shape in dense.shapes.items():
            entry = dense.entries[name]
            tensors.add(f"rows.{count}.{sentence_folder.DENSE_TENSORS[name]}", entry, dense.paths[entry.file], shape)
        kv[f"mpool.rows.{count}.activation"] = dense.activation
        if dense.residual:
            kv[f"mpool.rows.{count}.adds_input"] = True
        size, count = dense.size, count + 1
    if count == 0 or count > 8:
        raise FormatError(file=found.folder.path, field=MODULES_NAME, got=f"{count} Dense modules", allowed="1 to 8")
    kv |= {"mpool.rows_count": count,
           "mpool.rows_normalize": any(one.kind == "Normalize" for one in found.modules)}
    return size


def _check_rows(weight: TensorEntry, path: str, hidden: int, most: int = _MAX_ROWS) -> None:
    """Raise FormatError unless the matrix of a head has 1 to ``most`` rows of the encoder's hidden size."""
    if len(weight.shape) != 2 or not 1 <= weight.shape[0] <= most or weight.shape[1] != hidden:
        raise FormatError(file=path, offset=weight.offset, field=f"shape of {weight.name}", got=list(weight.shape),
                          allowed=f"[{'1' if most == 1 else f'1 to {most:,}'}, {hidden}]")


def _words(config: Fields, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    return default if config.get(key) is None else tuple(config.list(key, of=str, limit=_MAX_WORDS))


def _length(config: Fields, key: str, default: int | None = None) -> int | None:
    return default if config.get(key) is None else config.int(key, low=3, high=_MAX_LENGTH)


def _read_expansion(config: Fields) -> tuple[str | None, int | None, bool]:
    """Read ``query_expansion`` of a Transformer module: the token ("" = the mask token), the length, and attend."""
    section = config.section("query_expansion", None) if config.get("query_expansion") else None
    if section is None:
        return None, None, False
    section.only({"strategy", "attend", "token", "length"})
    section.str("strategy", choices=("fixed",))
    token = section.get("token")
    return ("" if token is None else section.str("token")), section.int("length", low=3, high=_MAX_LENGTH), \
        section.bool("attend", False)


def _read_pylate(config: Fields) -> TokenVectorSettings:
    """Read the settings of PyLate, which are in ``config_sentence_transformers.json``."""
    expands = config.bool("do_query_expansion", True)
    attend = config.bool("attend_to_expansion_tokens", None)
    if attend is None:
        attend = config.bool("attend_to_mask_tokens", False)
    length = _length(config, "query_length", 32)
    return TokenVectorSettings(
        size=0, query_marker=config.str("query_prefix", "[Q] "), document_marker=config.str("document_prefix", "[D] "),
        query_length=length, document_length=_length(config, "document_length", _DOCUMENT_LENGTH),
        expansion="" if expands else None, attend=attend and expands,
        skipped=_words(config, "skiplist_words", tuple(string.punctuation)))


def _read_stanford(folder: Folder) -> TokenVectorSettings:
    config = folder.fields(STANFORD_METADATA)
    punctuation = tuple(string.punctuation) if config.bool("mask_punctuation", True) else ()
    return TokenVectorSettings(
        size=0, query_marker=config.str("query_token_id", "[unused0]"),
        document_marker=config.str("doc_token_id", "[unused1]"), query_length=_length(config, "query_maxlen", 32),
        document_length=_length(config, "doc_maxlen", 220), expansion="",
        attend=config.bool("attend_to_mask_tokens", False), skipped=punctuation)


def _read_native(found: Found) -> TokenVectorSettings:
    """Read the settings of a MultiVectorEncoder of sentence-transformers from its modules."""
    name = next((name for name in TRANSFORMER_CONFIGS if found.encoder.has(name)), None)
    config = found.encoder.fields(name) if name is not None else Fields({}, file=found.encoder.path)
    expansion, length, attend = _read_expansion(config)
    words: tuple[str, ...] = ()
    queries = False
    for module in found.modules:
        if module.kind != "MultiVectorMask":
            continue
        mask = module.folder.fields("config.json")
        mask.only({"skiplist_words", "skiplist_tasks", "keep_only_token_ids"})
        if mask.get("keep_only_token_ids"):
            raise Unsupported(f"{mask.file}: keep_only_token_ids is set; mpool supports null")
        words = _words(mask, "skiplist_words", ())
        tasks = mask.list("skiplist_tasks", ["document"], of=str, limit=4)
        queries = "query" in tasks
        words = words if "document" in tasks or queries else ()
        if words and "document" not in tasks:
            raise Unsupported(f"{mask.file}: skiplist_tasks is {', '.join(tasks)}; mpool supports document, optionally "
                              "with query")
    return TokenVectorSettings(size=0, query_length=length or _length(config, "query_length"),
                               document_length=_length(config, "document_length"), expansion=expansion, attend=attend,
                               skipped=words, skips_queries=queries)


# ---- descriptions --------------------------------------------------------------------------------------------------

def _settings_of(found: Found) -> sentence_folder.ModuleSettings:
    """Return length, case and prompts; the keys of sparse encoders and token vectors are read elsewhere."""
    settings = sentence_folder.ModuleSettings(transformer=found.encoder)
    name = next((name for name in TRANSFORMER_CONFIGS if found.encoder.has(name)), None)
    if name is not None:
        config = found.encoder.fields(name)
        config.only(sentence_folder.TRANSFORMER_KEYS)
        sentence_folder.refuse_options(config)
        settings.max_seq_length = config.int("max_seq_length", None, low=1)
        settings.do_lower_case = config.bool("do_lower_case", False)
    config = found.folder.fields(MODEL_CONFIG, missing_ok=True)
    settings.prompts = sentence_folder.read_prompts(config)
    sentence_folder.read_default_prompt(config, settings)
    return settings


def read(found: Found, config: Fields, stored: Mapping[str, TensorEntry], paths: tuple[str, ...],
         size: Mapping[str, int], kv: dict[str, Value], tensors: Tensors,
         tokenizer: Mapping[str, Any]) -> tuple[EmbeddingSettings, bool]:
    """Read a sparse encoder or a model of token vectors.

    Args:
        found: the modules.
        config, stored, paths, size: ``config.json``, weights and sizes of the encoder.
        kv, tensors: spec under construction, to which the heads are added.
        tokenizer: values of ``tokenizer_config.json``.

    Returns:
        The settings, and True if texts are converted to lower case.
    """
    settings = _settings_of(found)
    hidden = size["D"]
    kv |= {"mpool.pooled": False, "mpool.pooling": ["mean"], "mpool.normalize": False, "mpool.dense_count": 0}
    embedding = EmbeddingSettings(
        max_tokens=sentence_folder.max_tokens(settings, tokenizer, size["P"]), hidden_size=hidden, output_size=hidden,
        normalize=False, prompts=settings.prompts, default_prompt_name=settings.default_prompt_name,
        embeddings=("sparse",) if found.sparse else ("tokens",), similarity="dot")
    if found.sparse:
        read_masked_head(config, stored, paths, size, kv, tensors)
        _read_splade_pooling(found.modules[0], kv)
        weights = None if found.queries is None else _read_query_weights(found.queries, size["V"])
        return replace(embedding, query_weights=weights), settings.do_lower_case
    top = found.folder.fields(MODEL_CONFIG, missing_ok=True)
    if not found.folder.has(MODULES_NAME):
        late = _read_stanford(found.folder)
        linear = stored.get("linear.weight")
        if linear is None:
            raise missing(["linear.weight"], file=paths[0])
        _check_rows(linear, paths[linear.file], hidden)
        tensors.add("rows.0.weight", linear, paths[linear.file], (linear.shape[0], hidden))
        kv |= {"mpool.rows_count": 1, "mpool.rows_normalize": True, "mpool.rows.0.activation": "identity"}
        late = replace(late, size=linear.shape[0])
    else:
        pylate = top.get("model_type") == "ColBERT"
        late = replace(_read_pylate(top) if pylate else _read_native(found),
                       size=_read_token_dense(found, hidden, kv, tensors))
        if pylate:
            kv["mpool.rows_normalize"] = True
    return replace(embedding, tokens=late), settings.do_lower_case


def add_token_heads(folder: Folder, encoder: Folder, embedding: EmbeddingSettings, size: Mapping[str, int],
                    kv: dict[str, Value], tensors: Tensors) -> EmbeddingSettings:
    """Add BGE-M3's heads to a model of dense vectors, if the folder has them as safetensors.

    Args:
        folder: folder of the model.
        encoder: folder of the encoder and its tokenizer.
        embedding, size, kv, tensors: the model and its spec under construction.
    """
    hidden, outputs, late = size["D"], list(embedding.embeddings), embedding.tokens
    for stem, core in ((COLBERT_LINEAR, "rows.0"), (SPARSE_LINEAR, "sparse.0")):
        found = _own_file(folder, stem)
        if found is None:
            continue
        paths, entries = found
        sentence_folder.check_names(paths, entries, ("weight",), ("bias",))
        weight = entries["weight"]
        _check_rows(weight, paths[weight.file], hidden, 1 if core == "sparse.0" else _MAX_ROWS)
        out = weight.shape[0]
        tensors.add(f"{core}.weight", weight, paths[weight.file], (out, hidden))
        if "bias" in entries:
            tensors.add(f"{core}.bias", entries["bias"], paths[entries["bias"].file], (out,))
        if core == "sparse.0":
            outputs.append("sparse")
            kv |= {"mpool.sparse": "tokens", "mpool.sparse_count": 1, "mpool.sparse.0.activation": "relu",
                   "mpool.sparse_skipped": list(_unweighted_ids(encoder, size["V"]))}
        else:
            outputs.append("tokens")
            late = TokenVectorSettings(size=out, skip_first=1)
            kv |= {"mpool.rows_count": 1, "mpool.rows_normalize": True, "mpool.rows.0.activation": "identity"}
    return replace(embedding, embeddings=tuple(outputs), tokens=late)


def _unweighted_ids(folder: Folder, vocab: int) -> tuple[int, ...]:
    """Return the ids of the special tokens that get no sparse weight, at most 64.

    These are the tokens that the tokenizer's settings name under one of :data:`_UNWEIGHTED`; if they name none, all
    special tokens of ``tokenizer.json``.
    """
    whole: Any = folder.json("tokenizer.json") if folder.has("tokenizer.json") else {}
    added = whole.get("added_tokens", []) if isinstance(whole, dict) else []
    special = {row["id"]: row.get("content") for row in added if isinstance(row, dict) and row.get("special") is True
               and type(row.get("id")) is int and 0 <= row["id"] < vocab} if isinstance(added, list) else {}
    names: set[str] = set()
    for file in _TOKENIZER_SETTINGS:
        settings = folder.fields(file, missing_ok=True, wide_ints=True)
        values = [settings.get(key) for key in _UNWEIGHTED]
        texts = [value.get("content") if isinstance(value, dict) else value for value in values]
        names |= {text for text in texts if isinstance(text, str)}
    found = [token for token, text in special.items() if isinstance(text, str) and text in names] or list(special)
    return tuple(sorted(found)[:64])


__all__ = ["Found", "Tensors", "add_token_heads", "find", "read"]
