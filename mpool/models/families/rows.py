"""The row type of the architecture table; each family's file holds its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..fields import Fields
from ..spec import Value


@dataclass(frozen=True)
class Tensor:
    """A tensor of an architecture: its name in transformers (empty if it has none), its name in GGUF, its shape in
    letters.

    ``{}`` stands for the layer, ``{x}`` for an expert that has a tensor of its own; ``|`` separates names that files of
    different origin have; one that begins with ``/`` stands without the family's prefix. A name that ends in ``[i]`` is
    part i of a tensor that holds several, one below the other; every part of it needs a row, and a part without a GGUF
    name is left out. ``when`` says that a file may do without: ``"tied"``, the output layer that falls back on the
    embedding; ``"gguf"``, a tensor that only GGUF files have, some of them; ``"folder"``, one that GGUF files have in
    another form; without a name in transformers and ``when`` one that all GGUF files have and folders in another form;
    ``"types"``, the table of token types, which a GGUF file may leave out; ``"above 0"``, which the first layer does
    not have; ``"if x"``, which is there if ``x`` is not 0 among the model's sizes (in a GGUF file: if it is there);
    ``"if x above 0"`` and ``"folder if x"``, both;
    ``"in dense"`` and ``"in sparse"``, behind the others too, which the first layers have, without experts, or those
    behind them; with ``every`` among the sizes, layers 1, 1 + every and so on have experts, the others none.
    ``stored`` is its name in GGUF files where that is another than ``gguf``, the one that the core reads.
    """

    hf: str
    gguf: str
    shape: str
    when: str = ""
    stored: str = ""


def layer(hf: str, gguf: str, shape: str, *, bias: str | None = None, when: str = "", biased: str = "",
          stored: str = "") -> tuple[Tensor, ...]:
    """Rows of one linear layer or norm in every block: the weight and, if ``bias`` names a size, the bias.

    ``hf`` and ``stored`` may be several names, and parts, as in :class:`Tensor`; ``biased`` is ``when`` of the bias.
    """
    rows = [Tensor(_each(hf, "weight"), f"blk.{{}}.{gguf}.weight", shape, when, _each(stored, "weight", "blk.{}."))]
    if bias is not None:
        rows.append(Tensor(_each(hf, "bias"), f"blk.{{}}.{gguf}.bias", bias, biased or when,
                           _each(stored, "bias", "blk.{}.")))
    return tuple(rows)


def _each(names: str, kind: str, before: str = "") -> str:
    """Names with ``.weight`` or ``.bias`` behind them, and their ``[i]`` behind that."""
    whole = (name.partition("[") for name in names.split("|") if name)
    return "|".join(f"{before}{name}.{kind}{mark}{part}" for name, mark, part in whole)


@dataclass
class Config:
    """The result of reading a config.json: hyper-parameters under GGUF's names (``kv``), whether the output layer is
    the embedding, rows of the table of token types, and sizes beside those that every model has: letters of shapes, and
    what the ``when`` of tensors asks for. ``masked``: pooling leaves a prompt's tokens out; ``ended``: every text ends
    with the end of text, whatever its tokenizer does."""

    kv: dict[str, Value]
    tied: bool = False
    token_types: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    masked: bool = False
    ended: bool = False


@dataclass(frozen=True)
class HeadLayer:
    """A linear layer of a classifier's head: the name of its tensors in transformers, what follows it, and the name of
    a norm behind that, or nothing."""

    name: str
    activation: str
    norm: str = ""
    epsilon: float = 1e-5


@dataclass(frozen=True)
class Head:
    """The head of a sequence classifier: how the tokens' states are pooled, and its layers."""

    pooling: str
    layers: tuple[HeadLayer, ...]


@dataclass(frozen=True)
class Architecture:
    """One row.

    Attributes:
        name: as the core calls it (``csrc/models/archs.def``); several rows may be one architecture of the core.
        capability: the pool that serves it.
        classes: names in ``architectures`` of config.json whose weights hold this network.
        prefixes: optional prefixes of the network's tensor names in a transformers folder.
        read: reads the family's config.json.
        tensors: every tensor of the network.
        harmless: patterns of tensors that may be present and take no part (heads, buffers).
        epsilon: key of the norm's epsilon, without the architecture.
        rope: positions are rotated into queries and keys (else they have a table).
        activation: defaults of keys that a GGUF file leaves out.
        full_layers: for families whose configuration switches its sliding window off unless it says otherwise: how
            many of the first layers attend to everything when it does not say (transformers' default); None for
            families where a window that is given is in use.
        model_types: ``model_type`` in config.json; by default the name.
        gguf: ``general.architecture`` in GGUF files, none if there are no such files; by default the name.
        complete: completes the hyper-parameters of a GGUF file with conventional defaults; gets the file's keys, the
            architecture's name there, and the hyper-parameters.
        handled: keys below the architecture's in GGUF files that ``complete`` takes care of.
        head: the head of the family's ForSequenceClassification classes, from its config.json.
        gguf_head: the activation in the head of a GGUF file of a reranker.
        remote: the family is published with its own Python code, which mpool reimplements; the code itself
            is never run.
        partial_rope: a part of a head's components may be rotated alone.
        mark: a tensor, by its name in transformers and in GGUF, that tells its files from those of a row of the same
            name without one.
        more: sizes beside those that every model has, of its hyper-parameters and sizes: letters of shapes, and what
            the ``when`` of tensors asks for.
    """

    name: str
    capability: str
    classes: tuple[str, ...]
    prefixes: tuple[str, ...]
    read: Callable[[Fields, Architecture], Config]
    tensors: tuple[Tensor, ...]
    harmless: tuple[str, ...]
    epsilon: str
    rope: bool
    activation: str
    full_layers: int | None = None
    model_types: tuple[str, ...] | None = None
    gguf: tuple[str, ...] | None = None
    complete: Callable[[Fields, str, dict[str, Value]], None] | None = None
    handled: frozenset[str] = frozenset()
    head: Callable[[Fields], Head] | None = None
    gguf_head: str | None = None
    remote: bool = False
    partial_rope: bool = False
    mark: tuple[str, str] = ("", "")
    more: Callable[[dict[str, Any], dict[str, int], str], dict[str, int]] | None = None

    @property
    def in_config(self) -> tuple[str, ...]:
        """Its names in config.json."""
        return (self.name,) if self.model_types is None else self.model_types

    @property
    def in_gguf(self) -> tuple[str, ...]:
        """Its names in GGUF files."""
        return (self.name,) if self.gguf is None else self.gguf
