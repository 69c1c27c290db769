"""Tokenizers: text to token ids and back. Submodules are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .opening import open_tokenizer as open_tokenizer
    from .tokenizer import Packed as Packed
    from .tokenizer import Tokenizer as Tokenizer

__all__ = ["Packed", "Tokenizer", "open_tokenizer"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import opening, tokenizer

        return getattr(opening if name == "open_tokenizer" else tokenizer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
