"""Opens the tokenizer of a model: a GGUF vocabulary or a ``tokenizer.json``."""

from __future__ import annotations

import os

from ..errors import InvalidArgument
from ..models.spec import TokenizerSource
from .gguf_vocab import GGUFVocab
from .tokenizer import Tokenizer


def open_tokenizer(source: TokenizerSource, vocab: GGUFVocab | None = None) -> Tokenizer:
    """Open the tokenizer that ``source`` describes.

    Args:
        source: has exactly one of ``json_path`` and ``gguf``. These keys of ``source.config`` are used, all
            optional and spelt as in transformers' files: ``file`` (GGUF: path for error messages), ``bos_token``,
            ``eos_token``, ``unk_token``, ``sep_token``, ``pad_token``, ``cls_token``, ``mask_token`` (strings, or dicts
            with ``content``), ``add_bos_token``, ``add_eos_token``, ``truncation_side``, ``eos_token_id`` (one id or
            several, from generation_config.json), and ``always_add_eos`` (every text ends with ``eos_token``).
        vocab: the vocabulary of ``source.gguf``, if it was already read.

    Raises:
        FormatError: the file is malformed.
        LimitError: the file is larger than :mod:`mpool.tokenizers.limits` allows.
        FileError: the file cannot be read.
        InvalidArgument: ``source`` has none or both of ``json_path`` and ``gguf``.
    """
    if (source.json_path is None) == (source.gguf is None):
        raise InvalidArgument("`source` must have exactly one of json_path and gguf", param="source",
                              got="neither" if source.gguf is None else "both", allowed="one of json_path and gguf")
    if source.gguf is not None:
        from .gguf_tokenizer import GGUFTokenizer

        return GGUFTokenizer(vocab or GGUFVocab(source.gguf, file=source.config.get("file")))
    from .json_tokenizer import JSONTokenizer

    return JSONTokenizer(os.fspath(source.json_path), source.config)  # type: ignore[arg-type]


Tokenizer._open = open_tokenizer
