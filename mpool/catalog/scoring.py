"""Folders of cross-encoders: sequence classifiers of transformers with one label, which score a pair of texts.

They are encoders with a head: the state of the first token (or the mean of all), linear layers, one number. In the core
that is a pooling with dense layers, so the score is a vector of one component. What the head is made of is in the row
of the family; what is done to its logit is told by the folder, as for sentence-transformers' CrossEncoder
(https://sbert.net/docs/cross_encoder/usage/usage.html), whose default is the logistic function.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import FormatError, Unsupported
from . import safetensors_header, sentence_folder
from .architectures import check_shape, missing
from .families import Architecture, Head
from .fields import Fields
from .files import Folder
from .json_strict import shorten
from .spec import TensorEntry, Value

_ACTIVATIONS = {"torch.nn.modules.linear.Identity": "identity", "torch.nn.modules.activation.Sigmoid": "sigmoid",
                "torch.nn.Identity": "identity", "torch.nn.Sigmoid": "sigmoid"}


def encoder_folder(folder: Folder) -> Folder | None:
    """The folder of the network, if sentence-transformers saved it as a CrossEncoder; else None."""
    if not folder.has(sentence_folder.MODULES_NAME):
        return None
    config = folder.fields(sentence_folder.MODEL_CONFIG, missing_ok=True)
    if config.str("model_type", "SentenceTransformer") != "CrossEncoder":
        return None
    return sentence_folder.single_transformer(folder)


def _activation(folder: Folder, config: Fields) -> str:
    """What is done to the logit."""
    saved = folder.fields(sentence_folder.MODEL_CONFIG, missing_ok=True)
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


def gguf_head(shapes: Mapping[str, tuple[int, ...]], file: str, activation: str, epsilon: float,
              kv: dict[str, Value]) -> dict[str, str]:
    """The head of a reranker in a GGUF file: names there -> names here. Files do not say what is done to the logit: the
    logistic function, as sentence-transformers does for a model that does not say.

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
