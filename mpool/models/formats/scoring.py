"""Readers of the heads of sequence classifiers, token classifiers and rerankers.

A sequence classifier is an encoder with a head that pools the first token (or all tokens) and applies linear layers.
The C core computes the head as a pooling with dense layers, so the logits are an embedding whose size is the number of
labels. The layers of the head are in the row of the family. A classifier with one label is a cross-encoder: it scores
pairs of texts. The folder names the activation of its score, as for sentence-transformers' CrossEncoder
(https://sbert.net/docs/cross_encoder/usage/usage.html); the default is the logistic function. The core returns logits,
and Python applies the activation (:mod:`mpool.tasks.rerank`).

A token classifier is an encoder with linear layers on the hidden state of each token, which the C core computes as its
row head.

Other rerankers are language models whose prompt asks if a document answers a query (Qwen3-Reranker, arXiv:2506.05176).
The score is the difference of the logits of two tokens, such as yes and no, after the prompt. The core computes it as
the embedding of a decoder, also of size 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ...errors import FormatError, LimitError, Unsupported
from .. import layout
from ..architectures import check_shape, missing
from ..families.rows import Architecture, Head, HeadLayer
from ..fields import Fields
from ..files import Folder
from ..json_strict import shorten
from ..spec import ClassifierSettings, TensorEntry, Value
from . import safetensors_header, sentence_folder

_ACTIVATIONS = {"torch.nn.modules.linear.Identity": "identity", "torch.nn.modules.activation.Sigmoid": "sigmoid",
                "torch.nn.Identity": "identity", "torch.nn.Sigmoid": "sigmoid"}
#: Maximum number of labels, and of characters of a label's name.
MAX_LABELS, _MAX_LABEL = 1 << 16, 1000
#: Values of ``problem_type`` in config.json.
_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


def module_folders(folder: Folder) -> list[Folder]:
    """Return the module folders of a CrossEncoder that sentence-transformers saved.

    Returns:
        The folder of the network and, for a language model, the folder of the LogitScore module; an empty list if the
        folder is not a CrossEncoder or has no ``modules.json``.
    """
    if not folder.has(layout.MODULES_NAME):
        return []
    config = folder.fields(layout.MODEL_CONFIG, missing_ok=True)
    if config.str("model_type", "SentenceTransformer") != "CrossEncoder":
        return []
    return sentence_folder.cross_encoder_modules(folder)


def score_activation(folder: Folder, config: Fields) -> str:
    """Return the activation of a reranker's score that the folder sets; the default is the logistic function.

    Raises:
        Unsupported: mpool does not support the activation.
    """
    saved = folder.fields(layout.MODEL_CONFIG, missing_ok=True)
    inner = config.section("sentence_transformers", None)
    for table, key in ((saved, "activation_fn"), (inner, "activation_fn"),
                       (config, "sbert_ce_default_activation_function")):
        name = None if table is None else table.str(key, None)
        if table is None or not name:
            continue
        if name not in _ACTIVATIONS:
            raise Unsupported(f"{table.file}: the activation of the score is {shorten(name)}; mpool supports "
                              + ", ".join(sorted(_ACTIVATIONS)))
        return _ACTIVATIONS[name]
    return "sigmoid"


def find_head(row: Architecture, config: Fields, tensors: Mapping[str, TensorEntry], file: str,
              is_cross_encoder: bool) -> tuple[Head, int] | None:
    """Return the head of a sequence classifier.

    Args:
        row: the architecture of the encoder.
        config: its ``config.json``.
        tensors: the stored tensors by name.
        file: path of the weight file, for messages.
        is_cross_encoder: True if sentence-transformers saved the folder as a CrossEncoder.

    Returns:
        The head and its number of labels; None if the folder has an encoder without a head that mpool knows.

    Raises:
        FormatError: the folder is a classifier, and the last layer of its head is missing or no matrix.
        LimitError: the head has more than 65,536 labels.
        Unsupported: the folder is a CrossEncoder with a head that mpool does not support.
    """
    classes = config.list("architectures", [], of=str, limit=16)
    if row.head is None or not any(name.endswith("ForSequenceClassification") for name in classes):
        if is_cross_encoder:
            raise Unsupported(f"{config.file}: the {row.in_config[0]} cross-encoder has an unknown head; mpool "
                              "supports those of the class ForSequenceClassification")
        return None
    found = row.head(config)
    return found, _count_labels(found, tensors, file)


def find_token_head(row: Architecture, config: Fields, tensors: Mapping[str, TensorEntry],
                    file: str) -> tuple[Head, int] | None:
    """Return the head of a token classifier and its number of labels; None if the folder has no such head.

    Args:
        row, config, tensors, file: as for :func:`find_head`.

    Raises:
        FormatError, LimitError: as for :func:`find_head`.
    """
    classes = config.list("architectures", [], of=str, limit=16)
    if row.head is None or not any(name.endswith("ForTokenClassification") for name in classes):
        return None
    found = Head("", (HeadLayer("classifier", "identity"),)) if row.token_head is None else row.token_head(config)
    return found, _count_labels(found, tensors, file)


def _count_labels(head: Head, tensors: Mapping[str, TensorEntry], file: str) -> int:
    """Return the number of rows of the last layer of a head."""
    name = f"{head.layers[-1].name}.weight"
    last = tensors.get(name)
    if last is None:
        raise missing([name], file=file)
    if len(last.shape) != 2 or last.shape[0] < 1:
        raise FormatError(file=file, field=f"shape of {name}", got=list(last.shape), allowed="a row per label")
    if last.shape[0] > MAX_LABELS:
        raise LimitError(f"{file}: {name} has {last.shape[0]:,} rows, one per label; the limit is {MAX_LABELS:,}")
    return last.shape[0]


def read_classifier(config: Fields, labels: int) -> ClassifierSettings:
    """Read the labels of a classifier from config.json, as transformers does.

    Args:
        config: ``config.json``.
        labels: number of labels, which is the number of rows of the last layer.

    Raises:
        FormatError: ``id2label`` does not name each label once, ``num_labels`` or ``label2id`` contradicts the number
            of labels, or ``problem_type`` has an unknown value.
    """
    names = label_names(config, labels)
    problem = config.str("problem_type", None, choices=_PROBLEMS)
    if problem == "regression":
        activation = "none"
    else:
        activation = "sigmoid" if problem == "multi_label_classification" or labels == 1 else "softmax"
    ids = _label_ids(config, names)
    return ClassifierSettings(names, activation,
                              next((at for name, at in ids.items() if name.lower().startswith("entail")), None))


def label_names(config: Fields, labels: int) -> tuple[str, ...]:
    """Return the names in ``id2label``; without it, those of transformers (LABEL_0, LABEL_1, ...).

    Raises:
        FormatError: as for :func:`read_classifier`.
    """
    table = config.section("id2label", None)
    if table is None:
        count = config.int("num_labels", labels)
        if count != labels:
            config.fail("num_labels", count, f"{labels}, the number of rows of the classifier")
        return tuple(f"LABEL_{at}" for at in range(labels))
    if len(table.values) != labels:
        config.fail("id2label", f"{len(table.values):,} labels", f"{labels:,}, the number of rows of the classifier")
    names: list[str] = []
    for at in range(labels):
        name = table.str(str(at), limit=_MAX_LABEL)
        if not name:
            table.fail(str(at), "an empty text", "the name of a label")
        names.append(name)
    if len(set(names)) != labels:
        first = {name: at for at, name in reversed(list(enumerate(names)))}
        twice = next(at for at, name in enumerate(names) if first[name] != at)
        table.fail(str(twice), f"{shorten(names[twice])} again", "a name that no other label has")
    return tuple(names)


def _label_ids(config: Fields, names: tuple[str, ...]) -> dict[str, int]:
    """Return ``label2id``, by which transformers finds the label for entailment; without it, ids by name."""
    table = config.section("label2id", None)
    if table is None:
        return {name: at for at, name in enumerate(names)}
    if len(table.values) > MAX_LABELS:
        config.fail("label2id", f"{len(table.values):,} labels", f"at most {MAX_LABELS:,}")
    return {name: table.int(name, low=0, high=len(names) - 1) for name in table}


def read_head(head: Head, labels: int, tensors: Mapping[str, TensorEntry], paths: tuple[str, ...], hidden: int,
              kv: dict[str, Value]) -> list[TensorEntry]:
    """Read a head as dense layers.

    Args:
        head: the head.
        labels: number of labels.
        tensors: the stored tensors by name.
        paths: paths of the weight files.
        hidden: hidden size of the encoder.
        kv: hyper-parameters, to which those of the head are added.

    Returns:
        The tensors of the dense layers under the core's names.

    Raises:
        FormatError: a tensor is missing or has a wrong shape.
    """
    kv["mpool.pooling"], kv["mpool.normalize"] = [head.pooling], False
    return _read_layers("dense", head, labels, tensors, paths, hidden, kv)


def read_token_head(head: Head, labels: int, tensors: Mapping[str, TensorEntry], paths: tuple[str, ...], hidden: int,
                    kv: dict[str, Value]) -> list[TensorEntry]:
    """Read a head that scores each token: the core's chain ``rows``.

    Arguments, result and errors are those of :func:`read_head`.
    """
    kv |= {"mpool.pooled": False, "mpool.pooling": ["mean"], "mpool.normalize": False, "mpool.dense_count": 0,
           "mpool.rows_normalize": False}
    return _read_layers("rows", head, labels, tensors, paths, hidden, kv)


def _read_layers(chain: str, head: Head, labels: int, tensors: Mapping[str, TensorEntry], paths: tuple[str, ...],
                 hidden: int, kv: dict[str, Value]) -> list[TensorEntry]:
    """Read the layers of a head as the core's chain of dense layers with the given name."""
    kv[f"mpool.{chain}_count"] = len(head.layers)
    found: list[TensorEntry] = []
    for number, layer in enumerate(head.layers):
        out = hidden if number < len(head.layers) - 1 else labels
        wanted = {f"{layer.name}.weight": ("weight", (out, hidden)), f"{layer.name}.bias": ("bias", (out,))}
        if layer.norm:
            wanted |= {f"{layer.norm}.weight": ("norm.weight", (out,)), f"{layer.norm}.bias": ("norm.bias", (out,))}
            kv[f"mpool.{chain}.{number}.norm_epsilon"] = layer.epsilon
        for name, (short, shape) in wanted.items():
            entry = tensors.get(name)
            if entry is None:
                if short in ("weight", "norm.weight"):
                    raise missing([name], file=paths[0])
                continue
            check_shape(entry, shape, paths[entry.file])
            safetensors_header.require_weight_dtype(entry, paths[entry.file])
            found.append(TensorEntry(f"{chain}.{number}.{short}", entry.dtype, entry.shape, entry.file, entry.offset,
                                     entry.nbytes))
        kv[f"mpool.{chain}.{number}.activation"] = layer.activation
    return found


def _row_of(entry: TensorEntry, row: int, name: str) -> TensorEntry:
    """Return one row of a matrix as a matrix of shape (1, columns)."""
    size = entry.nbytes // entry.shape[0]
    return TensorEntry(name, entry.dtype, (1, *entry.shape[1:]), entry.file, entry.offset + row * size, size)


def _set_score_layer(kv: dict[str, Value]) -> None:
    """Set the hyper-parameters of a decoder whose score comes from the last token's hidden state."""
    kv |= {"mpool.pooling": ["lasttoken"], "mpool.normalize": False, "mpool.dense_count": 1}


def read_decoder(modules: list[Folder], config: Fields, tensors: list[TensorEntry],
                 stored: Mapping[str, TensorEntry], kv: dict[str, Value]) -> tuple[list[TensorEntry], bool]:
    """Read a reranker that is a decoder: its score is the logit of one token minus the logit of another.

    Args:
        modules: the folders of its modules Transformer and LogitScore.
        config: the decoder's ``config.json``.
        tensors: the decoder's tensors under the core's names.
        stored: all tensors by their names in the files.
        kv: hyper-parameters, to which those of the score are added.

    Returns:
        The two rows of the output layer, or one if the score is a single logit; and True if the chat template renders a
        pair with the generation prompt (the start of the assistant's message).

    Raises:
        FormatError: a tensor is missing, or a value is malformed.
        Unsupported: an option that mpool does not support.
    """
    tied = config.bool("tie_word_embeddings", "lm_head.weight" not in stored)
    table = stored.get("lm_head.weight")
    if tied:
        table = next(entry for entry in tensors if entry.name == "token_embd.weight")
    if table is None:
        raise missing(["lm_head.weight"], file=config.file)
    names = ("dense.0.weight", "dense.0.minus")
    found = [_row_of(table, token, name) for token, name in zip(read_score_tokens(modules[1], table.shape[0]), names)]
    _set_score_layer(kv)
    return found, _adds_generation_prompt(modules[0])


def read_score_tokens(folder: Folder, vocab: int) -> tuple[int, ...]:
    """Read the folder of a LogitScore module: the token whose logit is the score, and optionally one whose logit is
    subtracted. ``vocab``: size of the vocabulary."""
    config = folder.fields("config.json")
    config.only({"true_token_id", "false_token_id", "module_input_name"})
    input_name = config.str("module_input_name", "causal_logits")
    if input_name != "causal_logits":
        raise Unsupported(f"{config.file}: module_input_name is {shorten(input_name)}; mpool supports causal_logits")
    other = config.int("false_token_id", None, low=0, high=vocab - 1)
    return config.int("true_token_id", low=0, high=vocab - 1), *(() if other is None else (other,))


def _adds_generation_prompt(folder: Folder) -> bool:
    """Read ``sentence_bert_config.json`` of a decoder that is a reranker; return ``add_generation_prompt``, which is
    True if a pair is rendered with the start of the assistant's message."""
    config = folder.fields(layout.TRANSFORMER_CONFIGS[0], missing_ok=True)
    config.only({"transformer_task", "modality_config", "module_output_name", "processing_kwargs", "max_seq_length",
                 "do_lower_case", "unpad_inputs"})
    modality = config.section("modality_config", None)
    message = modality.section("message", None) if modality is not None else None
    if message is not None and message.str("format", "flat") != "flat":
        raise Unsupported(f"{config.file}: modality_config.message.format is {shorten(message.get('format'))}; mpool "
                          "supports flat")
    kwargs = config.section("processing_kwargs", None)
    if kwargs is None:
        return False
    kwargs.only({"chat_template"})
    options = kwargs.section("chat_template", None)
    if options is None:
        return False
    options.only({"add_generation_prompt"})
    return options.bool("add_generation_prompt", False)


def read_prompts(folder: Folder) -> tuple[dict[str, str], str | None]:
    """Return the prompts of a CrossEncoder by name, and the name of the default prompt or None."""
    config = folder.fields(layout.MODEL_CONFIG, missing_ok=True)
    prompts = sentence_folder.read_prompts(config)
    default = config.str("default_prompt_name", None)
    if default is not None and default not in prompts:
        config.fail("default_prompt_name", shorten(default), "one of the prompts")
    return prompts, default


#: Jinja expression for the content of the first message that has the given role.
MESSAGE_OF_ROLE = '(messages | selectattr("role", "eq", "{}") | map(attribute="content") | first)'


def read_gguf_decoder(table: Fields, tensors: Sequence[TensorEntry],
                      kv: dict[str, Value]) -> tuple[list[TensorEntry], str]:
    """Read a GGUF file of a reranker that is a decoder.

    llama.cpp's converter stores the two rows of the output layer as a head with the labels yes and no, and the prompt
    as a template with the placeholders ``{query}`` and ``{document}``.

    Args:
        table: keys of the file.
        tensors: tensors of the file.
        kv: hyper-parameters, to which those of the score are added.

    Returns:
        The two rows, and a chat template that renders messages of the roles ``query`` and ``document``.

    Raises:
        Unsupported: the head or the template has another form.
    """
    head = next((entry for entry in tensors if entry.name == "cls.output.weight"), None)
    text = table.get("tokenizer.chat_template.rerank")
    if head is None or head.shape[:-1] != (2,) or not isinstance(text, str) or not (
            text.count("{query}") == text.count("{document}") == 1 and text.find("{query}") < text.find("{document}")):
        raise Unsupported(f"{table.file}: the reranker has no cls.output.weight with two rows, or no chat template "
                          "rerank with {query} and {document}; mpool supports decoders that score by the tokens yes "
                          "and no",
                          hint="Convert the model with a recent llama.cpp, or use its sentence-transformers folder")
    before, _, rest = text.partition("{query}")
    between, _, after = rest.partition("{document}")
    parts = [json.dumps(before), MESSAGE_OF_ROLE.format("query"), json.dumps(between),
             MESSAGE_OF_ROLE.format("document"), json.dumps(after)]
    _set_score_layer(kv)
    return [_row_of(head, 0, "dense.0.weight"), _row_of(head, 1, "dense.0.minus")], "{{ " + " ~ ".join(parts) + " }}"


def read_gguf_head(shapes: Mapping[str, tuple[int, ...]], file: str, activation: str, epsilon: float,
                   kv: dict[str, Value]) -> dict[str, str]:
    """Read the head of a cross-encoder in a GGUF file.

    GGUF files do not store the activation of the score; mpool uses the logistic function, sentence-transformers'
    default.

    Args:
        shapes: shapes of the stored tensors by name.
        file: path of the file, for messages.
        activation: activation of the first layer.
        epsilon: epsilon of the layer norm after the first layer.
        kv: hyper-parameters, to which those of the head are added.

    Returns:
        Tensor name in the file -> tensor name in the core.

    Raises:
        Unsupported: one of the two layers is missing.
        FormatError: the head has several labels.
    """
    first, last = "cls.weight", "cls.output.weight"
    if first not in shapes or last not in shapes:
        raise Unsupported(f"{file}: the reranker has no tensor {first if last in shapes else last}; mpool supports "
                          "rerankers with a complete head",
                          hint="The converter omitted the pooling layer: use the model's folder")
    if len(shapes[last]) != 2 or shapes[last][0] != 1:
        raise FormatError(file=file, field=f"shape of {last}", got=list(shapes[last]), allowed="one row, for one label")
    kv |= {"mpool.pooling": ["cls"], "mpool.normalize": False, "mpool.dense_count": 2,
           "mpool.dense.0.activation": activation, "mpool.dense.0.norm_epsilon": epsilon}
    names = {"cls": "dense.0", "cls.norm": "dense.0.norm", "cls.output": "dense.1"}
    return {f"{source}.{kind}": f"{target}.{kind}" for source, target in names.items() for kind in ("weight", "bias")}
