"""Token ids compared with llama.cpp's, id for id (goldens of ``tests/parity/text``), and with transformers'."""

import lzma
import re
import sys
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PARITY = Path(__file__).resolve().parents[2] / "parity" / "text"
sys.path.insert(0, str(PARITY))

import make_goldens  # noqa: E402
import make_vocabs  # noqa: E402
from make_lines import lines  # noqa: E402
from realmodels import real_path  # noqa: E402

from mpool.models.spec import TokenizerSource  # noqa: E402
from mpool.tokenizers import Tokenizer  # noqa: E402
from mpool.tokenizers.pretokenizers import PRE_TOKENIZERS, PreTokenizer  # noqa: E402

GOLDENS = PARITY / "goldens"
TEXTS = lines(make_goldens.LINES)


@cache
def vocabs() -> dict[str, dict[str, Any]]:
    return make_vocabs.load()


def tokenizer_of(kv: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_source(TokenizerSource(gguf=kv))


def golden(name: str) -> list[list[int]]:
    return make_goldens.unpack((GOLDENS / f"{name}.xz").read_bytes())


def differing(tokenizer: Tokenizer, want: list[list[int]], *, parse_special: bool = False) -> list[str]:
    """Return the lines whose ids differ from the golden's."""
    packed = tokenizer.encode_batch(TEXTS[:len(want)], add_special=False, parse_special=parse_special)
    ids, ends = packed.ids.tolist(), packed.offsets.tolist()
    return [text for text, row, start, end in zip(TEXTS, want, ends, ends[1:]) if ids[start:end] != row]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "qwen05"])
def test_real_vocabulary_as_llama_cpp(name: str) -> None:
    tokenizer = tokenizer_of(make_goldens.read_gguf(real_path(name)))
    want = golden(name)
    assert len(want) == 3000 and sum(map(len, want)) > 60_000
    assert differing(tokenizer, want) == []
    # byte-level tokens are lossless
    table = tokenizer.token_table()
    for text in TEXTS[::7]:
        ids = tokenizer.encode(text, add_special=False).tolist()
        data = b"".join(table.data[table.offsets[token]:table.offsets[token + 1]] for token in ids)
        assert data == text.encode() and tokenizer.decode(ids) == text


def test_lines_are_those_of_the_goldens() -> None:
    text = "\n".join(TEXTS).encode()
    assert len(TEXTS) == 3000
    assert make_goldens.digest([list(text)]).hex() == LINES_DIGEST


LINES_DIGEST = "f3b52dd4"


@cache
def pre_goldens() -> dict[str, bytes]:
    data = lzma.decompress((GOLDENS / "pre.xz").read_bytes())
    size = make_goldens.PRE_LINES // make_goldens.PRE_GROUP * 4
    found, at = {}, 0
    while at < len(data):
        end = data.index(b"\n", at)
        found[data[at:end].decode()] = data[end + 1:end + 1 + size]
        at = end + 1 + size
    return found


def distinct() -> list[str]:
    """Return one name for every row. make_goldens.py verified that llama.cpp treats the names of a row alike."""
    seen: dict[PreTokenizer, str] = {}
    for name, pre in sorted(PRE_TOKENIZERS.items()):
        if pre.byte_level and name not in make_goldens.OWN:
            seen.setdefault(pre, name)
    return sorted(seen.values())


def test_every_pre_tokenizer_has_a_golden() -> None:
    by_row: dict[PreTokenizer, set[bytes]] = {}
    for name, pre in PRE_TOKENIZERS.items():
        if pre.byte_level and name not in make_goldens.OWN:
            by_row.setdefault(pre, set()).add(pre_goldens()[name])
    assert all(len(hashes) == 1 for hashes in by_row.values())
    # All rows have different ids on this vocabulary, except bailingmoe's and qwen2's, whose expressions are equivalent.
    patterns = {pre.patterns for pre in by_row}
    assert len(set().union(*by_row.values())) == len(patterns) - 1


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", distinct())
def test_pre_tokenizer_as_llama_cpp(name: str) -> None:
    tokenizer = tokenizer_of({**vocabs()["bpe"], "tokenizer.ggml.pre": name})
    count, group = make_goldens.PRE_LINES, make_goldens.PRE_GROUP
    packed = tokenizer.encode_batch(TEXTS[:count], add_special=False)
    ids, ends = packed.ids.tolist(), packed.offsets.tolist()
    rows = [ids[start:end] for start, end in zip(ends, ends[1:])]
    want = pre_goldens()[name]
    wrong = [at for at in range(0, count, group)
             if make_goldens.digest(rows[at:at + group]) != want[at // group * 4:at // group * 4 + 4]]
    assert wrong == [], f"differs in lines {wrong[0]} to {wrong[0] + group - 1} and {len(wrong) - 1} other groups"


#: Regular expression of Kimi K2's own tokenizer, as published by its authors.
KIMI_K2 = "|".join((
    r"[\p{Han}]+", *(r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]" + upper
                     + r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]" + lower + r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
                     for upper, lower in (("*", "+"), ("+", "*"))),
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"))


def test_kimi_k2_as_its_authors() -> None:
    """The words of every line equal those that another regular expression engine finds."""
    regex = pytest.importorskip("regex")
    from mpool.tokenizers.gguf_build import word_splitter

    words, ours = regex.compile(KIMI_K2, regex.V1), word_splitter(PRE_TOKENIZERS["kimi-k2"])
    texts = ["getUserName's iPhone, HELLOWorld 12345", "\u4f60\u597dabc\u4e16\u754c \u3042\u30a2\u4e9c", *TEXTS[:1500]]
    for text in texts:
        want = [match.span() for match in words.finditer(text)]
        assert [span for _, span in ours.pre_tokenize_str(text)] == want, text


def test_special_tokens_as_llama_cpp() -> None:
    tokenizer = tokenizer_of(vocabs()["bpe"])
    want = golden("bpe_special")
    assert any(tokenizer.token_id("<|im_end|>") in row for row in want)
    assert differing(tokenizer, want, parse_special=True) == []


def test_unigram_as_llama_cpp() -> None:
    assert differing(tokenizer_of(vocabs()["unigram"]), golden("unigram")) == []


def test_spm_as_llama_cpp() -> None:
    tokenizer = tokenizer_of(vocabs()["spm"])
    wrong = differing(tokenizer, golden("spm"))
    # Deliberate difference: merges in llama.cpp can produce a control or byte token from its text; ours never do.
    control = set(map(tokenizer.token_id, tokenizer.control_texts))
    for text in wrong:
        assert any(name in text for name in tokenizer.control_texts) or re.search("<0x[0-9A-F]{2}>", text)
        ids = tokenizer.encode(text, add_special=False).tolist()
        assert control.isdisjoint(ids)
    assert len(wrong) < 20


def test_wordpiece_as_llama_cpp() -> None:
    wrong = differing(tokenizer_of(vocabs()["wordpiece"]), golden("wordpiece"))
    assert [text for text in wrong if not _not_as_bert(text)] == []
    assert len(wrong) < len(golden("wordpiece")) / 10


def _not_as_bert(text: str) -> bool:
    """Return True for text that llama.cpp encodes differently from BERT's own tokenizer, which ours equals.

    llama.cpp drops spacing and enclosing marks and not only combining ones, keeps only the first letter of a Hangul
    syllable, treats three control characters as white space, and knows punctuation added after Unicode 7.
    """
    return (any(char in "\v\f\x85" or "\uac00" <= char <= "\ud7a3" or "\u2e43" <= char <= "\u2e4f" for char in text) or
            any(unicodedata.category(char) in ("Mc", "Me") for char in unicodedata.normalize("NFD", text)))


def test_minilm_as_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    folder = real_path("minilm")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    ours = Tokenizer.from_source(TokenizerSource(json_path=str(folder / "tokenizer.json")))
    texts = [*TEXTS[:400], "", " ", " ".join(TEXTS[:60]), "word " * 300, "x" * 300, "[SEP] [MASK][CLS]", "a" * 5000]
    for limit in (256, 16, 3, 2):
        want = theirs(texts, truncation=True, max_length=limit)["input_ids"]
        got = ours.encode_batch(texts, parse_special=True, max_tokens=limit)
        ids, ends = got.ids.tolist(), got.offsets.tolist()
        assert [ids[start:end] for start, end in zip(ends, ends[1:])] == want
    plain = [text for text in texts if not any(name in text for name in ours.control_texts)]
    for limit in (None, 256, 16):
        want = theirs(plain, truncation=limit is not None, max_length=limit)["input_ids"]
        got = ours.encode_batch(plain, max_tokens=limit)
        ids, ends = got.ids.tolist(), got.offsets.tolist()
        assert [ids[start:end] for start, end in zip(ends, ends[1:])] == want


def test_bert_of_a_gguf_as_tokenizer_json() -> None:
    """MiniLM's WordPiece vocabulary in both file formats."""
    folder = real_path("minilm")
    json = Tokenizer.from_source(TokenizerSource(json_path=str(folder / "tokenizer.json")))
    texts = [json.token_text(token) for token in range(json.vocab_size)]
    special = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    tokens = [text if text in special or text.startswith("[unused") else
              text[2:] if text.startswith("##") else "▁" + text for text in texts]
    gguf = tokenizer_of({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": tokens,
                         "tokenizer.ggml.token_type": [3 if text in special else 1 for text in texts]})
    assert gguf.prefix_ids == json.prefix_ids and gguf.suffix_ids == json.suffix_ids
    for text in TEXTS:
        assert gguf.encode(text).tolist() == json.encode(text).tolist(), text
