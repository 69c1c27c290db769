"""Folders of cross-encoders: sequence classifiers of transformers with one label, which score a pair of texts.

They are encoders with a head: the state of the first token (or the mean of all), linear layers, one number. In the core
that is a pooling with dense layers, so the score is a vector of one component. What the head is made of is in the row
of the family; the folder names the activation of its logit, as for sentence-transformers' CrossEncoder
(https://sbert.net/docs/cross_encoder/usage/usage.html), whose default is the logistic function.

Others are models of text that are asked whether a document answers a query (Qwen3-Reranker, arXiv:2506.05176): the
score is what their logits say of two tokens behind the question. They are decoders that give vectors, of one component.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ...errors import FormatError, Unsupported
from .. import layout
from ..architectures import check_shape, missing
from ..families import Architecture, Head
from ..fields import Fields
from ..files import Folder
from ..json_strict import shorten
from ..spec import TensorEntry, Value
from . import safetensors_header, sentence_folder

_ACTIVATIONS = {"torch.nn.modules.linear.Identity": "identity", "torch.nn.modules.activation.Sigmoid": "sigmoid",
                "torch.nn.Identity": "identity", "torch.nn.Sigmoid": "sigmoid"}


def encoder_folders(folder: Folder) -> list[Folder]:
    """The folder of the network, and of what becomes of its logits if it writes text, if sentence-transformers saved it
    as a CrossEncoder; else none."""
    if not folder.has(layout.MODULES_NAME):
        return []
    config = folder.fields(layout.MODEL_CONFIG, missing_ok=True)
    if config.str("model_type", "SentenceTransformer") != "CrossEncoder":
        return []
    return sentence_folder.of_cross_encoder(folder)


def _activation(folder: Folder, config: Fields) -> str:
    """The activation applied to the logit."""
    saved = folder.fields(layout.MODEL_CONFIG, missing_ok=True)
    inner = config.section("sentence_transformers", None)
    name = saved.str("activation_fn", None) or (inner.str("activation_fn", None) if inner is not None else None) \
        or config.str("sbert_ce_default_activation_function", None)
    if name is None:
        return "sigmoid"
    if name not in _ACTIVATIONS:
        raise Unsupported(f"{saved.file}: the score's activation is {shorten(name)}; mpool computes "
                          + ", ".join(sorted(_ACTIVATIONS)))
    return _ACTIVATIONS[name]


def head_of(row: Architecture, config: Fields, tensors: Mapping[str, TensorEntry], certain: bool) -> Head | None:
    """The head of a classifier with one label; None if the folder holds an encoder alone, or more labels.

    Args:
        certain: the folder says that it is a CrossEncoder.

    Raises:
        Unsupported: it does, but mpool does not know the head.
    """
    classes = config.list("architectures", [], of=str, limit=16)
    found = row.head(config) if row.head is not None and any(
        name.endswith("ForSequenceClassification") for name in classes) else None
    last = tensors.get(f"{found.layers[-1].name}.weight") if found is not None else None
    if found is not None and last is not None and len(last.shape) == 2 and last.shape[0] == 1:
        return found
    if certain:
        raise Unsupported(f"{config.file}: a cross-encoder of {row.in_config[0]} with "
                          f"{'several labels' if last is not None else 'a head that mpool does not know'}; mpool "
                          "computes those with one label")
    return None


def read_head(folder: Folder, config: Fields, head: Head, tensors: Mapping[str, TensorEntry], paths: tuple[str, ...],
              hidden: int, kv: dict[str, Value]) -> list[TensorEntry]:
    """Tensors of a head as dense layers; what goes with them is added to ``kv``.

    Raises:
        FormatError: a tensor is missing or of another shape.
        Unsupported: an activation that mpool does not compute.
    """
    kv["mpool.pooling"], kv["mpool.normalize"] = [head.pooling], False
    kv["mpool.dense_count"] = len(head.layers)
    found: list[TensorEntry] = []
    for number, layer in enumerate(head.layers):
        out = hidden if number < len(head.layers) - 1 else 1
        wanted = {f"{layer.name}.weight": ("weight", (out, hidden)), f"{layer.name}.bias": ("bias", (out,))}
        if layer.norm:
            wanted |= {f"{layer.norm}.weight": ("norm.weight", (out,)), f"{layer.norm}.bias": ("norm.bias", (out,))}
            kv[f"mpool.dense.{number}.norm_epsilon"] = layer.epsilon
        for name, (short, shape) in wanted.items():
            entry = tensors.get(name)
            if entry is None:
                if short in ("weight", "norm.weight"):
                    raise missing([name], file=paths[0])
                continue
            check_shape(entry, shape, paths[entry.file])
            safetensors_header.require_weight_dtype(entry, paths[entry.file])
            found.append(TensorEntry(f"dense.{number}.{short}", entry.dtype, entry.shape, entry.file, entry.offset,
                                     entry.nbytes))
        kv[f"mpool.dense.{number}.activation"] = layer.activation
    kv[f"mpool.dense.{len(head.layers) - 1}.activation"] = _activation(folder, config)
    return found


def _row_of(entry: TensorEntry, row: int, name: str) -> TensorEntry:
    """A row of a matrix, as a matrix of one row."""
    size = entry.nbytes // entry.shape[0]
    return TensorEntry(name, entry.dtype, (1, *entry.shape[1:]), entry.file, entry.offset + row * size, size)


def _answer(kv: dict[str, Value], activation: str) -> None:
    """The score of a decoder, computed from the logits of two tokens after the last position."""
    kv |= {"mpool.pooling": ["lasttoken"], "mpool.normalize": False, "mpool.dense_count": 1,
           "mpool.dense.0.activation": activation}


def read_logits(folder: Folder, inside: list[Folder], config: Fields, tensors: list[TensorEntry],
                files: Mapping[str, TensorEntry], kv: dict[str, Value]) -> tuple[list[TensorEntry], bool]:
    """Reads a reranker that is a decoder: its score is the logit of one token minus that of another. Returns those rows
    of the output layer; True if a pair ends with the start of an answer.

    Args:
        folder, inside: the model's, and those of its two modules.
        tensors: of the network, by their names in the core; ``files``: all, by those in the files.

    Raises:
        FormatError: a file does not fit the others.
        Unsupported: an option that mpool does not compute.
    """
    told = inside[1].fields("config.json")
    told.only({"true_token_id", "false_token_id", "module_input_name"})
    if told.str("module_input_name", "causal_logits") != "causal_logits":
        raise Unsupported(f"{told.file}: module_input_name is {shorten(told.get('module_input_name'))}; mpool computes "
                          "causal_logits")
    tied = config.bool("tie_word_embeddings", "lm_head.weight" not in files)
    table = files.get("lm_head.weight")
    if tied:
        table = next(entry for entry in tensors if entry.name == "token_embd.weight")
    if table is None:
        raise missing(["lm_head.weight"], file=config.file)
    rows = table.shape[0]
    found = [_row_of(table, told.int("true_token_id", low=0, high=rows - 1), "dense.0.weight")]
    other = told.int("false_token_id", None, low=0, high=rows - 1)
    if other is not None:
        found.append(_row_of(table, other, "dense.0.minus"))
    _answer(kv, _activation(folder, config))
    return found, _answering(inside[0])


def _answering(folder: Folder) -> bool:
    """Reads ``sentence_bert_config.json`` of a decoder used as a reranker. True: a pair ends with the start of an
    answer."""
    config = folder.fields(layout.TRANSFORMER_CONFIGS[0], missing_ok=True)
    config.only({"transformer_task", "modality_config", "module_output_name", "processing_kwargs", "max_seq_length",
                 "do_lower_case", "unpad_inputs"})
    modality = config.section("modality_config", None)
    message = modality.section("message", None) if modality is not None else None
    if message is not None and message.str("format", "flat") != "flat":
        raise Unsupported(f"{config.file}: modality_config.message.format is {shorten(message.get('format'))}; mpool "
                          "renders pairs as flat messages")
    kwargs = config.section("processing_kwargs", None)
    if kwargs is None:
        return False
    kwargs.only({"chat_template"})
    options = kwargs.section("chat_template", None)
    if options is None:
        return False
    options.only({"add_generation_prompt"})
    return options.bool("add_generation_prompt", False)


def prompts_of(folder: Folder) -> tuple[dict[str, str], str | None]:
    """The prompts of a CrossEncoder, and the name of that which counts unless another is asked for."""
    config = folder.fields(layout.MODEL_CONFIG, missing_ok=True)
    section = config.section("prompts", None)
    prompts = {} if section is None else {
        name: section.str(name, "", limit=sentence_folder.MAX_PROMPT_LENGTH) for name in section}
    default = config.str("default_prompt_name", None)
    if default is not None and default not in prompts:
        config.fail("default_prompt_name", shorten(default), "one of the prompts")
    return prompts, default


#: A message of a role, as a template finds it.
_OF_ROLE = '(messages | selectattr("role", "eq", "{}") | map(attribute="content") | first)'


def gguf_logits(table: Fields, tensors: Sequence[TensorEntry], kv: dict[str, Value]) -> tuple[list[TensorEntry], str]:
    """The same in a GGUF file: its converter writes both rows as a head, of the labels yes and no, and how a pair is
    written in place of ``{query}`` and ``{document}``. The rows, and a chat template that does that.

    Raises:
        Unsupported: the file is of another reranker.
    """
    head = next((entry for entry in tensors if entry.name == "cls.output.weight"), None)
    text = table.get("tokenizer.chat_template.rerank")
    if head is None or head.shape[:-1] != (2,) or not isinstance(text, str) or not (
            text.count("{query}") == text.count("{document}") == 1 and text.find("{query}") < text.find("{document}")):
        raise Unsupported(f"{table.file}: a reranker without cls.output.weight of two rows or a template rerank of "
                          "{query} and {document}; mpool computes decoders that answer yes or no",
                          hint="Convert it with a recent llama.cpp, or use a folder of sentence-transformers")
    before, _, rest = text.partition("{query}")
    between, _, behind = rest.partition("{document}")
    parts = [json.dumps(before), _OF_ROLE.format("query"), json.dumps(between), _OF_ROLE.format("document"),
             json.dumps(behind)]
    _answer(kv, "sigmoid")
    return [_row_of(head, 0, "dense.0.weight"), _row_of(head, 1, "dense.0.minus")], "{{ " + " ~ ".join(parts) + " }}"


def gguf_head(shapes: Mapping[str, tuple[int, ...]], file: str, activation: str, epsilon: float,
              kv: dict[str, Value]) -> dict[str, str]:
    """The head of a reranker in a GGUF file: names there -> names here. Files do not name the logit's activation; mpool
    uses the logistic function, sentence-transformers' default.

    Raises:
        Unsupported: the first of its two layers is not in the file, or there are several labels.
    """
    first, last = "cls.weight", "cls.output.weight"
    if first not in shapes or last not in shapes:
        raise Unsupported(f"{file}: a reranker without {first if last in shapes else last}; mpool computes those whose "
                          "head is complete", hint="The converter left the pooling layer out: use the model's folder")
    if len(shapes[last]) != 2 or shapes[last][0] != 1:
        raise FormatError(file=file, field=f"shape of {last}", got=list(shapes[last]), allowed="one label")
    kv |= {"mpool.pooling": ["cls"], "mpool.normalize": False, "mpool.dense_count": 2,
           "mpool.dense.0.activation": activation, "mpool.dense.1.activation": "sigmoid",
           "mpool.dense.0.norm_epsilon": epsilon}
    names = {"cls": "dense.0", "cls.norm": "dense.0.norm", "cls.output": "dense.1"}
    return {f"{there}.{kind}": f"{here}.{kind}" for there, here in names.items() for kind in ("weight", "bias")}
