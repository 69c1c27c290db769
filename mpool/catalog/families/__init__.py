"""The table of architectures, one file a family."""

from __future__ import annotations

from . import bert, llama
from .rows import Architecture, Config, Tensor, layer

#: Every row, in the order in which they are listed to users.
ROWS: tuple[Architecture, ...] = (*bert.ROWS, *llama.ROWS)

__all__ = ["ROWS", "Architecture", "Config", "Tensor", "layer"]
