"""Folders of sentence-transformers: the chain of modules around an encoder.

``modules.json`` lists the modules in order; each has a folder with its own ``config.json`` and, for Dense, its weights
(https://sbert.net/docs/sentence_transformer/usage/custom_models.html). Class names, the spelling of pooling modes and
some file contents changed over the versions; all spellings from 0.4 to 6.2 are read. What mpool computes is the chain
Transformer, Pooling, any number of Dense, Normalize or not; anything else is an error, never left out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import FormatError, LimitError, Unsupported
from ..architectures import check_shape
from ..families.reading import MAX_WIDTH
from ..fields import Fields, describe
from ..files import Folder, refuse_pickle
from ..json_strict import shorten
from ..layout import MODEL_CONFIG, MODULES_NAME, TRANSFORMER_CONFIGS, other_sizes
from ..spec import TensorEntry, Value
from . import safetensors_header

log = logging.getLogger("mpool.models")

MAX_MODULES = 16
MAX_PROMPTS = 256
MAX_SIZES = 16
MAX_PROMPT_LENGTH = 100_000

def _classes() -> dict[str, str]:
    names: dict[str, str] = {}
    for kind, module in (("Transformer", "base.modules.transformer"), ("Dense", "base.modules.dense"),
                         ("Normalize", "base.modules.normalize"), ("Router", "base.modules.router"),
                         ("Pooling", "sentence_transformer.modules.pooling"),
                         ("Dropout", "sentence_transformer.modules.dropout"),
                         ("LayerNorm", "sentence_transformer.modules.layer_norm"),
                         ("WeightedLayerPooling", "sentence_transformer.modules.weighted_layer_pooling"),
                         ("WordEmbeddings", "sentence_transformer.modules.word_embeddings"),
                         ("WordWeights", "sentence_transformer.modules.word_weights"),
                         ("StaticEmbedding", "sentence_transformer.modules.static_embedding"),
                         ("CLIPModel", "sentence_transformer.modules.clip_model"),
                         ("BoW", "sentence_transformer.modules.bow"), ("CNN", "sentence_transformer.modules.cnn"),
                         ("LSTM", "sentence_transformer.modules.lstm"),
                         ("LogitScore", "cross_encoder.modules.logit_score")):
        package, _, file = module.rpartition(".")
        for prefix in ("models", f"models.{kind}", f"models.{file}", module, package):
            names[f"sentence_transformers.{prefix}.{kind}"] = kind
    names["sentence_transformers.models.Asym"] = names["sentence_transformers.models.Asym.Asym"] = "Router"
    return names


#: Every name that sentence-transformers has given a module -> its kind.
CLASSES: dict[str, str] = _classes()
#: Kinds that exist and that mpool computes.
COMPUTED = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")

#: Boolean keys of old pooling configurations in the order in which their outputs are joined, and the modes they mean.
_OLD_POOLING = {"pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
                "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
                "pooling_mode_weightedmean_tokens": "weightedmean", "pooling_mode_lasttoken": "lasttoken"}
#: Pooling modes by their names there -> here.
POOLING = {"cls": "cls", "max": "max", "mean": "mean", "mean_sqrt_len_tokens": "mean_sqrt_len",
           "weightedmean": "weightedmean", "lasttoken": "lasttoken"}

_TORCH_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu",
                      "Sigmoid": "sigmoid"}
#: Dotted names of torch classes, as Dense configurations store them -> names here.
DENSE_ACTIVATIONS = {f"torch.nn.modules.{'linear' if cls == 'Identity' else 'activation'}.{cls}": name
                     for cls, name in _TORCH_ACTIVATIONS.items()}
DENSE_ACTIVATIONS |= {f"torch.nn.{cls}": name for cls, name in _TORCH_ACTIVATIONS.items()}

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


@dataclass
class ModuleSettings:
    """Settings of the modules after the encoder.

    ``dense`` holds (tensors named ``dense.I.weight`` and ``dense.I.bias``, with paths in place of file numbers).
    """

    transformer: Folder
    pooling: tuple[str, ...] = ("mean",)
    include_prompt: bool = True
    normalize: bool = False
    output_size: int = 0
    kv: dict[str, Value] = field(default_factory=dict)
    dense: list[tuple[TensorEntry, str]] = field(default_factory=list)
    max_seq_length: int | None = None
    do_lower_case: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    truncate_dim: int | None = None
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Module:
    kind: str
    folder: Folder
    at: str
    path: str


def of_cross_encoder(folder: Folder) -> list[Folder]:
    """The folders of a CrossEncoder's modules: a transformer with a head, or one that writes text and, behind it, how
    its logits become a score.

    Raises:
        Unsupported: there are others.
    """
    modules = _modules(folder, ordered=False, computed=("Transformer", "LogitScore"))
    if [module.kind for module in modules] not in (["Transformer"], ["Transformer", "LogitScore"]):
        raise Unsupported(f"{folder.path}: a cross-encoder of the modules "
                          + ", ".join(module.kind for module in modules)
                          + "; mpool computes Transformer, and LogitScore behind it or not")
    return [module.folder for module in modules]


def _modules(folder: Folder, ordered: bool = True, computed: tuple[str, ...] = COMPUTED) -> list[_Module]:
    """``modules.json``, every class known, every path inside the folder, no folder used twice."""
    path = os.path.join(folder.path, MODULES_NAME)
    rows = folder.json(MODULES_NAME)
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_MODULES:
        raise FormatError(file=path, field="JSON", allowed=f"a list of 1 to {MAX_MODULES} modules",
                          got=f"{len(rows)} modules" if isinstance(rows, list) else describe(rows))
    modules: list[_Module] = []
    seen: dict[str, int] = {}
    for i, value in enumerate(rows):
        row = Fields.of(value, file=path, at=f"[{i}]")
        if row.int("idx", i) != i:
            row.fail("idx", row.get("idx"), f"{i}, its place in the list")
        row.str("name", "")
        name = row.str("type")
        kind = CLASSES.get(name)
        if kind is None:
            row.fail("type", shorten(name), "a module of sentence-transformers: " + ", ".join(computed),
                     "mpool never imports classes that a model names")
        if kind not in computed:
            raise Unsupported(f"{path}: [{i}].type is {name}; mpool computes " + ", ".join(computed))
        if row.get("kwargs"):
            row.fail("kwargs", describe(row.get("kwargs")), "none")
        sub = folder.sub(row.str("path", ""), declared_in=path, field=row.name("path"))
        # Dropout and Normalize may come without a folder or share the root; they read nothing that could loop
        if kind in ("Transformer", "Pooling", "Dense"):
            if sub.real in seen:
                row.fail("path", f"{row.get('path')!r}, the folder of module {seen[sub.real]}", "a folder of its own")
            seen[sub.real] = i
            if kind != "Transformer" and (folder.real + "/").startswith(sub.real.rstrip("/") + "/"):
                row.fail("path", f"{row.get('path')!r}, a cycle back to the model's own folder", "a folder of its own")
        modules.append(_Module(kind, sub, row.name("type"), row.str("path", "")))
    if ordered:
        _check_order(modules, path)
    return modules


def _check_order(modules: list[_Module], path: str) -> None:
    stages = {"Transformer": 0, "Pooling": 1, "Dense": 2, "Normalize": 3}
    expected = "Transformer, Pooling, any Dense, then Normalize or not"
    at = -1
    for module in modules:
        if module.kind == "Dropout":
            continue
        stage = stages[module.kind]
        if stage < at or (stage == at and module.kind != "Dense") or stage > at + 1 and not (at >= 1 and stage == 3):
            raise FormatError(file=path, field=module.at, got=f"{module.kind} in this place", allowed=expected)
        at = stage
    if at < 1:
        raise FormatError(file=path, field="JSON", got="no Pooling", allowed=expected)


def _pooling(config: Fields, hidden: int) -> tuple[tuple[str, ...], bool]:
    """Pooling modes in the order in which their outputs are joined, and whether prompt tokens take part."""
    config.only({"embedding_dimension", "word_embedding_dimension", "pooling_mode", "include_prompt", *_OLD_POOLING})
    for key in ("embedding_dimension", "word_embedding_dimension"):
        if key in config and config.int(key) != hidden:
            config.fail(key, config.get(key), f"{hidden}, the encoder's hidden size")
    old = [mode for key, mode in _OLD_POOLING.items() if config.bool(key, False)]
    modes: Any = config.get("pooling_mode")
    if modes is None:
        # the library's default
        modes = old or ["mean"]
    elif isinstance(modes, str):
        modes = [modes]
    else:
        modes = config.list("pooling_mode", of=str, limit=len(POOLING))
    if not modes:
        config.fail("pooling_mode", "empty", "at least one mode")
    for mode in modes:
        if mode not in POOLING:
            config.fail("pooling_mode", describe(mode), ", ".join(POOLING))
    return tuple(POOLING[mode] for mode in modes), config.bool("include_prompt", True)


def _dense(folder: Folder, name: str, size: int, found: ModuleSettings) -> tuple[int, str]:
    """Reads one Dense module into ``found``, its tensors as ``name``; returns its output size and its activation."""
    config = folder.fields("config.json")
    config.only({"in_features", "out_features", "bias", "activation_function", "module_input_name",
                 "module_output_name", "use_residual"})
    _refuse_renamed_io(config)
    if config.bool("use_residual", False):
        raise Unsupported(f"{config.file}: use_residual is true; mpool computes Dense without a residual")
    if config.int("in_features", low=1) != size:
        config.fail("in_features", config.get("in_features"), f"{size}, the size that the module before it gives")
    out = config.int("out_features", low=1, high=MAX_WIDTH)
    bias = config.bool("bias", True)
    activation = config.str("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in DENSE_ACTIVATIONS:
        config.fail("activation_function", shorten(activation), ", ".join(sorted(DENSE_ACTIVATIONS)),
                    "mpool never imports classes that a model names")
    tensors = safetensors_header.read_folder(folder)
    if tensors is None:
        for pickled in folder.pickles():
            refuse_pickle(os.path.join(folder.path, pickled))
        raise FormatError(file=folder.path, field="weights", got="missing", allowed="model.safetensors")
    paths, entries = tensors
    shapes = {"linear.weight": (out, size)} | ({"linear.bias": (out,)} if bias else {})
    if set(entries) != set(shapes):
        raise FormatError(file=paths[0], field="tensors", got=", ".join(map(shorten, sorted(entries)[:6])) or "none",
                          allowed=", ".join(shapes))
    for tensor, shape in shapes.items():
        entry = entries[tensor]
        check_shape(entry, shape, paths[entry.file])
        safetensors_header.require_weight_dtype(entry, paths[entry.file])
        renamed = f"{name}.{tensor.rpartition('.')[2]}"
        found.dense.append((TensorEntry(renamed, entry.dtype, entry.shape, 0, entry.offset, entry.nbytes),
                            paths[entry.file]))
    return out, DENSE_ACTIVATIONS[activation]


def _sizes(folder: Folder, module: _Module, size: int, activation: str, found: ModuleSettings) -> None:
    """Reads the layers for other numbers of components."""
    beside = other_sizes(module.path, folder.names())
    if len(beside) > MAX_SIZES:
        raise LimitError(f"{folder.path}: {len(beside)} folders beside {module.path}, mpool takes at most {MAX_SIZES}")
    for number, name in sorted(beside.items()):
        other = folder.sub(name, declared_in=folder.path, field=name)
        out, same = _dense(other, f"dense.size.{number}", size, found)
        if out != number or same != activation:
            raise FormatError(file=other.path, field="config.json", got=f"{out} outputs and {same}",
                              allowed=f"{number} and {activation}, as the folder's name and the others say")
        found.sizes += (number,)
    if found.sizes:
        found.kv["mpool.dense_sizes"] = list(found.sizes)


def _refuse_renamed_io(config: Fields) -> None:
    for key in ("module_input_name", "module_output_name"):
        name = config.str(key, "sentence_embedding")
        if name != "sentence_embedding":
            raise Unsupported(f"{config.file}: {key} is {shorten(name)}; mpool computes modules on sentence_embedding")


def _transformer(folder: Folder, found: ModuleSettings) -> None:
    """Reads ``sentence_bert_config.json``, in its old and its new form."""
    name = next((name for name in TRANSFORMER_CONFIGS if folder.has(name)), None)
    if name is None:
        return
    config = folder.fields(name)
    config.only({"max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name",
                 "processing_kwargs", "unpad_inputs", "query_length", "document_length", "query_expansion",
                 "model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"})
    found.max_seq_length = config.int("max_seq_length", None, low=1)
    found.do_lower_case = config.bool("do_lower_case", False)
    for key, plain in (("transformer_task", "feature-extraction"), ("module_output_name", "token_embeddings")):
        if config.str(key, plain) != plain:
            raise Unsupported(f"{config.file}: {key} is {shorten(config.get(key))}; mpool computes {plain}")
    for key in ("processing_kwargs", "query_length", "document_length", "query_expansion", "tokenizer_args",
                "processor_kwargs", "config_args", "config_kwargs"):
        if config.get(key):
            raise Unsupported(f"{config.file}: {key} is {describe(config.get(key))}; mpool reads models without it")
    for key in ("model_args", "model_kwargs"):
        section = config.section(key, None)
        for option in section or ():
            if option not in ("torch_dtype", "dtype", "attn_implementation", "use_safetensors", "low_cpu_mem_usage"):
                raise Unsupported(f"{config.file}: {section.name(option)} is set; mpool reads models without it")
    modality = config.section("modality_config", None)
    text = modality.section("text") if modality is not None else None
    if text is not None and (text.str("method"), text.str("method_output_name")) != ("forward", "last_hidden_state"):
        raise Unsupported(f"{config.file}: modality_config.text is not forward and last_hidden_state")


def read_model_config(folder: Folder, found: ModuleSettings) -> None:
    """Reads ``config_sentence_transformers.json``: prompts, similarity, truncation."""
    config = folder.fields(MODEL_CONFIG, missing_ok=True)
    kind = config.str("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise Unsupported(f"{config.file}: model_type is {shorten(kind)}; mpool reads SentenceTransformer models")
    prompts = config.section("prompts", None)
    if prompts is not None:
        if len(prompts.values) > MAX_PROMPTS:
            config.fail("prompts", f"{len(prompts.values)} prompts", f"at most {MAX_PROMPTS}")
        found.prompts = {name: prompts.str(name, "", limit=MAX_PROMPT_LENGTH) for name in prompts}
    found.default_prompt_name = config.str("default_prompt_name", None)
    if found.default_prompt_name is not None and found.default_prompt_name not in found.prompts:
        # the library itself gives every model an empty "query" and "document"
        if found.default_prompt_name not in ("query", "document"):
            config.fail("default_prompt_name", describe(found.default_prompt_name),
                        "one of the prompts: " + (", ".join(map(shorten, found.prompts)) or "none"))
        found.prompts[found.default_prompt_name] = ""
    found.similarity = config.str("similarity_fn_name", "cosine", choices=SIMILARITIES)
    found.truncate_dim = config.int("truncate_dim", None, low=1)


def encoder_folder(folder: Folder) -> Folder:
    """The folder with the encoder's config.json: the model's own, or the one that the first module names."""
    if not folder.has(MODULES_NAME):
        return folder
    return _modules(folder)[0].folder


def read_modules(folder: Folder, hidden: int) -> ModuleSettings:
    """Everything around the encoder of a text-embedding folder.

    Args:
        folder: the model's folder. Without ``modules.json`` it means mean pooling and no normalisation, as for
            sentence-transformers.
        hidden: the encoder's hidden size.

    Raises:
        FormatError: an unknown class or key, a path outside the folder, a folder used twice, modules in another order
            than Transformer, Pooling, Dense, Normalize, or sizes that do not meet.
        UnsafeFormat: a Dense module has only pickled weights.
        Unsupported: a module or option of sentence-transformers that mpool does not compute.
    """
    if not folder.has(MODULES_NAME):
        log.info("%s has no %s: mean pooling and no normalisation, as sentence-transformers does", folder.path,
                 MODULES_NAME)
        found = ModuleSettings(transformer=folder)
        size = hidden
        modules: list[_Module] = []
    else:
        modules = _modules(folder)
        found = ModuleSettings(transformer=modules[0].folder)
        _transformer(modules[0].folder, found)
        read_model_config(folder, found)
        size = hidden
    dense = 0
    for module in modules:
        if module.kind == "Pooling":
            found.pooling, found.include_prompt = _pooling(module.folder.fields("config.json"), hidden)
            size = hidden * len(found.pooling)
        elif module.kind == "Dense":
            before, first = size, dense == 0
            size, activation = _dense(module.folder, f"dense.{dense}", size, found)
            found.kv[f"mpool.dense.{dense}.activation"] = activation
            dense += 1
            if first and [other.kind for other in modules].count("Dense") == 1:
                _sizes(folder, module, before, activation, found)
        elif module.kind == "Normalize":
            found.normalize = True
            if module.folder.real != folder.real:
                config = module.folder.fields("config.json", missing_ok=True)
                _refuse_renamed_io(config)
    found.output_size = size
    if found.truncate_dim is not None and found.truncate_dim > size:
        found.truncate_dim = None
    found.kv["mpool.pooling"] = list(found.pooling)
    found.kv["mpool.normalize"] = found.normalize
    found.kv["mpool.dense_count"] = dense
    return found


def max_tokens(found: ModuleSettings, tokenizer: Mapping[str, Any], positions: int) -> int:
    """Longest input in tokens: the folder's own limit, else the tokenizer's; never more than there are positions."""
    limit = found.max_seq_length
    if limit is None:
        value: Any = tokenizer.get("model_max_length")
        limit = int(value) if type(value) in (int, float) and value >= 1 else positions
    return min(limit, positions)
