"""The tokenizer of a model folder as keys of a GGUF file, for byte-level BPE."""

from __future__ import annotations

from typing import Any

from ...errors import FormatError, Unsupported
from .. import json_strict
from ..fields import Fields
from ..files import Folder
from ..spec import ModelDescription
from .gguf_layout import value

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: Expression that splits texts -> name in ``tokenizer.ggml.pre``. None: the expression of GPT-2.
_NAMES: dict[tuple[bool, str | None], str] = {
    (False, None): "gpt-2", (True, None): "smollm", (False, _WORDS + r"\p{N}{1,3}" + _REST): "llama-bpe",
    (False, _WORDS + r"\p{N}" + _REST): "qwen2"}
_MAX_FILE = 256 << 20


def tokenizer_keys(folder: Folder, model: ModelDescription, rows: int) -> dict[str, bytes]:
    """Return the keys of the tokenizer and the chat template.

    Args:
        folder: the model folder.
        model: its description.
        rows: rows of the token embedding; tokens above the vocabulary are unused.

    Raises:
        Unsupported: the tokenizer is not a byte-level BPE tokenizer, or splits texts by an expression that llama.cpp
            has no name for.
        FormatError: the file is malformed.
    """
    path = folder.path_of("tokenizer.json")
    with open(path, "rb") as file:
        table = Fields.of(json_strict.loads(file.read(_MAX_FILE + 1), file=path, max_bytes=_MAX_FILE), file=path)
    bpe = table.section("model")
    if bpe.get("type", "BPE") != "BPE" or bpe.get("byte_fallback"):
        raise Unsupported(f"{path}: mpool converts byte-level BPE tokenizers only", hint="Convert the folder with "
                          "llama.cpp's convert_hf_to_gguf.py; mpool quantises the .gguf")
    pre = _pre_tokenizer(table)
    vocabulary = bpe.section("vocab")
    if len(vocabulary.values) > rows:
        bpe.fail("vocab", f"{len(vocabulary.values)} tokens", f"at most {rows}, the rows of the token embedding")
    texts: list[str] = [f"[PAD{i}]" for i in range(rows)]
    types = [_UNUSED] * rows

    def put(text: str, token: Any, kind: int) -> None:
        if type(token) is not int or not 0 <= token < rows:
            raise FormatError(file=path, field="id of a token", got=repr(token)[:40], allowed=f"0 to {rows - 1}")
        texts[token], types[token] = text, kind

    for text, token in vocabulary.values.items():
        put(text, token, _NORMAL)
    for entry in table.list("added_tokens", []):
        added = Fields.of(entry, file=path, at="added_tokens")
        put(added.str("content"), added.int("id"), _CONTROL if added.bool("special", False) else _USER_DEFINED)
    if len(set(texts)) < rows:
        raise FormatError(file=path, field="model.vocab", got="a token twice", allowed="different tokens")
    merges = [_merge(one, path) for one in bpe.list("merges", limit=1 << 22)]
    keys = {"model": value("gpt2"), "pre": value(pre), "tokens": value(texts), "token_type": value(types),
            "merges": value(merges)}
    ids = {text: token for token, text in enumerate(texts)}
    config = folder.fields("config.json")
    settings = folder.fields("tokenizer_config.json", missing_ok=True, wide_ints=True)
    for name in ("bos", "eos", "pad", "unk"):
        token = _special(settings, config, name, ids, rows)
        if token is not None:
            keys["unknown_token_id" if name == "unk" else "padding_token_id" if name == "pad" else
                 f"{name}_token_id"] = value(token)
    keys["add_bos_token"] = value(_adds_bos(table, settings, "bos_token_id" in keys))
    found = {f"tokenizer.ggml.{name}": content for name, content in keys.items()}
    if model.chat_template:
        found["tokenizer.chat_template"] = value(model.chat_template)
    return found


def _merge(one: Any, path: str) -> str:
    """Return a merge as text; files have texts or pairs."""
    text = " ".join(one) if isinstance(one, list) and all(isinstance(part, str) for part in one) else one
    if not isinstance(text, str) or text.count(" ") != 1:
        raise FormatError(file=path, field="model.merges", got=repr(one)[:60], allowed="pairs of tokens")
    return text


def _pre_tokenizer(table: Fields) -> str:
    """Return llama.cpp's name of the pre-tokenizer."""
    top = table.section("pre_tokenizer")
    parts = [Fields.of(part, file=table.file, at="pre_tokenizer") for part in top.list("pretokenizers", limit=16)] \
        if top.get("type") == "Sequence" else [top]
    kinds = [part.get("type") for part in parts]
    digits, pattern, known = False, None, bool(kinds) and kinds[-1] == "ByteLevel"
    for part in parts[:-1]:
        if part.get("type") == "Digits" and part.get("individual_digits"):
            digits = True
        elif part.get("type") == "Split" and isinstance(part.get("pattern"), dict) and pattern is None:
            pattern = part.get("pattern").get("Regex")
            known &= part.get("behavior") == "Isolated" and not part.get("invert") and isinstance(pattern, str)
        else:
            known = False
    known = known and (pattern is None) == bool(parts[-1].get("use_regex", True))
    if not known or (digits, pattern) not in _NAMES or parts[-1].get("add_prefix_space", True):
        raise Unsupported(f"{table.file}: mpool converts only the pre-tokenizers of " + ", ".join(_NAMES.values()),
                          hint="Convert the folder with llama.cpp's convert_hf_to_gguf.py; mpool quantises the .gguf")
    return _NAMES[digits, pattern]


def _special(settings: Fields, config: Fields, name: str, ids: dict[str, int], rows: int) -> int | None:
    """Return the id of a special token."""
    text = settings.get(f"{name}_token")
    if isinstance(text, dict):
        text = text.get("content")
    if isinstance(text, str) and text in ids:
        return ids[text]
    token = config.get(f"{name}_token_id")
    if isinstance(token, list) and token:
        token = token[0]
    return token if type(token) is int and 0 <= token < rows else None


def _adds_bos(table: Fields, settings: Fields, known: bool) -> bool:
    """Return True if prompts begin with the beginning-of-text token."""
    if "add_bos_token" in settings:
        return bool(settings.bool("add_bos_token", False)) and known
    post = table.get("post_processor")
    steps = post.get("processors", [post]) if isinstance(post, dict) else []
    for step in steps if isinstance(steps, list) else []:
        single = step.get("single") if isinstance(step, dict) and step.get("type") == "TemplateProcessing" else None
        if isinstance(single, list) and single and isinstance(single[0], dict) and "SpecialToken" in single[0]:
            return known
    return False
