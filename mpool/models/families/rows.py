"""Types of the architecture table. The module of each family holds its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..fields import Fields
from ..spec import Value


@dataclass(frozen=True)
class Tensor:
    """A tensor of an architecture.

    In names, ``{}`` stands for the layer number and ``{x}`` for the expert number (of experts with separate tensors);
    ``{2x}`` and ``{2x+1}`` stand for the numbers of an expert's slices, in a tensor with two slices per expert.
    If layers are stored in groups of ``inner`` (a size of the model), ``{g}`` and ``{i}`` stand for the number of the
    group and the layer's number within it.
    ``|`` separates the alternative names that files of different origin use. A name that begins with ``/`` is used
    without the prefix of the family. ``name[i]`` is slice i of the fused tensor ``name``, which is a concatenation of
    slices along its first dimension; if that dimension is the expert, along the second one. Every slice needs a row. A
    slice whose row has no GGUF name is not loaded.

    Attributes:
        hf: name in a transformers folder; empty if folders do not have the tensor.
        gguf: name in GGUF files, which is also the name that the C core uses.
        shape: shape in the letters of :mod:`mpool.models.architectures`, outermost dimension first.
        when: condition under which files contain the tensor; empty: always. A tensor with neither a condition nor a
            name in transformers is in every GGUF file, while folders store it in another layout. The conditions are:

            - ``"tied"``: the output layer. Without it, the token embedding is used.
            - ``"gguf"``: some GGUF files contain it, folders never do.
            - ``"folder"``: folders contain it, GGUF files store it in another layout.
            - ``"types"``: the token type table, which a GGUF file may omit.
            - ``"above 0"``: all layers except the first have it.
            - ``"if x"``: folders contain it if the size ``x`` of the model is not 0; GGUF files may contain it.
            - ``"if x above 0"``, ``"folder if x"``: both conditions apply.
            - ``"in x"``, alone or after another condition: layer i has it if bit i of the size ``x`` is set, such as
              ``sparse`` for layers with experts. ``"in dense"``: the layers that are not ``sparse``.
        stored: name in GGUF files if it differs from ``gguf``.
    """

    hf: str
    gguf: str
    shape: str
    when: str = ""
    stored: str = ""


def layer(hf: str, gguf: str, shape: str, *, bias: str | None = None, when: str = "", biased: str = "",
          stored: str = "") -> tuple[Tensor, ...]:
    """Return the rows of a linear layer or norm that every block has: its weight and, optionally, its bias.

    Args:
        hf: name in transformers without ``.weight``; alternatives and slices are written as in :class:`Tensor`.
        gguf: name in GGUF, without ``blk.{}.`` and ``.weight``.
        shape: shape of the weight.
        bias: shape of the bias; None: no bias.
        when: condition of the weight.
        biased: condition of the bias; empty: that of the weight.
        stored: name in GGUF files if it differs from ``gguf``.
    """
    rows = [Tensor(_each(hf, "weight"), f"blk.{{}}.{gguf}.weight", shape, when, _each(stored, "weight", "blk.{}."))]
    if bias is not None:
        rows.append(Tensor(_each(hf, "bias"), f"blk.{{}}.{gguf}.bias", bias, biased or when,
                           _each(stored, "bias", "blk.{}.")))
    return tuple(rows)


def _each(names: str, kind: str, before: str = "") -> str:
    """Insert ``.weight`` or ``.bias`` into each alternative name, before its ``[i]``."""
    whole = (name.partition("[") for name in names.split("|") if name)
    return "|".join(f"{before}{name}.{kind}{mark}{part}" for name, mark, part in whole)


@dataclass(frozen=True)
class TaskAdapters:
    """The low-rank adapters that a model has for its tasks.

    Attributes:
        names: names of the tasks, which are those of the adapters.
        instructions: prompts by task, of models whose configuration has them.
        by_task: ``query`` and ``document``, the values of the option ``task`` -> task of the model.
        default: task of requests that name none; empty: such requests are computed without an adapter.
        rank, scale: rank and factor of the adapters, if the model's files have tensors with one slice per task; rank 0:
            each adapter is a folder of PEFT, ``adapters/<task>``.
    """

    names: tuple[str, ...]
    instructions: dict[str, str]
    by_task: dict[str, str]
    default: str = ""
    rank: int = 0
    scale: float = 1.0


@dataclass()
class Config:
    """Contents of a config.json.

    Attributes:
        kv: hyper-parameters under GGUF's names.
        tied: True if the output layer shares the weights of the token embedding.
        token_types: rows of the token type table; 0: there is none.
        sizes: further sizes, by letters of tensor shapes and by names in the conditions of tensors.
        exclude_prompt: True if pooling excludes the tokens of the prompt.
        append_eos: True if the end-of-text token is appended to every text, even if the tokenizer does not append it.
        adapters: adapters that the model has for its tasks; None: it has none.
        module: the model may be published with its own Transformer module for sentence-transformers, which mpool
            reimplements (:data:`mpool.models.layout.OWN_MODULE`). None: no; ``""``: it is followed by
            a Pooling module; otherwise, the pooling that it computes itself, followed by a normalisation.
    """

    kv: dict[str, Value]
    tied: bool = False
    token_types: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    exclude_prompt: bool = False
    append_eos: bool = False
    adapters: TaskAdapters | None = None
    module: str | None = None


@dataclass(frozen=True)
class HeadLayer:
    """A linear layer of a classification head.

    Attributes:
        name: name of its tensors in transformers, without ``.weight``.
        activation: activation after the layer; ``"identity"``: none.
        norm: name of the norm after the activation; empty: none.
        epsilon: epsilon of that norm.
    """

    name: str
    activation: str
    norm: str = ""
    epsilon: float = 1e-5


@dataclass(frozen=True)
class Head:
    """The head of a sequence classifier, or of a token classifier.

    Attributes:
        pooling: pooling of the hidden states, ``"cls"`` or ``"mean"``; for a token classifier, empty.
        layers: linear layers in the order of computation.
    """

    pooling: str
    layers: tuple[HeadLayer, ...]


@dataclass(frozen=True)
class Architecture:
    """A row of the architecture table.

    Attributes:
        name: name of the architecture in the C core (``csrc/models/archs.def``); several rows may share it.
        capability: capability of the models.
        classes: names in ``architectures`` of config.json whose weights contain this network.
        prefixes: prefixes that the network's tensor names may have in a transformers folder.
        read: function that reads the config.json of the family.
        tensors: all tensors of the network.
        ignored: patterns of tensors that may be present and are not loaded (heads, buffers).
        epsilon: GGUF key of the epsilon of the norms, without the name of the architecture.
        rope: True for rotary position embeddings, False for a table of positions or ALiBi.
        activation: activation of models whose GGUF file does not name one.
        full_layers: number of leading layers with full attention if config.json does not state
            ``max_window_layers`` (the default of transformers), for families whose sliding window is off by default;
            None for families that always use the sliding window of their configuration.
        model_types: ``model_type`` in config.json; None: the name.
        gguf: ``general.architecture`` in GGUF files, empty if GGUF files are not supported; None: the name.
        complete: function that adds conventional defaults to the hyper-parameters of a GGUF file. Its arguments are
            the keys of the file, the name of the architecture in the file, and the hyper-parameters.
        handled: GGUF keys that ``complete`` reads, without the name of the architecture.
        head: function that reads the head of the family's ForSequenceClassification classes from config.json.
        token_head: function that reads the head of the ForTokenClassification classes of a family with ``head``; None:
            one linear layer named ``classifier``.
        gguf_head: activation in the head of rerankers in GGUF files; None: such rerankers are not supported.
        remote: True if the models are published with Python code of their own. mpool reimplements that code and never
            runs it.
        partial_rope: True if RoPE may rotate only a part of the dimensions of a head.
        marker: name in transformers and name in GGUF of a tensor that only models of this row have, to distinguish
            them from models of another row with the same ``model_type``; empty: none.
        biases: keys of config.json that select the biases of linear layers, of decoders whose class in transformers
            reads such keys.
        defaults: values of keys that a decoder's config.json may omit, where the class in transformers has other
            defaults than Llama's. If they have ``num_experts``, the layers have experts.
        period: if not 0, models with a sliding window whose files do not list the layers have full attention in every
            ``period``-th layer, and the window in the others.
        window_rope: RoPE in models with a sliding window. ``"all"``: all layers have the same. ``"only"``: layers with
            full attention have none. ``"own"``: layers with the window have one without scaling, whose base may differ.
        rope_neox: False if folders store the two components of a rotary pair as neighbours.
        by_layer: GGUF keys, without the name of the architecture, that may have different values for the layers. The
            row's functions read them.
        extra_sizes: function that computes further sizes from the hyper-parameters, the sizes and the architecture's
            name: letters of tensor shapes, and names in the conditions of tensors.
    """

    name: str
    capability: str
    classes: tuple[str, ...]
    prefixes: tuple[str, ...]
    read: Callable[[Fields, Architecture], Config]
    tensors: tuple[Tensor, ...]
    ignored: tuple[str, ...]
    epsilon: str
    rope: bool
    activation: str
    full_layers: int | None = None
    model_types: tuple[str, ...] | None = None
    gguf: tuple[str, ...] | None = None
    complete: Callable[[Fields, str, dict[str, Value]], None] | None = None
    handled: frozenset[str] = frozenset()
    head: Callable[[Fields], Head] | None = None
    token_head: Callable[[Fields], Head] | None = None
    gguf_head: str | None = None
    remote: bool = False
    partial_rope: bool = False
    marker: tuple[str, str] = ("", "")
    biases: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    period: int = 0
    window_rope: Literal["all", "only", "own"] = "all"
    rope_neox: bool = True
    by_layer: frozenset[str] = frozenset()
    extra_sizes: Callable[[dict[str, Any], dict[str, int], str], dict[str, int]] | None = None

    @property
    def in_config(self) -> tuple[str, ...]:
        """Values of ``model_type`` in config.json."""
        return (self.name,) if self.model_types is None else self.model_types

    @property
    def in_gguf(self) -> tuple[str, ...]:
        """Values of ``general.architecture`` in GGUF files."""
        return (self.name,) if self.gguf is None else self.gguf
