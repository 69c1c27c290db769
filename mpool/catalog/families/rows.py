"""What a row of the table of architectures says; each family's file holds its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..fields import Fields
from ..spec import Value


@dataclass(frozen=True)
class Tensor:
    """One tensor: its name in transformers (empty if it has none), its name in GGUF, its shape in letters.

    ``{}`` stands for the layer. ``when`` says that a file may do without: ``"tied"``, the output layer that falls back
    on the embedding; ``"gguf"``, a tensor that only GGUF files have; ``"types"``, the table of token types, which a
    GGUF file may leave out.
    """

    hf: str
    gguf: str
    shape: str
    when: str = ""


def layer(hf: str, gguf: str, shape: str, *, bias: str | None = None) -> tuple[Tensor, ...]:
    """Rows of one linear layer or norm in every block: the weight and, if ``bias`` names a size, the bias."""
    rows = [Tensor(f"{hf}.weight", f"blk.{{}}.{gguf}.weight", shape)]
    if bias is not None:
        rows.append(Tensor(f"{hf}.bias", f"blk.{{}}.{gguf}.bias", bias))
    return tuple(rows)


@dataclass
class Config:
    """What a family reads out of config.json: hyper-parameters under GGUF's names (``kv``), whether the output layer is
    the embedding, and rows of the table of token types."""

    kv: dict[str, Value]
    tied: bool = False
    token_types: int = 0


@dataclass(frozen=True)
class Architecture:
    """One row.

    Attributes:
        name: as in GGUF's ``general.architecture``.
        capability: the pool that serves it.
        classes: names in ``architectures`` of config.json whose weights hold this network.
        prefixes: what may stand before the names of the network's tensors in a transformers folder.
        read: reads the family's config.json.
        tensors: every tensor of the network.
        harmless: patterns of tensors that may be present and take no part (heads, buffers).
        epsilon: key of the norm's epsilon, without the architecture.
        rope: whether positions are rotated into queries and keys (else they have a table).
        activation: what a GGUF file means without saying so.
        full_layers: for families whose configuration switches its sliding window off unless it says otherwise: how
            many of the first layers attend to everything when it does not say (transformers' default); None for
            families where a window that is given is in use.
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
