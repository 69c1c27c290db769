"""The text side: tokenizers, chat templates. Names are imported when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpool.text.chat import ChatPrompt as ChatPrompt
    from mpool.text.chat import ChatTemplate as ChatTemplate
    from mpool.text.tokenizer import Packed as Packed
    from mpool.text.tokenizer import Tokenizer as Tokenizer

_HOME = {"Tokenizer": "tokenizer", "Packed": "tokenizer", "ChatTemplate": "chat", "ChatPrompt": "chat"}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
