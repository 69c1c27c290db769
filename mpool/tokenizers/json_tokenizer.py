"""Tokenizers read from ``tokenizer.json``, the file format of HF tokenizers, and from the files that replace it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer
from tokenizers.decoders import WordPiece

from ..errors import FileError, FormatError, LimitError
from ..models.files import open_regular
from ..models.formats.byte_pairs import BYTE_TEXTS, byte_alphabet
from ..models.json_strict import shorten
from ..models.layout import RANKS_NAME
from ..models.spec import TokenTable
from ..models.tokenizer_classes import byte_level_settings, normalizer_settings
from . import growth, limits, older_files, tiktoken_file
from .native import Native, Spans, call
from .specials import CALL_MARKS, END_OF_TURN, HIDDEN, SHOWN, compile_trie
from .tokenizer import CONFIG_TOKENS, Tokenizer, check_ids

if TYPE_CHECKING:
    import tokenizers

#: Bounds of tokenizers from older files. Their normalizers are NFC with lower case, or BERT's; their pre-tokenizers may
#: convert text to bytes.
OLDER = growth.Growth(normalizer=6, pre_tokenizer=5, ascii_pre_tokenizer=2)

#: Steps of a pre-tokenizer other than those that only split a text, or mark its spaces.
_OTHER_STEPS = re.compile(r'"type":\s*"(?!Sequence|Split|ByteLevel|Digits|Isolated|Metaspace)\w+"')
#: Nesting limit of the JSON parser of HF tokenizers (serde_json).
_MAX_JSON_DEPTH = 127
#: Bytes of JSON text whose depth is computed at once.
_SLICE = 1 << 18
#: Strings. The groups hold the quote of one that has no end, and the backslash at the end of its text.
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|(")[^"\\]*(?:\\.[^"\\]*)*(\\?)\Z', re.DOTALL)

#: Tokenizer classes whose inputs include token types by default, without the suffix "Fast". In transformers 5 these are
#: BERT's tokenizer and its other names.
_BERT_CLASSES = frozenset(f"{name}Tokenizer" for name in (
    "Bert", "ConvBert", "DPRContextEncoder", "DPRQuestionEncoder", "DPRReader", "Deberta", "DebertaV2", "Electra",
    "Funnel", "LayoutLM", "Lxmert", "MobileBert", "RetriBert", "SqueezeBert"))


def _shrinks(hf: Any) -> int:
    """Return how many characters of a text may become one: 1, or 4 with composition (NFC). Return 0 if it is not
    certain that each byte of a text, except white space, is part of a token: that is so for BPE with all bytes in its
    vocabulary, and no step that may remove text."""
    normalizer = type(hf.normalizer).__name__
    steps = "" if hf.pre_tokenizer is None else hf.pre_tokenizer.__getstate__().decode()
    if type(hf.model).__name__ != "BPE" or '"Removed"' in steps or _OTHER_STEPS.search(steps):
        return 0
    if '"ByteLevel"' in steps:
        texts, known = tuple(byte_alphabet().values()), normalizer in ("NoneType", "NFC")
    else:  # models like SentencePiece's, in which a character that is no token becomes the tokens of its bytes
        texts, known = BYTE_TEXTS, hf.model.byte_fallback and _only_marks_spaces(hf.normalizer)
    if not known or any(hf.token_to_id(text) is None for text in texts):
        return 0
    return 4 if normalizer == "NFC" else 1


def _only_marks_spaces(normalizer: Any) -> bool:
    """Return True if a normaliser changes only spaces, or puts text in front."""
    if normalizer is None:
        return True
    state: dict[str, Any] = json.loads(normalizer.__getstate__())
    parts = state["normalizers"] if state["type"] == "Sequence" else [state]
    return all(part["type"] == "Prepend" or part["type"] == "Replace" and part["pattern"] == {"String": " "}
               for part in parts)


class JSONTokenizer(Tokenizer):
    """A tokenizer read from a ``tokenizer.json`` or a file that replaces it. Truncation, padding and dropout stated in
    the file are disabled."""

    def __init__(self, path: str, config: Mapping[str, Any]) -> None:
        self._path = path
        self._native = _load_other(path, config) or load(path, config)
        self._hf = self._native.hf
        added = self._hf.get_added_tokens_decoder()
        vocab = self._hf.get_vocab(with_added_tokens=True)
        if _check_model(path, self._hf.model, vocab):
            self._native = self._native.with_slow_model()
        self.vocab_size = max(max(vocab.values(), default=-1), max(added, default=-1)) + 1
        if self.vocab_size == 0:
            raise FormatError(file=path, field="model.vocab", got="nothing", allowed="at least one token")
        if self.vocab_size > limits.max_vocab_tokens:
            raise LimitError(f"{path}: the highest token id is {self.vocab_size - 1:,}, the limit is "
                             f"{limits.max_vocab_tokens:,} tokens",
                             hint="Raise mpool.tokenizers.limits.max_vocab_tokens")
        self._added = added
        self._control = {token for token, entry in added.items() if entry.special}
        self.control_texts = tuple(added[token].content for token in sorted(self._control))
        self._find_control = compile_trie(self.control_texts) if self._control else None
        # HF finds these control tokens in normalised text, so the original text need not contain their exact texts
        self._normalized_control = any(added[token].normalized for token in self._control)
        self._plain: Native | None = None
        self._marked: dict[str, Native] = {}
        self._table: TokenTable | None = None
        self._pair: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None = None
        self._pair_types: bool | None = _lists_token_types(config)
        self._truncate_left = config.get("truncation_side") == "left"
        self._words_independent = (type(self._hf.model).__name__ == "WordPiece" and
                                   type(self._hf.pre_tokenizer).__name__ == "BertPreTokenizer" and
                                   all(entry.special and not entry.lstrip and not entry.rstrip
                                       and " " not in entry.content for entry in added.values()))
        self._read_config(config, vocab)

    def _shrinks(self) -> int:
        return _shrinks(self._hf)

    def _read_config(self, config: Mapping[str, Any], vocab: Mapping[str, int]) -> None:
        special: dict[str, int] = {}
        for name in CONFIG_TOKENS:
            text = config.get(f"{name}_token")
            if isinstance(text, Mapping):
                text = text.get("content")
            if isinstance(text, str) and text in vocab:
                special[name] = vocab[text]
        unk = getattr(self._hf.model, "unk_token", None) or "<unk>"
        if "unk" not in special and unk in vocab:
            special["unk"] = vocab[unk]
        self.special = special
        self.prefix_ids, self.suffix_ids = self._read_template()
        if not self.prefix_ids and not self.suffix_ids:
            # As in transformers 5, a post-processor that adds tokens decides alone. Without one, the keys apply as in
            # transformers 4: version 5 ignores them beside a tokenizer.json.
            self.prefix_ids = (special["bos"],) if config.get("add_bos_token") and "bos" in special else ()
            self.suffix_ids = (special["eos"],) if config.get("add_eos_token") and "eos" in special else ()
        if config.get("always_add_eos") and "eos" in special and special["eos"] not in self.suffix_ids:
            self.suffix_ids += (special["eos"],)
        given = config.get("eos_token_id")
        eog = set(given if isinstance(given, (list, tuple)) else () if given is None else (given,))
        for token in eog:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise FormatError(file=self._path, field="eos_token_id", got=token,
                                  allowed=f"0 to {self.vocab_size - 1}")
        if not eog:
            eog = {vocab[text] for text in END_OF_TURN if vocab.get(text) in self._control}
        if "eos" in special:
            eog.add(special["eos"])
        self.eog_ids = tuple(sorted(eog))

    def _read_template(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the file's post-processor puts before and after one text."""
        around = self._hf.num_special_tokens_to_add(False)
        if around == 0:
            return (), ()
        for probe in ("a", "1", "."):
            body, full = (list(self._native.encode([probe], special)[0]) for special in (False, True))
            for start in range(around + 1):
                if body and full[start:start + len(body)] == body and len(full) == len(body) + around:
                    return tuple(full[:start]), tuple(full[start + len(body):])
        raise FormatError(file=self._path, field="post_processor", got="a processor with other effects",
                          allowed="a processor that only adds tokens before and after a text")

    @property
    def kind(self) -> str:
        return type(self._hf.model).__name__.lower()

    @property
    def pair_ids(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        if self._pair is None:
            self._pair = self._read_pair()
        return self._pair

    @property
    def pair_types(self) -> bool:
        if self._pair_types is None:
            self._pair_types = self._read_pair_types()
        return self._pair_types

    def _read_pair_types(self) -> bool:
        """Return True if the file's post-processor gives type 1 to the second text of a pair and all later tokens."""
        before, between, _ = self.pair_ids
        body = len(self._native.encode(["a"])[0])
        first = len(before) + body + len(between)
        types = self._native.encode_pair("a", "a").type_ids
        if not any(types):
            return False
        if types != [0] * first + [1] * (len(types) - first):
            raise FormatError(file=self._path, field="post_processor", got=f"token types {types[:40]} for a pair",
                              allowed="0 for the first text, 1 for the second text and what follows it")
        return True

    def _read_pair(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the ids that the file's post-processor puts before, between and after two texts."""
        around = self._hf.num_special_tokens_to_add(True)
        for probe in ("a", "1", "."):
            body = list(self._native.encode([probe])[0])
            full = self._native.encode_pair(probe, probe).ids
            n = len(body)
            if not body or len(full) != 2 * n + around:
                continue
            for start in range(around + 1):
                for gap in range(around - start + 1):
                    if full[start:start + n] == body and full[start + n + gap:start + 2 * n + gap] == body:
                        return (tuple(full[:start]), tuple(full[start + n:start + n + gap]),
                                tuple(full[start + 2 * n + gap:]))
        raise FormatError(file=self._path, field="post_processor", got="a processor with other effects on pairs",
                          allowed="a processor that only adds tokens before, between and after two texts")

    def _encode_plain(self, texts: Sequence[str]) -> list[Sequence[int]]:
        find = self._find_control
        if find is None:
            return self._native.encode(texts)
        marked = [at for at, text in enumerate(texts) if find.search(text)]
        if not marked:
            bodies = self._native.encode(texts)
            if self._normalized_control:
                marked = [at for at, body in enumerate(bodies) if not self._control.isdisjoint(body)]
                for at in marked:
                    bodies[at] = self._without_control(texts[at])
            return bodies
        if len(marked) == len(texts):
            return [self._without_control(text) for text in texts]
        bodies = self._native.encode(["" if find.search(text) else text for text in texts])
        for at in marked:
            bodies[at] = self._without_control(texts[at])
        return bodies

    def _without_control(self, text: str) -> Sequence[int]:
        """Encode a text that contains texts of control tokens, as plain text."""
        if self._plain is None:
            self._plain = self._native.variant(lambda copy: setattr(copy, "encode_special_tokens", True))
        ids = self._plain.encode([text])[0]
        if self._has_no_control(ids) or self._find_control is None:
            return ids
        # The model itself produces control tokens (a unigram model that lists "</s>"): split the text inside them.
        parts, start = [], 0
        for match in self._find_control.finditer(text):
            parts.append(text[start:match.start() + 1])
            start = match.start() + 1
        parts.append(text[start:])
        ids = [token for body in self._plain.encode(parts) for token in body]
        return ids if self._has_no_control(ids) else [token for token in ids if self._has_no_control((token,))]

    def _has_no_control(self, ids: Sequence[int]) -> bool:
        return self._control.isdisjoint(token for token in ids if token != self.special.get("unk"))

    def _encode_spans(self, texts: Sequence[str], parse_special: bool) -> list[Spans]:
        find = self._find_control
        if parse_special or find is None:
            return self._native.spans(texts)
        marked = [find.search(text) is not None for text in texts]
        found = self._native.spans(["" if has else text for has, text in zip(marked, texts)])
        return [self._plain_spans(text) if has or (self._normalized_control and not self._has_no_control(one.ids))
                else one for has, text, one in zip(marked, texts, found)]

    def _plain_spans(self, text: str) -> Spans:
        """Encode a text that contains texts of control tokens, as plain text, as :meth:`_without_control` does."""
        ids = self._without_control(text)
        assert self._plain is not None
        whole = self._plain.spans([text])[0]
        if list(whole.ids) == list(ids):
            return whole
        starts = [0, *(match.start() + 1 for match in self._find_control.finditer(text))] if self._find_control else [0]
        parts = [text[first:end] for first, end in zip(starts, [*starts[1:], len(text)])]
        pairs = [(token, (first + start, end + start)) for start, one in zip(starts, self._plain.spans(parts))
                 for token, (first, end) in zip(*one) if self._has_no_control((token,))]
        return Spans([token for token, _ in pairs], [place for _, place in pairs])

    def join_tokens(self, tokens: Sequence[str]) -> str:
        decoder = self._hf.decoder
        if decoder is None and self.marks_subwords:  # BERT's classes in transformers add it

            decoder = WordPiece(prefix=self._hf.model.continuing_subword_prefix)
        return " ".join(tokens) if decoder is None else call(decoder.decode, list(tokens))

    @property
    def marks_subwords(self) -> bool:
        return bool(getattr(self._hf.model, "continuing_subword_prefix", None))

    def _encode_parsed(self, text: str, mark: str | None) -> list[int]:
        if mark is None:
            return list(self._native.encode([text])[0])
        marked = self._marked.get(mark)
        if marked is None:
            token = AddedToken(mark, normalized=False, special=True)
            marked = self._marked[mark] = self._native.variant(lambda copy: copy.add_special_tokens([token]))
        drop = marked.hf.token_to_id(mark)
        return [token for token in marked.encode([text])[0] if token != drop]

    def median_length(self) -> int:
        return max(1, int(np.median([len(token) for token in self._hf.get_vocab(with_added_tokens=True)])))

    def token_table(self) -> TokenTable:
        if self._table is None:
            self._table = self._make_table()
        return self._table

    def _drop_tokens_from(self, rows: int) -> bool:
        beyond = {token for token in self._hf.get_vocab(with_added_tokens=True).values() if token >= rows}
        needed = {*self.eog_ids, *(token for name, token in self.special.items() if name != "pad")}
        if rows < 1 or not beyond <= self._control - needed:
            return False
        self.vocab_size, self._table = rows, None
        return True

    def _make_table(self) -> TokenTable:
        texts = [self._hf.id_to_token(token) or "" for token in range(self.vocab_size)]
        parts = _token_bytes(texts, json.loads(self._hf.decoder.__getstate__()) if self._hf.decoder is not None else {})
        hidden = bytearray(self.vocab_size)
        shown = self._shown()
        for token, entry in self._added.items():
            if token >= self.vocab_size:
                continue
            hidden[token] = entry.special and entry.content not in shown or entry.content in HIDDEN
            parts[token] = b"" if hidden[token] else entry.content.encode()
        offsets = np.zeros(len(parts) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, parts), dtype=np.int64, count=len(parts)), out=offsets[1:])
        return TokenTable(data=b"".join(parts), offsets=offsets, control=bytes(hidden), eog=self.eog_ids)

    def _shown(self) -> tuple[str, ...]:
        """Return the texts of control tokens that are part of a completion's text: markers of tool calls and
        reasoning, and of Harmony if the model has them. The same rule applies to GGUF files."""
        ids = [self._hf.token_to_id(text) for text in SHOWN]
        ends = self._hf.token_to_id("<|end|>")
        marks = tuple(text for text in CALL_MARKS if self._hf.token_to_id(text) not in self.eog_ids)
        if None in ids[:3]:
            return marks
        return (*marks, *SHOWN) if ends in self.eog_ids else (*marks, *SHOWN, "<|end|>")

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        return self._native.decode(check_ids(ids, self.vocab_size), skip_special)

    def token_text(self, token: int) -> str:
        check_ids((token,), self.vocab_size)
        return self._hf.id_to_token(token) or ""

    def token_id(self, text: str) -> int | None:
        return self._hf.token_to_id(text)


def _lists_token_types(config: Mapping[str, Any]) -> bool | None:
    """Return True if transformers passes token types to the model; None: the file's post-processor decides.

    ``model_input_names`` in tokenizer_config.json decides, else the tokenizer's class. BERT's classes replace the
    file's post-processor by their own, which gives type 1 to the second text.
    """
    name = config.get("tokenizer_class")
    name = name.removesuffix("Fast") if isinstance(name, str) else "BertTokenizer"
    listed = config.get("model_input_names")
    if isinstance(listed, (list, tuple)):
        if "token_type_ids" not in listed:
            return False
        return True if name in _BERT_CLASSES else None
    return name in _BERT_CLASSES


def _load_other(path: str, config: Mapping[str, Any]) -> Native | None:
    """Return the tokenizer of a file that replaces ``tokenizer.json``; None: the file is none of these."""
    name = os.path.basename(path)
    if name == older_files.WORDPIECE:
        return wrap_older(older_files.wordpiece(path, config))
    if name == older_files.CLIP:
        return wrap_older(older_files.clip(os.path.dirname(path), config.get("pad_token") or older_files.END))
    if name != RANKS_NAME:
        return None

    return Native(tiktoken_file.build(path), tiktoken_file.GROWTH)


def wrap_older(hf: tokenizers.Tokenizer) -> Native:
    """Return a tokenizer that :mod:`mpool.tokenizers.older_files` made, with its bounds."""
    return Native(_for_inference(hf), OLDER)


def _for_inference(hf: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Disable truncation, padding, and the dropout of merges, which makes the tokens of a text random."""
    hf.no_truncation()
    hf.no_padding()
    if getattr(hf.model, "dropout", None) is not None:
        hf.model.dropout = None  # type: ignore[union-attr]
    return hf


def load(path: str, config: Mapping[str, Any] | None = None) -> Native:
    """Read a ``tokenizer.json``. Truncation, padding and dropout stated in the file are disabled.

    Args:
        path: path of the file.
        config: content of ``tokenizer_config.json``, whose settings replace those of the file; None: no settings.

    Raises:
        FormatError: the file is malformed.
        LimitError: the file is too large, or a step makes texts longer than the limits allow.
        FileError: the file cannot be read.
    """
    fd, size = open_regular(path)
    try:
        with os.fdopen(fd, "rb") as stream:
            if size > limits.max_tokenizer_json_bytes:
                raise LimitError(f"{path}: {size:,} bytes, the limit is {limits.max_tokenizer_json_bytes:,}",
                                 hint="Raise mpool.tokenizers.limits.max_tokenizer_json_bytes")
            data = stream.read(limits.max_tokenizer_json_bytes + 1)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror or error}") from error
    try:
        examined = growth.examine(data, path)
        hf = call(HFTokenizer.from_buffer, data)
        _check_stated(path, hf, examined)
        _apply_config(hf, config or {})
        return Native(_for_inference(hf), examined.growth)
    except (FormatError, LimitError, MemoryError):
        raise
    except Exception as error:  # a JSON parser's, or that of `call`, whose cause is the error of HF tokenizers
        reason = " ".join(str(error.__cause__ or error).split())[:200]  # it may contain a whole value of the file
    if _is_deep(data):
        raise LimitError(f"{path}: nested deeper than {_MAX_JSON_DEPTH} levels",
                         hint="The file is damaged: download it again")
    raise FormatError(file=path, field="tokenizer.json", got=f"malformed ({reason})",
                      allowed="a tokenizer of HF tokenizers",
                      hint="The file is damaged, or needs a newer version of tokenizers")


def _apply_config(hf: Any, config: Mapping[str, Any]) -> None:
    """Change the steps that the tokenizer's class in transformers changes. The bounds of the steps stay the same."""
    steps = hf.normalizer, hf.pre_tokenizer, hf.post_processor
    normalizer, pre_tokenizer, post_processor = steps
    names = [type(step).__name__ for step in steps]
    if names[0] == "BertNormalizer":
        for name, value in normalizer_settings(config).items():
            setattr(normalizer, name, value)
    settings = byte_level_settings(config)
    if names[1] == "ByteLevel" and "add_prefix_space" in settings:
        pre_tokenizer.add_prefix_space = settings["add_prefix_space"]
    if names[2] in ("ByteLevel", "RobertaProcessing") and "trim_offsets" in settings:
        post_processor.trim_offsets, post_processor.add_prefix_space = \
            settings["trim_offsets"], settings["add_prefix_space"]


def _check_stated(path: str, hf: tokenizers.Tokenizer, stated: growth.Examined) -> None:
    """Check ids that a ``tokenizer.json`` states against its vocabulary.

    Raises:
        FormatError: an added token has another id than stated, or the post-processor adds a token that does not exist.
    """
    for text, ids in stated.added.items():
        token = hf.token_to_id(text)
        if token not in ids and token is not None:  # None: HF tokenizers skips empty texts
            raise FormatError(file=path, field=f"id of the added token {shorten(repr(text))}",
                              got=shorten(repr(ids[0])), allowed=f"{token}, the id that HF tokenizers gives to it",
                              hint="The ids of added tokens follow those of model.vocab without a gap")
    field, highest = stated.highest
    if highest >= hf.get_vocab_size():  # the ids may have gaps: look at each of them only now
        size = max(hf.get_vocab().values(), default=-1) + 1
        if highest >= size:
            raise FormatError(file=path, field=field, got=highest, allowed=f"0 to {size - 1}, ids of the vocabulary")


#: Maximum length in characters of a word of a WordPiece model, which tries every part of it. BERT's is 100.
_MAX_WORD_CHARS = 500
#: Length of a word up to which the time per character is negligible.
_MAX_QUICK_WORD = 200


def _check_model(path: str, model: Any, vocab: Mapping[str, int]) -> bool:
    """Check the settings of a model that multiply its work on a text.

    Returns:
        True if its work on a character is not negligible.

    Raises:
        LimitError: one is larger than any published tokenizer's.
    """
    longest = max(map(len, vocab), default=0)
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        longest = max(longest, len(getattr(model, name, None) or ""))
    if longest > limits.max_token_bytes:
        raise LimitError(f"{path}: a token has {longest:,} characters, the limit is {limits.max_token_bytes:,}",
                         hint="Raise mpool.tokenizers.limits.max_token_bytes")
    most = getattr(model, "max_input_chars_per_word", 0)
    if most > _MAX_WORD_CHARS:
        raise LimitError(f"{path}: model.max_input_chars_per_word is {most:,}, the limit is {_MAX_WORD_CHARS}")
    return most > _MAX_QUICK_WORD or type(model).__name__ == "Unigram" and longest > growth.MAX_QUICK_TOKEN


def _is_deep(data: bytes) -> bool:
    """Return True if JSON text, which may be malformed, is nested deeper than :data:`_MAX_JSON_DEPTH`. Reads it in
    slices, up to the first value that is too deep."""
    depth, start = 0, b""
    for at in range(0, len(data), _SLICE):
        structure = _STRINGS.sub(rb"\1\2", start + data[at:at + _SLICE])
        codes = np.frombuffer(structure, dtype=np.uint8) | 0x20  # maps "[" to "{" and "]" to "}"
        depths = depth + np.cumsum((codes == ord("{")).astype(np.int8) - (codes == ord("}")), dtype=np.int64)
        if depths.max(initial=0) > _MAX_JSON_DEPTH:
            return True
        depth = int(depths[-1]) if depths.size else depth
        # a string continues in the next slice, perhaps after the first character of an escape
        start = structure[structure.find(b'"'):] if b'"' in structure else b""
    return False


def _token_bytes(texts: list[str], decoder: Mapping[str, Any]) -> list[bytes]:
    """Return the bytes of every token, by the type of the file's decoder."""
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        alphabet = {char: bytes((byte,)) for byte, char in byte_alphabet().items()}
        return [b"".join([alphabet.get(char) or char.encode() for char in text]) for text in texts]
    for step in steps:
        kind = step.get("type")
        if kind == "WordPiece":
            prefix = step.get("prefix", "##")
            texts = [text[len(prefix):] if text.startswith(prefix) else " " + text for text in texts]
        elif kind == "Metaspace":
            texts = [text.replace(step.get("replacement", "▁"), " ") for text in texts]
        elif kind == "BPEDecoder":
            texts = [text.replace(step.get("suffix", "</w>"), " ") for text in texts]
        elif kind == "Replace" and "String" in step.get("pattern", {}):
            texts = [text.replace(step["pattern"]["String"], step.get("content", "")) for text in texts]
    if "ByteFallback" not in kinds:
        return [text.encode() for text in texts]
    byte = re.compile("<0x([0-9A-Fa-f]{2})>")
    found = ((byte.fullmatch(text) if len(text) == 6 else None, text) for text in texts)
    return [bytes((int(match[1], 16),)) if match else text.encode() for match, text in found]
