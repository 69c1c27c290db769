"""The tokenizer of a model folder as keys of a GGUF file: byte-level BPE, also in Kimi's ``tiktoken.model``, and
SentencePiece's BPE with byte tokens."""

from __future__ import annotations

import os
import re
from typing import Any

from ...errors import FormatError, Unsupported
from ...records import logger
from .. import json_strict
from ..fields import Fields
from ..files import Folder, read_small
from ..formats import byte_pairs, tiktoken_ranks
from ..formats.byte_pairs import check_splitting
from ..layout import RANKS_NAME
from ..spec import ModelDescription
from .exports import CONVERT_ELSEWHERE
from .gguf_layout import value

log = logger("mpool.models")

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_WORDS = _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = "".join(r"[^\r\n\p{L}\p{N}]?" + cased + "|" for cased in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"))
_DIGITS = r"\p{N}"
#: Expressions that split texts, in the order in which they are applied -> name in ``tokenizer.ggml.pre``. None: the
#: expression of GPT-2, which ``tokenizer.json`` does not spell out.
_NAMES: dict[tuple[str | None, ...], str] = {
    (None,): "gpt-2", (_DIGITS, None): "smollm", (_WORDS + r"\p{N}{1,3}" + _REST,): "llama-bpe",
    (_WORDS + _DIGITS + _REST,): "qwen2", (*byte_pairs.DEEPSEEK_V2, _DIGITS): "deepseek-llm",
    byte_pairs.DEEPSEEK_V3: "deepseek-v3",
    (_CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES,): "qwen35",
    (_TEKKEN + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES,): "tekken",
    (_WORDS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES,): "seed-coder"}
#: Name of a pre-tokenizer after which words that are tokens are not merged -> the one after which they are.
_MERGED = {"llama-bpe": "dbrx"}
_MAX_FILE = 256 << 20


def tokenizer_keys(folder: Folder, model: ModelDescription, rows: int) -> dict[str, bytes]:
    """Return the keys of the tokenizer and the chat template.

    Args:
        folder: the model folder.
        model: its description.
        rows: rows of the token embedding; tokens above the vocabulary are unused.

    Raises:
        Unsupported: the tokenizer is of another kind, or splits texts by an expression that llama.cpp has no name for.
        FormatError: the file is malformed.
        LimitError: the tokens of a SentencePiece vocabulary are too long.
    """
    settings = folder.fields("tokenizer_config.json", missing_ok=True, wide_ints=True)
    source = model.tokenizer.json_path if model.tokenizer is not None else None
    if source is not None and os.path.basename(source) == RANKS_NAME:
        table, keys, ids = _of_ranks(source, settings, rows)
    else:
        table, keys, ids = _of_json(folder.path_of("tokenizer.json"), rows)
    config = folder.fields("config.json")
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


class _Tokens:
    """The tokens of a vocabulary: texts and types by id. Ids that no token has are unused."""

    def __init__(self, path: str, rows: int) -> None:
        self.path, self.rows = path, rows
        self.texts = [f"[PAD{i}]" for i in range(rows)]
        self.types = [_UNUSED] * rows

    def put(self, text: str, token: Any, kind: int) -> None:
        """Set the text and the type of a token."""
        if type(token) is not int or not 0 <= token < self.rows:
            raise FormatError(file=self.path, field="id of a token", got=repr(token)[:40],
                              allowed=f"0 to {self.rows - 1}")
        self.texts[token], self.types[token] = text, kind

    def ids(self) -> dict[str, int]:
        """Return the ids by text."""
        found = {text: token for token, text in enumerate(self.texts)}
        if len(found) < self.rows:
            raise FormatError(file=self.path, field="tokens", got="a text twice", allowed="different texts")
        return found

    def keys(self, kind: str, pre: str, **rest: bytes) -> dict[str, bytes]:
        """Return the keys of a tokenizer, without ``tokenizer.ggml.``."""
        return {"model": value(kind), "pre": value(pre), "tokens": value(self.texts), "token_type": value(self.types),
                **rest}


def _of_json(path: str, rows: int) -> tuple[Fields, dict[str, bytes], dict[str, int]]:
    """Read a ``tokenizer.json``. Returns its content, the keys, and the ids by text."""
    table = Fields.of(json_strict.loads(read_small(path, _MAX_FILE), file=path, max_bytes=_MAX_FILE), file=path)
    bpe = table.section("model")
    if bpe.get("type", "BPE") != "BPE":
        raise _unsupported(path, "BPE tokenizers")
    vocabulary = bpe.section("vocab")
    if len(vocabulary.values) > rows:
        bpe.fail("vocab", f"{len(vocabulary.values)} tokens", f"at most {rows}, the rows of the token embedding")
    tokens = _Tokens(path, rows)
    for text, token in vocabulary.values.items():
        tokens.put(text, token, _NORMAL)
    for entry in table.list("added_tokens", []):
        added = Fields.of(entry, file=path, at="added_tokens")
        tokens.put(added.str("content"), added.int("id"), _CONTROL if added.bool("special", False) else _USER_DEFINED)
    ids = tokens.ids()
    merges = [_merge(one, path) for one in bpe.list("merges", limit=1 << 22)]
    if bpe.get("byte_fallback"):
        _mark_sentencepiece(bpe, tokens.texts, tokens.types)
        return table, tokens.keys("llama", "default", **_sentencepiece(table, tokens.texts, tokens.types, merges)), ids
    pre = _pre_tokenizer(table)
    if not bpe.bool("ignore_merges", False):
        pre = _MERGED.get(pre, pre)
    return table, tokens.keys("gpt2", pre, merges=_joined(merges)), ids


def _of_ranks(path: str, settings: Fields, rows: int) -> tuple[Fields, dict[str, bytes], dict[str, int]]:
    """Read a ``tiktoken.model``. Returns as :func:`_of_json`; the content is that of tokenizer_config.json."""
    ranks = tiktoken_ranks.read(path, settings)
    tokens = _Tokens(path, rows)
    for token, text in enumerate(ranks.texts):
        tokens.put(text, token, _NORMAL)
    for token, (text, is_control) in enumerate(ranks.special, len(ranks.texts)):
        tokens.put(text, token, _CONTROL if is_control else _USER_DEFINED)
    ids = tokens.ids()
    return settings, tokens.keys("gpt2", tiktoken_ranks.PRE_TOKENIZER, merges=_joined(ranks.merges())), ids


def _joined(merges: list[tuple[str, str]]) -> bytes:
    """Return merges as the file stores them."""
    return value([" ".join(merge) for merge in merges])


def _unsupported(path: str, kinds: str) -> Unsupported:
    return Unsupported(f"{path}: mpool converts {kinds} only", hint=CONVERT_ELSEWHERE)


def _mark_sentencepiece(bpe: Fields, texts: list[str], types: list[int]) -> None:
    """Set the types of the byte tokens and of the unknown token."""
    unknown = bpe.str("unk_token", "<unk>")
    for token, text in enumerate(texts):
        if text == unknown:
            types[token] = _UNKNOWN
        elif types[token] == _NORMAL and _BYTE_TOKEN.fullmatch(text):
            types[token] = _BYTE
    if types.count(_BYTE) != 256:
        bpe.fail("vocab", f"{types.count(_BYTE)} byte tokens", "256 tokens <0x00> to <0xFF>, because byte_fallback is "
                 "true")


def _sentencepiece(table: Fields, texts: list[str], types: list[int],
                   merges: list[tuple[str, str]]) -> dict[str, bytes]:
    """Return the keys that only SentencePiece vocabularies have.

    SentencePiece joins the neighbours whose joint text has the best score, so every split of a token into two tokens
    must be a merge, and the merges of a token must follow each other. Files that transformers converted from
    SentencePiece models meet both conditions. The order of the merges gives the scores.
    """
    rank: dict[str, int] = {}
    last = ""
    for place, (left, right) in enumerate(merges):
        joint = left + right
        if joint in rank and joint != last:
            raise _unsupported(table.file, "SentencePiece vocabularies whose merges are in the order of the scores")
        rank.setdefault(joint, place)
        last = joint
    normal = {text for token, text in enumerate(texts) if types[token] == _NORMAL}
    check_splitting(normal, table.file, "model.vocab")
    splits = sum(text[:cut] in normal and text[cut:] in normal for text in normal for cut in range(1, len(text)))
    known = sum(left in normal and right in normal and left + right in normal for left, right in set(merges))
    if splits != known or known != len(merges):
        raise _unsupported(table.file, "SentencePiece vocabularies in which every split of a token is a merge")
    scores = [-float(rank[text]) if text in rank else -float(len(merges) + token) if types[token] == _NORMAL else 0.0
              for token, text in enumerate(texts)]
    return {"scores": value(scores), "add_space_prefix": value(_space_prefix(table)), "add_eos_token": value(False)}


def _space_prefix(table: Fields) -> bool:
    """Return True if a text gets a leading space."""
    normal, split = table.section("normalizer", None), table.section("pre_tokenizer", None)
    steps = [] if normal is None else [Fields.of(one, file=table.file, at="normalizer") for one in
                                       normal.list("normalizers", limit=16)] \
        if normal.get("type") == "Sequence" else [normal]
    kinds = [step.get("type") for step in steps]
    escaped = bool(steps) and kinds[-1] == "Replace" and steps[-1].get("content") == "▁" \
        and steps[-1].get("pattern") == {"String": " "}
    if escaped and (split is None or split.get("type") == "Split" and split.get("pattern") == {"String": " "}):
        if kinds == ["Prepend", "Replace"] and steps[0].get("prepend") == "▁":
            return True
        if kinds == ["Replace"]:
            return False
    if not steps and split is not None and split.get("type") == "Metaspace" and split.get("replacement") == "▁" \
            and not split.get("split", True):
        scheme = split.get("prepend_scheme", "always")
        if scheme == "first":
            log.warning("%s puts a space before a text only at its start; readers of GGUF files also put one after "
                        "each special token", table.file)
        if scheme in ("first", "always", "never"):
            return bool(scheme != "never")
    raise _unsupported(table.file, "SentencePiece vocabularies that replace spaces and change no other character")


def _merge(one: Any, path: str) -> tuple[str, str]:
    """Return the two tokens of a merge; files have texts or pairs."""
    pair = one if isinstance(one, list) else one.split(" ") if isinstance(one, str) else ()
    if len(pair) != 2 or not all(isinstance(part, str) and part and " " not in part for part in pair):
        raise FormatError(file=path, field="model.merges", got=repr(one)[:60], allowed="pairs of tokens")
    return pair[0], pair[1]


def _pre_tokenizer(table: Fields) -> str:
    """Return llama.cpp's name of the pre-tokenizer."""
    top = table.section("pre_tokenizer")
    parts = [Fields.of(part, file=table.file, at="pre_tokenizer") for part in top.list("pretokenizers", limit=16)] \
        if top.get("type") == "Sequence" else [top]
    last = parts[-1] if parts else top
    known = last.get("type") == "ByteLevel" and not last.get("add_prefix_space", True)
    splits: list[str | None] = []
    for part in parts[:-1]:
        pattern = part.get("pattern")
        regex = pattern.get("Regex") if isinstance(pattern, dict) else None
        if part.get("type") == "Digits" and part.get("individual_digits"):
            splits.append(_DIGITS)
        elif part.get("type") == "Split" and isinstance(regex, str) and part.get("behavior") == "Isolated" \
                and not part.get("invert"):
            # some files have the characters themselves, or state that a digit occurs once
            splits.append(regex.replace("\r", r"\r").replace("\n", r"\n").replace(r"\p{N}{1}|", r"\p{N}|"))
        else:
            known = False
    if last.get("use_regex", True):
        splits.append(None)
    if not known or tuple(splits) not in _NAMES:
        raise _unsupported(table.file, "the pre-tokenizers of " + ", ".join(_NAMES.values()))
    return _NAMES[tuple(splits)]


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
