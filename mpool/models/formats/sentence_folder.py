"""Reader of sentence-transformers folders: the chain of modules around an encoder.

``modules.json`` lists the modules in order. Each module has a folder with its own ``config.json`` and, for Dense, its
weights (https://sbert.net/docs/sentence_transformer/usage/custom_models.html). Class names, the spelling of pooling
modes and some file contents changed between versions; all spellings from 0.4 to 6.2 are supported. mpool computes the
chain Transformer, Pooling, any number of Dense, and optionally Normalize. Any other module raises an error; none is
ignored except Dropout, which does nothing in inference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import FormatError, LimitError, Unsupported
from ...names import SIMILARITIES
from ...records import logger
from ..architectures import check_shape
from ..families.reading import MAX_WIDTH
from ..fields import Fields, describe
from ..files import Folder, refuse_missing_weights
from ..json_strict import shorten
from ..layout import MODEL_CONFIG, MODULES_NAME, OWN_MODULE, TRANSFORMER_CONFIGS, other_sizes
from ..spec import TensorEntry, Value
from . import safetensors_header

log = logger("mpool.models")

MAX_MODULES = 16
MAX_PROMPTS = 256
#: Maximum number of alternative Dense layers with other output sizes.
MAX_OTHER_SIZES = 16
#: Maximum length of a prompt, in characters.
MAX_PROMPT_LENGTH = 100_000


def _class_kinds() -> dict[str, str]:
    """Return every dotted class name that a module has had in sentence-transformers -> its kind."""
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


#: Dotted class name of a module in any version of sentence-transformers -> its kind.
CLASSES: dict[str, str] = _class_kinds()
#: Beginnings of the class names of modules, in files of sentence-transformers and of PyLate.
_PACKAGES = ("sentence_transformers.", "pylate.models.")
CLASSES[OWN_MODULE] = "Transformer"
#: Arguments that a module of the class OWN_MODULE takes from a request.
_OWN_ARGUMENTS = ("task", "truncate_dim")
#: Kinds of modules that mpool supports.
SUPPORTED = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")

#: Boolean keys of older pooling configurations -> pooling mode, in the order in which the outputs are concatenated.
_LEGACY_POOLING = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken"}
#: Pooling mode in sentence-transformers -> in mpool.
POOLING = {"cls": "cls", "max": "max", "mean": "mean", "mean_sqrt_len_tokens": "mean_sqrt_len",
           "weightedmean": "weightedmean", "lasttoken": "lasttoken"}

_TORCH_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "GELU": "gelu", "ReLU": "relu", "SiLU": "silu",
                      "Sigmoid": "sigmoid", "LeakyReLU": "leaky_relu"}
#: Dotted name of a torch class, as Dense configurations store it -> name of the activation in mpool.
DENSE_ACTIVATIONS = {f"torch.nn.modules.{'linear' if cls == 'Identity' else 'activation'}.{cls}": name
                     for cls, name in _TORCH_ACTIVATIONS.items()}
DENSE_ACTIVATIONS |= {f"torch.nn.{cls}": name for cls, name in _TORCH_ACTIVATIONS.items()}
#: Tensor of a Dense module -> the last part of its name in the core.
DENSE_TENSORS = {"linear.weight": "weight", "linear.bias": "bias", "residual.weight": "residual"}

#: Keys of the file with the settings of a Transformer module.
TRANSFORMER_KEYS = frozenset({
    "max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name",
    "processing_kwargs", "unpad_inputs", "query_length", "document_length", "query_expansion",
    "model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"})


def module_class(fields: Fields, key: str, kinds: tuple[str, ...] = ()) -> str:
    """Return the class name of a module.

    Args:
        fields: JSON object with the name.
        key: its key.
        kinds: allowed last parts of the name; empty: any.

    Raises:
        FormatError: the class belongs to another package, or its kind is not allowed.
    """
    name = fields.str(key)
    if not name.startswith(_PACKAGES) or (kinds and name.rpartition(".")[2] not in kinds):
        allowed = "a module of sentence-transformers or PyLate" + (": " + ", ".join(kinds) if kinds else "")
        fields.fail(key, shorten(name), allowed, "mpool never imports a class on behalf of a model file")
    return name


@dataclass
class ModuleSettings:
    """Settings of the modules around the encoder.

    Attributes:
        transformer: folder of the encoder.
        pooling: pooling modes, whose outputs are concatenated.
        include_prompt: True if the pooling includes the tokens of the prompt.
        normalize: True if embeddings are normalised to length 1.
        output_size: size of the embeddings.
        kv: hyper-parameters of pooling and dense layers.
        dense: pairs of a tensor of a dense layer (``dense.I.weight`` or ``dense.I.bias``) and the path of its file.
        max_seq_length: maximum input length in tokens; None: not set.
        do_lower_case: True if texts are converted to lower case.
        prompts: prompts by name.
        default_prompt_name: name of the prompt used by default; None: no prompt.
        similarity: similarity function, one of :data:`mpool.names.SIMILARITIES`.
        truncate_dim: size to which embeddings are truncated by default; None: no truncation.
        sizes: output sizes of the alternative dense layers.
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
    """A module of ``modules.json``; ``at`` is the name of its type field, for messages, ``path`` the stored path.
    ``own``: the class is OWN_MODULE."""

    kind: str
    folder: Folder
    at: str
    path: str
    own: bool = False


def cross_encoder_modules(folder: Folder) -> list[Folder]:
    """Return the folders of a CrossEncoder's modules.

    Returns:
        The folder of the Transformer and, for a language model, the folder of the LogitScore module, which turns its
        logits into a score.

    Raises:
        Unsupported: the CrossEncoder has other modules.
    """
    modules = _list_modules(folder, ordered=False, supported=("Transformer", "LogitScore"))
    if [module.kind for module in modules] not in (["Transformer"], ["Transformer", "LogitScore"]):
        raise Unsupported(f"{folder.path}: the modules of the cross-encoder are "
                          + ", ".join(module.kind for module in modules)
                          + "; mpool supports Transformer, optionally followed by LogitScore")
    return [module.folder for module in modules]


def _list_modules(folder: Folder, ordered: bool = True, supported: tuple[str, ...] = SUPPORTED) -> list[_Module]:
    """Return the modules of ``modules.json``.

    Args:
        folder: the model folder.
        ordered: True to check the order of the modules.
        supported: accepted kinds of modules.

    Raises:
        FormatError: a class is unknown, a path is outside the folder, or two modules use one folder.
        Unsupported: the kind of a module is not in ``supported``.
    """
    path = folder.shown(MODULES_NAME)
    rows = folder.json(MODULES_NAME)
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_MODULES:
        raise FormatError(file=path, field="JSON", allowed=f"a list of 1 to {MAX_MODULES} modules",
                          got=f"{len(rows)} modules" if isinstance(rows, list) else describe(rows))
    modules: list[_Module] = []
    seen: dict[str, int] = {}
    for i, value in enumerate(rows):
        row = Fields.of(value, file=path, at=f"[{i}]")
        if row.int("idx", i) != i:
            row.fail("idx", row.get("idx"), f"{i}, the index in the list")
        row.str("name", "")
        name = row.str("type")
        kind = CLASSES.get(name)
        if kind is None:
            row.fail("type", shorten(name), "a module of sentence-transformers: " + ", ".join(supported),
                     "mpool never imports a class on behalf of a model file")
        if kind not in supported:
            raise Unsupported(f"{path}: [{i}].type is {name}; mpool supports " + ", ".join(supported))
        arguments = row.list("kwargs", [], of=str, limit=MAX_MODULES) if name == OWN_MODULE else []
        if row.get("kwargs") and not (arguments and set(arguments) <= set(_OWN_ARGUMENTS)):
            row.fail("kwargs", describe(row.get("kwargs")), "none")
        place = row.str("path", "")
        sub = folder.sub(place, declared_in=path, field=row.name("path"))
        # Dropout and Normalize may have no folder or use the model's own. They read no file, so no cycle is possible.
        if kind in ("Transformer", "Pooling", "Dense"):
            if sub.real in seen:
                row.fail("path", f"{place!r}, the folder of module {seen[sub.real]}", "a folder of its own")
            seen[sub.real] = i
            if kind != "Transformer" and (folder.real + "/").startswith(sub.real.rstrip("/") + "/"):
                row.fail("path", f"{row.get('path')!r}, a cycle back to the model's own folder", "a folder of its own")
        modules.append(_Module(kind, sub, row.name("type"), row.str("path", ""), name == OWN_MODULE))
    if ordered and not (len(modules) == 1 and modules[0].own):
        _check_order(modules, path)
    return modules


def static_modules(folder: Folder) -> tuple[Folder, bool]:
    """Return the folder of a StaticEmbedding module, and True if a Normalize module follows it.

    Raises:
        Unsupported: the folder has other modules.
    """
    modules = _list_modules(folder, ordered=False, supported=("StaticEmbedding", "Normalize"))
    kinds = [module.kind for module in modules]
    if kinds not in (["StaticEmbedding"], ["StaticEmbedding", "Normalize"]):
        raise Unsupported(f"{folder.path}: the modules are {', '.join(kinds)}; mpool supports StaticEmbedding, "
                          "optionally followed by Normalize")
    return modules[0].folder, len(kinds) == 2


def _check_order(modules: list[_Module], path: str) -> None:
    """Raise FormatError unless the modules form a chain that mpool computes."""
    stages = {"Transformer": 0, "Pooling": 1, "Dense": 2, "Normalize": 3}
    expected = "Transformer, Pooling, any number of Dense, optionally Normalize"
    at = -1
    for module in modules:
        if module.kind == "Dropout":
            continue
        stage = stages[module.kind]
        if stage < at or (stage == at and module.kind != "Dense") or stage > at + 1 and not (at >= 1 and stage == 3):
            raise FormatError(file=path, field=module.at, got=f"{module.kind} in this position", allowed=expected)
        at = stage
    if at < 1:
        raise FormatError(file=path, field="JSON", got="no Pooling", allowed=expected)


def _read_pooling(config: Fields, hidden: int) -> tuple[tuple[str, ...], bool]:
    """Return the pooling modes in the order of concatenation, and True if the pooling includes the prompt's tokens."""
    config.only({"embedding_dimension", "word_embedding_dimension", "pooling_mode", "include_prompt", *_LEGACY_POOLING})
    for key in ("embedding_dimension", "word_embedding_dimension"):
        if key in config and config.int(key) != hidden:
            config.fail(key, config.get(key), f"{hidden}, the encoder's hidden size")
    old = [mode for key, mode in _LEGACY_POOLING.items() if config.bool(key, False)]
    modes: Any = config.get("pooling_mode")
    if modes is None:
        # sentence-transformers' default
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


@dataclass(frozen=True)
class DenseModule:
    """A Dense module.

    Attributes:
        size: size of its output.
        activation: name of its activation in mpool.
        residual: True if its input, or a product of it, is added after the activation.
        shapes: its tensors -> their shapes.
        paths: files of the module's folder with tensors.
        entries: the tensors of these files.
    """

    size: int
    activation: str
    residual: bool
    shapes: Mapping[str, tuple[int, ...]]
    paths: Sequence[str]
    entries: Mapping[str, TensorEntry]


def read_dense(folder: Folder, size: int, io_name: str, default: str, widest: int = MAX_WIDTH) -> DenseModule:
    """Read a Dense module, of sentence vectors or of token vectors. The caller checks the shapes of its tensors.

    Args:
        folder: the module's folder.
        size: size of the module's input.
        io_name: allowed name of the module's input and output.
        default: activation of a module that states none, a key of DENSE_ACTIVATIONS.
        widest: maximum size of its output.
    """
    config = folder.fields("config.json")
    config.only({"in_features", "out_features", "bias", "activation_function", "module_input_name",
                 "module_output_name", "use_residual"})
    _check_io_names(config, io_name)
    if config.int("in_features", low=1) != size:
        config.fail("in_features", config.get("in_features"), f"{size}, the output size of the previous module")
    out = config.int("out_features", low=1, high=widest)
    bias = config.bool("bias", True)
    activation = config.str("activation_function", default)
    if activation not in DENSE_ACTIVATIONS:
        config.fail("activation_function", shorten(activation), ", ".join(sorted(DENSE_ACTIVATIONS)),
                    "mpool never imports a class on behalf of a model file")
    tensors = safetensors_header.read_folder(folder)
    if tensors is None:
        refuse_missing_weights(folder, "model.safetensors")
    residual = config.bool("use_residual", False)
    shapes = {"linear.weight": (out, size)} | ({"linear.bias": (out,)} if bias else {}) \
        | ({"residual.weight": (out, size)} if residual and out != size else {})
    paths, entries = tensors
    check_names(paths, entries, tuple(shapes))
    return DenseModule(out, DENSE_ACTIVATIONS[activation], residual, shapes, paths, entries)


def check_names(paths: Sequence[str], entries: Mapping[str, TensorEntry], needed: tuple[str, ...],
                optional: tuple[str, ...] = ()) -> None:
    """Raise FormatError unless the files of a module have the tensors that it computes with, and no others."""
    if not set(needed) <= set(entries) <= {*needed, *optional}:
        raise FormatError(file=paths[0], field="tensors", got=", ".join(map(shorten, sorted(entries)[:6])) or "none",
                          allowed=", ".join((*needed, *(f"optionally {name}" for name in optional))))


def _add_dense(folder: Folder, name: str, size: int, settings: ModuleSettings) -> tuple[int, str]:
    """Read a Dense module of sentence vectors and add its tensors to ``settings.dense``.

    Args:
        folder: the module's folder.
        name: prefix of the tensor names in the core.
        size: size of the module's input.
        settings: settings to which the tensors are added.

    Returns:
        The size of the module's output, and its activation.
    """
    module = read_dense(folder, size, "sentence_embedding", "torch.nn.modules.activation.Tanh")
    for tensor, shape in module.shapes.items():
        entry = module.entries[tensor]
        path = module.paths[entry.file]
        check_shape(entry, shape, path)
        safetensors_header.require_weight_dtype(entry, path)
        renamed = f"{name}.{DENSE_TENSORS[tensor]}"
        settings.dense.append((TensorEntry(renamed, entry.dtype, entry.shape, 0, entry.offset, entry.nbytes), path))
    if module.residual:
        settings.kv[f"mpool.{name}.adds_input"] = True
    return module.size, module.activation


def _read_other_sizes(folder: Folder, module: _Module, size: int, activation: str, settings: ModuleSettings) -> None:
    """Read the Dense layers that replace ``module`` for other embedding sizes, as Stella's models have them.

    Args:
        folder: the model folder.
        module: the Dense module.
        size: size of its input.
        activation: its activation.
        settings: settings to which the layers are added.

    Raises:
        LimitError: the folder has more than MAX_OTHER_SIZES such layers.
        FormatError: a layer's size contradicts its folder name, or its activation differs.
    """
    others = other_sizes(module.path, folder.names())
    if len(others) > MAX_OTHER_SIZES:
        raise LimitError(f"{folder.path}: the folder has {len(others)} alternatives to {module.path}, the limit is "
                         f"{MAX_OTHER_SIZES}")
    for number, name in sorted(others.items()):
        other = folder.sub(name, declared_in=folder.path, field=name)
        out, same = _add_dense(other, f"dense.size.{number}", size, settings)
        if f"mpool.dense.size.{number}.adds_input" in settings.kv or "mpool.dense.0.adds_input" in settings.kv:
            raise Unsupported(f"{other.path}: use_residual is true; mpool supports no residual connection in a Dense "
                              "layer with alternatives for other sizes")
        if out != number or same != activation:
            raise FormatError(file=other.path, field="config.json", got=f"{out} outputs and {same}",
                              allowed=f"{number} outputs, as in the folder's name, and {activation}, as in "
                                      f"{module.path}")
        settings.sizes += (number,)
    if settings.sizes:
        settings.kv["mpool.dense_sizes"] = list(settings.sizes)


def _check_io_names(config: Fields, allowed: str = "sentence_embedding") -> None:
    """Raise Unsupported unless a module's input and output have the name ``allowed``."""
    for key in ("module_input_name", "module_output_name"):
        name = config.str(key, allowed)
        if name != allowed:
            raise Unsupported(f"{config.file}: {key} is {shorten(name)}; mpool supports {allowed}")


def refuse_options(config: Fields, keys: tuple[str, ...] = ()) -> None:
    """Raise Unsupported if a Transformer module has options that change what it computes, or sets one of ``keys``."""
    for key in ("processing_kwargs", *keys, "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"):
        if config.get(key):
            raise Unsupported(f"{config.file}: {key} is {describe(config.get(key))}; mpool does not support this key")
    for key in ("model_args", "model_kwargs"):
        section = config.section(key, None)
        for option in section or ():
            if option not in ("torch_dtype", "dtype", "attn_implementation", "use_safetensors", "low_cpu_mem_usage"):
                raise Unsupported(f"{config.file}: {section.name(option)} is set; mpool does not support this option")


def transformer_config(folder: Folder, tasks: Sequence[str], output: str) -> Fields | None:
    """Return the configuration of a Transformer module, in its old or new form; None: it has none.

    Args:
        folder: the module's folder.
        tasks: values that ``transformer_task`` may have, the default first.
        output: value that ``module_output_name`` must have.

    Raises:
        FormatError: a key is unknown or malformed.
        Unsupported: an option selects a computation that mpool does not implement.
    """
    name = next((name for name in TRANSFORMER_CONFIGS if folder.has(name)), None)
    if name is None:
        return None
    config = folder.fields(name)
    config.only(TRANSFORMER_KEYS)
    for key, allowed in (("transformer_task", tasks), ("module_output_name", (output,))):
        if config.str(key, allowed[0]) not in allowed:
            raise Unsupported(f"{config.file}: {key} is {shorten(config.get(key))}; mpool supports "
                              + ", ".join(allowed))
    return config


def _read_transformer(folder: Folder, settings: ModuleSettings) -> None:
    """Read ``sentence_bert_config.json`` into ``settings``; errors as of :func:`transformer_config`."""
    config = transformer_config(folder, ("feature-extraction",), "token_embeddings")
    if config is None:
        return
    settings.max_seq_length = config.int("max_seq_length", None, low=1)
    settings.do_lower_case = config.bool("do_lower_case", False)
    refuse_options(config, ("query_length", "document_length", "query_expansion"))
    modality = config.section("modality_config", None)
    text = modality.section("text") if modality is not None else None
    if text is not None and (text.str("method"), text.str("method_output_name")) != ("forward", "last_hidden_state"):
        raise Unsupported(f"{config.file}: modality_config.text must select the method forward and its output "
                          "last_hidden_state")


def read_model_config(folder: Folder, settings: ModuleSettings) -> None:
    """Read prompts, similarity function and truncation from ``config_sentence_transformers.json`` into ``settings``.

    Raises:
        FormatError: a value is malformed, or the default prompt does not exist.
        Unsupported: the folder is not a SentenceTransformer.
    """
    config = folder.fields(MODEL_CONFIG, missing_ok=True)
    kind = config.str("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise Unsupported(f"{config.file}: model_type is {shorten(kind)}; mpool supports SentenceTransformer")
    settings.prompts = read_prompts(config)
    read_default_prompt(config, settings)
    settings.similarity = config.str("similarity_fn_name", "cosine", choices=SIMILARITIES)
    settings.truncate_dim = config.int("truncate_dim", None, low=1)


def read_prompts(config: Fields) -> dict[str, str]:
    """Return the prompts of ``config_sentence_transformers.json`` by name."""
    prompts = config.section("prompts", None)
    if prompts is None:
        return {}
    if len(prompts.values) > MAX_PROMPTS:
        config.fail("prompts", f"{len(prompts.values)} prompts", f"at most {MAX_PROMPTS}")
    return {name: prompts.str(name, "", limit=MAX_PROMPT_LENGTH) for name in prompts}


def read_default_prompt(config: Fields, settings: ModuleSettings) -> None:
    """Read the name of the default prompt into ``settings``, which have the prompts.

    Raises:
        FormatError: the name is malformed, or no prompt has it.
    """
    settings.default_prompt_name = config.str("default_prompt_name", None)
    if settings.default_prompt_name is not None and settings.default_prompt_name not in settings.prompts:
        # sentence-transformers gives every model an empty "query" and "document" prompt
        if settings.default_prompt_name not in ("query", "document"):
            config.fail("default_prompt_name", describe(settings.default_prompt_name),
                        "one of the prompts: " + (", ".join(map(shorten, settings.prompts)) or "none"))
        settings.prompts[settings.default_prompt_name] = ""


def pooled_modules(folder: Folder, size: int, wanted: str) -> bool:
    """Check the modules of a model with images. Returns True if its embeddings are normalised.

    Args:
        folder: the model folder.
        size: components of the vectors that are pooled.
        wanted: pooling of the model.

    Raises:
        Unsupported: the modules are others than Transformer, a Pooling of this kind, and optionally Normalize.
    """
    modules = [module for module in _list_modules(folder) if module.kind != "Dropout"]
    kinds = [module.kind for module in modules]
    pooling, with_prompt = _read_pooling(modules[1].folder.fields("config.json"), size)
    if not with_prompt and wanted == "mean":
        raise Unsupported(f"{folder.path}: `include_prompt` of the pooling is false; of this model with images, mpool "
                          "supports means over prompt and input only")
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or pooling != (wanted,):
        raise Unsupported(f"{folder.path}: the modules are {', '.join(kinds)} with the pooling {', '.join(pooling)}; "
                          f"of this model with images, mpool supports Transformer, Pooling with the mode {wanted}, and "
                          "optionally Normalize")
    return len(kinds) == 3


def encoder_folder(folder: Folder) -> Folder:
    """Return the folder with the encoder's config.json: the model's own, or that of the first module."""
    if not folder.has(MODULES_NAME):
        return folder
    return _list_modules(folder)[0].folder


def read_modules(folder: Folder, hidden: int, own: str | None = None) -> ModuleSettings:
    """Read the modules around the encoder of an embedding model.

    Args:
        folder: the model folder. Without ``modules.json`` the model uses mean pooling and no normalisation, as in
            sentence-transformers.
        hidden: hidden size of the encoder.
        own: :attr:`mpool.models.families.Config.module` of the model.

    Raises:
        FormatError: a class or key is unknown, a path is outside the folder, two modules use one folder, the modules
            are in another order than Transformer, Pooling, Dense, Normalize, or the sizes of two modules do not match.
        UnsafeFormat: a Dense module has only pickled weights.
        Unsupported: mpool does not support a module or an option.
    """
    if not folder.has(MODULES_NAME):
        if own:
            return _pooled_by_own_module(ModuleSettings(transformer=folder), own, hidden)
        log.info("%s has no %s: mpool uses mean pooling and no normalisation, as sentence-transformers does",
                 folder.path, MODULES_NAME)
        settings = ModuleSettings(transformer=folder)
        size = hidden
        modules: list[_Module] = []
    else:
        modules = _list_modules(folder)
        _check_own_module(folder, modules, own)
        settings = ModuleSettings(transformer=modules[0].folder)
        _read_transformer(modules[0].folder, settings)
        read_model_config(folder, settings)
        if own:
            return _pooled_by_own_module(settings, own, hidden)
        size = hidden
    dense = 0
    for module in modules:
        if module.kind == "Pooling":
            settings.pooling, settings.include_prompt = _read_pooling(module.folder.fields("config.json"), hidden)
            size = hidden * len(settings.pooling)
        elif module.kind == "Dense":
            before, first = size, dense == 0
            size, activation = _add_dense(module.folder, f"dense.{dense}", size, settings)
            settings.kv[f"mpool.dense.{dense}.activation"] = activation
            dense += 1
            if first and [other.kind for other in modules].count("Dense") == 1:
                _read_other_sizes(folder, module, before, activation, settings)
        elif module.kind == "Normalize":
            settings.normalize = True
            if module.folder.real != folder.real:
                config = module.folder.fields("config.json", missing_ok=True)
                _check_io_names(config)
    settings.output_size = size
    if settings.truncate_dim is not None and settings.truncate_dim > size:
        settings.truncate_dim = None
    settings.kv["mpool.pooling"] = list(settings.pooling)
    settings.kv["mpool.normalize"] = settings.normalize
    settings.kv["mpool.dense_count"] = dense
    return settings


def _check_own_module(folder: Folder, modules: list[_Module], own: str | None) -> None:
    """Raise FormatError unless the modules are those of the model's family; ``own`` as for :func:`read_modules`."""
    path = folder.shown(MODULES_NAME)
    if modules[0].own and own is None:
        raise FormatError(file=path, field=modules[0].at, got=OWN_MODULE,
                          allowed="a module of sentence-transformers: " + ", ".join(SUPPORTED),
                          hint="mpool never imports a class on behalf of a model file")
    if own is not None and (len(modules) == 1) != bool(own) or own and not modules[0].own:
        raise FormatError(file=path, field="JSON", got=", ".join(module.kind for module in modules),
                          allowed=f"one module, {OWN_MODULE}" if own else "Transformer, Pooling, optionally Normalize")


def _pooled_by_own_module(settings: ModuleSettings, pooling: str, hidden: int) -> ModuleSettings:
    """Complete the settings of a model whose Transformer module itself pools and normalises."""
    settings.pooling, settings.normalize, settings.output_size = (pooling,), True, hidden
    settings.kv |= {"mpool.pooling": [pooling], "mpool.normalize": True, "mpool.dense_count": 0}
    return settings


def max_tokens(settings: ModuleSettings, tokenizer: Mapping[str, Any], positions: int) -> int:
    """Return the maximum input length, in tokens.

    Args:
        settings: settings of the modules, whose ``max_seq_length`` takes precedence.
        tokenizer: values of ``tokenizer_config.json``, whose ``model_max_length`` applies otherwise.
        positions: number of positions of the encoder, the upper bound.
    """
    limit = settings.max_seq_length
    if limit is None:
        value: Any = tokenizer.get("model_max_length")
        limit = int(value) if type(value) in (int, float) and value >= 1 else positions
    return min(limit, positions)
