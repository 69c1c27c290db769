"""A tokenizer from the source that a model names: a GGUF vocabulary or a ``tokenizer.json``."""

from __future__ import annotations

import os

from ..errors import InvalidArgument
from ..models.spec import TokenizerSource
from .gguf_vocab import GGUFVocab
from .tokenizer import Tokenizer


def open_tokenizer(source: TokenizerSource, vocab: GGUFVocab | None = None) -> Tokenizer:
    """Reads the tokenizer that ``source`` describes.

    Args:
        source: names exactly one of ``json_path`` and ``gguf``. These keys of ``source.config`` are used, all
            optional and spelt as in transformers' files: ``file`` (GGUF: path for error messages), ``bos_token``,
            ``eos_token``, ``unk_token``, ``sep_token``, ``pad_token``, ``cls_token``, ``mask_token`` (texts, or dicts
            with ``content``), ``add_bos_token``, ``add_eos_token``, ``truncation_side``, ``eos_token_id`` (one id or
            several, from generation_config.json), and ``always_add_eos`` (every text ends with ``eos_token``).
        vocab: the vocabulary of the source's GGUF keys, if it was read already.

    Raises:
        FormatError: the file is not well formed.
        LimitError: the file is larger than :mod:`mpool.tokenizers.limits` allows.
        FileError: the file cannot be read.
        InvalidArgument: ``source`` names no tokenizer, or two.
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
