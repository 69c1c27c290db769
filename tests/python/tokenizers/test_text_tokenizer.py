"""Tokenizers: the interface, damaged and malicious vocabularies, text that is not Unicode, control tokens in text."""

import base64
import faulthandler
import itertools
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any
from collections.abc import Iterator

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "parity" / "text"))

import make_goldens  # noqa: E402
import make_vocabs  # noqa: E402
from make_lines import lines  # noqa: E402
from realmodels import real_path  # noqa: E402

from mpool.models.formats.byte_pairs import byte_alphabet, leftmost_first  # noqa: E402
from mpool.models.spec import TokenizerSource  # noqa: E402
from mpool.errors import ContextOverflow, FileError, FormatError, InvalidArgument, LimitError, Unsupported  # noqa: E402
from mpool.tokenizers import Tokenizer, limits  # noqa: E402
from mpool.tokenizers.gguf_build import build  # noqa: E402
from mpool.tokenizers.gguf_vocab import GGUFVocab  # noqa: E402
from mpool.tokenizers.pretokenizers import PRE_TOKENIZERS  # noqa: E402

GGML = "tokenizer.ggml."


def bpe(**changes: Any) -> dict[str, Any]:
    """A tiny byte-level vocabulary: 256 bytes, six merges, two control tokens, one user-defined token."""
    tokens = ["<s>", "<|end|>", *byte_alphabet().values(), "he", "ll", "hell", "hello", "Ġw", "Ġwo", "<user>"]
    kv = {GGML + "model": "gpt2", GGML + "pre": "gpt-2", GGML + "tokens": tokens,
          GGML + "token_type": [3, 3] + [1] * (len(tokens) - 3) + [4],
          GGML + "merges": ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o"],
          GGML + "bos_token_id": 0, GGML + "eos_token_id": 1}
    for key, value in changes.items():
        kv[GGML + key] = value
        if value is None:
            del kv[GGML + key]
    return kv


def spm(**changes: Any) -> dict[str, Any]:
    """A tiny SentencePiece vocabulary with byte tokens."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab"]
    kv = {GGML + "model": "llama", GGML + "tokens": tokens, GGML + "token_type": [2, 3, 3] + [6] * 256 + [1] * 5,
          GGML + "scores": [0.0] * 259 + [-5.0, -4.0, -3.0, -2.0, -1.0]}
    for key, value in changes.items():
        kv[GGML + key] = value
        if value is None:
            del kv[GGML + key]
    return kv


def unigram(**changes: Any) -> dict[str, Any]:
    """A tiny unigram vocabulary."""
    tokens = ["<pad>", "</s>", "<unk>", "▁", "a", "b", "▁ab", "é"]
    kv = {GGML + "model": "t5", GGML + "tokens": tokens, GGML + "token_type": [3, 3, 2, 1, 1, 1, 1, 1],
          GGML + "scores": [0.0, 0.0, 0.0, -2.0, -3.0, -3.5, -1.0, -4.0], GGML + "add_space_prefix": True,
          GGML + "remove_extra_whitespaces": True,
          GGML + "precompiled_charsmap": list(make_vocabs.charsmap(make_vocabs.CHARSMAP))}
    kv |= {GGML + key: value for key, value in changes.items()}
    return kv


def tokenizer_of(kv: dict[str, Any], **config: Any) -> Tokenizer:
    return Tokenizer.from_source(TokenizerSource(gguf=kv, config=config))


def refused(kv: dict[str, Any], field: str, error: type = FormatError) -> Any:
    """Return the error for ``kv``. It must state the field, its value, the allowed values, and the file."""
    with pytest.raises(error) as caught:
        tokenizer_of(kv, file="some.gguf").encode("x", parse_special=True)
    if error is FormatError:
        assert caught.value.field == GGML + field and caught.value.file == "some.gguf"
        assert caught.value.got not in (None, "") and caught.value.allowed
    else:
        assert "some.gguf" in str(caught.value) and GGML + field in str(caught.value)
        assert "mpool.tokenizers.limits." in str(caught.value)
    return caught.value


@cache
def big(name: str) -> Tokenizer:
    return tokenizer_of(make_vocabs.load()[name])


# The interface

def test_encode_and_decode() -> None:
    tokenizer = tokenizer_of(bpe())
    ids = tokenizer.encode("hello world")
    assert ids.dtype == np.int32 and ids.flags.c_contiguous
    assert [tokenizer.token_text(token) for token in ids] == ["hello", "Ġwo", "r", "l", "d"]
    assert tokenizer.decode(ids) == "hello world" and tokenizer.count("hello world") == 5
    assert tokenizer.encode("").tolist() == [] and tokenizer.decode([]) == ""
    assert tokenizer.special == {"bos": 0, "eos": 1, "eot": 1} and tokenizer.eog_ids == (1,)
    assert tokenizer.special_texts() == {"bos_token": "<s>", "eos_token": "<|end|>"}
    assert tokenizer.vocab_size == 265 and tokenizer.token_id("hello") == 261 and tokenizer.token_id("nope") is None
    assert tokenizer.decode([1, 261, 0], skip_special=False) == "<|end|>hello<s>"
    assert tokenizer.decode([1, 261, 0]) == "hello"
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"
    for token in (-1, 265):
        with pytest.raises(InvalidArgument, match="0 to 264"):
            tokenizer.decode([token])


def test_special_tokens() -> None:
    tokenizer = tokenizer_of(bpe(add_bos_token=True, add_eos_token=True))
    assert tokenizer.encode("he").tolist() == [0, 258, 1] and tokenizer.count("he") == 3
    assert tokenizer.encode("he", add_special=False).tolist() == [258]
    assert tokenizer.encode("<s>he<|end|>", add_special=False, parse_special=True).tolist() == [0, 258, 1]
    plain = tokenizer.encode("<s>he<|end|>", add_special=False).tolist()
    assert not {0, 1} & set(plain) and tokenizer.decode(plain) == "<s>he<|end|>"
    for parse in (False, True):  # text becomes user-defined tokens with and without parse_special
        assert tokenizer.encode("a<user>b", add_special=False, parse_special=parse).tolist()[1] == 264


def test_batches_are_packed() -> None:
    tokenizer = big("bpe")
    texts = lines(500)
    packed = tokenizer.encode_batch(texts)
    assert packed.ids.dtype == np.int32 and packed.offsets.dtype == np.int64 and packed.ids.flags.c_contiguous
    assert packed.offsets[0] == 0 and packed.offsets[-1] == len(packed.ids) and len(packed.offsets) == 501
    for at, text in enumerate(texts):
        assert packed.ids[packed.offsets[at]:packed.offsets[at + 1]].tolist() == tokenizer.encode(text).tolist()
    ids, offsets = tokenizer.encode_batch([])
    assert len(ids) == 0 and offsets.tolist() == [0]
    with pytest.raises(InvalidArgument, match="must be a list of strings"):
        tokenizer.encode_batch("text")


@pytest.mark.parametrize("parse", [False, True])
def test_truncation_keeps_special_tokens(parse: bool) -> None:
    tokenizer = tokenizer_of(bpe(add_bos_token=True, add_eos_token=True))
    texts = ["hello" * 10, "hello", ""]
    ids, offsets = tokenizer.encode_batch(texts, max_tokens=5, parse_special=parse)
    assert ids.tolist() == [0, 261, 261, 261, 1, 0, 261, 1, 0, 1] and offsets.tolist() == [0, 5, 8, 10]
    assert tokenizer.encode_batch(texts, max_tokens=2, parse_special=parse).ids.tolist() == [0, 1] * 3
    assert tokenizer.encode_batch(texts[:1], max_tokens=12, truncate=False, parse_special=parse).offsets[-1] == 12
    with pytest.raises(ContextOverflow, match=r"`texts\[1\]` has 12 tokens, the limit is 11") as caught:
        tokenizer.encode_batch(["", texts[0]], max_tokens=11, truncate=False, parse_special=parse)
    assert (caught.value.tokens, caught.value.limit) == (12, 11)
    with pytest.raises(InvalidArgument, match="must be [24] or more"):
        tokenizer.encode_batch(texts, max_tokens=1)
    assert tokenizer.encode_batch(texts[:1], max_tokens=1, add_special=False).ids.tolist() == [261]


@pytest.mark.slow
def test_first_tokens_of_a_long_text() -> None:
    tokenizer = big("wordpiece")
    texts = lines(1500)
    documents = [" ".join(texts[at:at + 200]) for at in range(0, 1500, 100)]
    documents += ["x" * 50_000, "a " * 30_000, " " * 40_000 + "end", "é\u0301 " * 20_000, "[SEP] " * 9000,
                  "\n".join(texts)]
    for limit in (2, 3, 16, 200):
        for document in documents:
            whole = tokenizer.encode(document).tolist()
            want = whole if len(whole) <= limit else [*whole[:limit - 1], whole[-1]]
            assert tokenizer.encode_batch([document], max_tokens=limit).ids.tolist() == want


@pytest.mark.parametrize("make", [bpe, spm, unigram])
def test_strings_may_be_bytes_and_arrays_numpy(make: Any) -> None:
    kv = make()
    other = {key: [text.encode() for text in value] if isinstance(value, list) and isinstance(value[0], str) else
             np.array(value) if isinstance(value, list) else value.encode() if isinstance(value, str) else value
             for key, value in kv.items()}
    one, two = tokenizer_of(kv), tokenizer_of(other)
    for text in ("hello ab <s> é", "", "<user>abab\n"):
        assert one.encode(text).tolist() == two.encode(text).tolist()
    assert one.token_table().data == two.token_table().data and one.prefix_ids == two.prefix_ids


def test_table_of_token_bytes() -> None:
    tokenizer = tokenizer_of(bpe())
    table = tokenizer.token_table()
    bytes_of = lambda token: table.data[table.offsets[token]:table.offsets[token + 1]]  # noqa: E731
    assert [bytes_of(token) for token in (0, 1, 262, 264)] == [b"", b"", b" w", b"<user>"]
    assert sorted(bytes_of(token) for token in range(2, 258)) == [bytes((byte,)) for byte in range(256)]
    assert table.control[:3] == b"\1\1\0" and len(table.control) == 265 and len(table.offsets) == 266
    assert table.eog == (1,) and tokenizer.token_table() is table
    sentencepiece = tokenizer_of(spm())
    table = sentencepiece.token_table()
    assert [bytes_of(token) for token in (0, 2, 3, 258, 259, 263)] == [b"", b"", b"\0", b"\xff", b" ", b" ab"]
    ids = sentencepiece.encode("ab é", add_special=False)
    assert b"".join(map(bytes_of, ids.tolist())) == " ab é".encode() and sentencepiece.decode(ids) == "ab é"


def test_tokens_that_are_not_utf8() -> None:
    kv = bpe()
    kv[GGML + "tokens"] = [text.encode() for text in kv[GGML + "tokens"]] + [b"\xff\xfe", b"\xc3"]
    kv[GGML + "token_type"] = kv[GGML + "token_type"] + [4, 1]
    tokenizer = tokenizer_of(kv)
    table = tokenizer.token_table()
    assert table.data[table.offsets[265]:] == b"\xff\xfe\xc3"
    assert tokenizer.encode("hello").tolist() == [261]


def test_empty_tokens_add_no_text() -> None:
    kv = bpe()
    kv[GGML + "tokens"] = kv[GGML + "tokens"] + ["", ""]
    kv[GGML + "token_type"] = kv[GGML + "token_type"] + [1, 4]
    tokenizer = tokenizer_of(kv)
    assert tokenizer.decode([265, 261, 266]) == "hello"


@pytest.mark.parametrize(("kind", "text"), [(0, "ab"), (0, "<0x41>"), (6, "<0x41>")])
def test_undefined_and_byte_tokens_of_a_unigram_vocabulary_match_no_text(kind: int, text: str) -> None:
    """SentencePiece never finds the text of such a token in an input."""
    kv = unigram()
    for name, value in (("tokens", text), ("token_type", kind), ("scores", 5.0)):
        kv[GGML + name] = [*kv[GGML + name], value]
    tokenizer = tokenizer_of(kv)
    assert 8 not in tokenizer.encode(f"{text} b{text}").tolist()
    assert tokenizer.encode("ab é").tolist() == tokenizer_of(unigram()).encode("ab é").tolist()
    table = tokenizer.token_table()
    assert table.data[table.offsets[8]:table.offsets[9]] == (b"A" if kind == 6 else b"")
    if text == "ab":  # a normal token is found
        kv[GGML + "token_type"][8] = 1
        assert 8 in tokenizer_of(kv).encode("ab bab").tolist()


def test_eog_and_types_by_text() -> None:
    names = ["<|im_end|>", "<|endoftext|>", "<|eom_id|>", "<|fim_pad|>", "</s>"]
    kv = bpe()
    kv[GGML + "tokens"] = kv[GGML + "tokens"] + names
    kv[GGML + "token_type"] = kv[GGML + "token_type"] + [1] * 5
    tokenizer = tokenizer_of(kv)
    assert tokenizer.eog_ids == (1, 265, 266, 267, 268, 269) and tokenizer.special["eot"] == 265
    assert set(names) <= set(tokenizer.control_texts)
    # Harmony: <|end|> ends a message, not the completion
    kv[GGML + "tokens"][-5:] = ["<|return|>", "<|call|>", "<|channel|>", "x1", "x2"]
    tokenizer = tokenizer_of(kv | {GGML + "eos_token_id": 265})
    assert tokenizer.eog_ids == (265, 266)
    for text in ("<|end|>", "<|channel|>"):  # part of a completion's text, but text never becomes one of them
        token = tokenizer.token_id(text)
        assert tokenizer.decode([token]) == text and tokenizer.encode(text, parse_special=True).tolist() == [token]
        assert token not in tokenizer.encode(text).tolist()


def test_control_token_that_is_the_result_of_merges() -> None:
    kv = bpe()
    kv[GGML + "tokens"] = kv[GGML + "tokens"] + ["</", "</s", "</s>"]
    kv[GGML + "token_type"] = kv[GGML + "token_type"] + [1, 1, 1]
    kv[GGML + "merges"] = kv[GGML + "merges"] + ["< /", "</ s", "</s >"]
    tokenizer = tokenizer_of(kv)  # "</s>" is a control token because of its text, as in llama.cpp
    assert 267 in tokenizer.eog_ids and tokenizer.encode("</s>", parse_special=True).tolist() == [267]


def test_rstrip_and_lstrip() -> None:
    tokenizer = tokenizer_of(spm() | {"general.name": "Phi-3 mini"})
    assert tokenizer.encode("ab</s>  ab", add_special=False, parse_special=True).tolist() == [263, 2, 263]
    tokenizer = tokenizer_of(spm())
    assert tokenizer.encode("ab</s>  ab", add_special=False, parse_special=True).tolist() != [263, 2, 263]
    kv = bpe(pre="jina-v2-es")
    kv[GGML + "tokens"][0] = "<mask>"
    assert tokenizer_of(kv).encode("h <mask> h", parse_special=True).tolist() == tokenizer_of(kv).encode(
        "h<mask> h", parse_special=True).tolist()


# tokenizer.json

def write_json(folder: Path, **changes: Any) -> str:
    """A BERT-like tokenizer.json with truncation and padding, which must have no effect."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "##b", "word", "[", "]", "cls", "sep"]
    added = [{"id": at, "content": words[at], "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False,
              "special": True} for at in range(4)]
    content = {
        "version": "1.0", "added_tokens": added,
        "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "[PAD]"},
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None,
                       "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": {word: at for at, word in enumerate(words)}}}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content | changes))
    return str(path)


def json_tokenizer(path: str, **config: Any) -> Tokenizer:
    return Tokenizer.from_source(TokenizerSource(json_path=path, config=config))


def test_truncation_and_padding_of_the_json_file_are_disabled(tmp_path: Path) -> None:
    tokenizer = json_tokenizer(write_json(tmp_path), sep_token="[SEP]", cls_token={"content": "[CLS]"})
    assert tokenizer.encode("A b word word word word word").tolist() == [2, 4, 5, 7, 7, 7, 7, 7, 3]
    assert tokenizer.prefix_ids == (2,) and tokenizer.suffix_ids == (3,)
    assert tokenizer.special == {"sep": 3, "cls": 2, "unk": 1} and tokenizer.vocab_size == 12
    assert tokenizer.encode_batch(["ab", "x"], max_tokens=3).ids.tolist() == [2, 4, 3, 2, 1, 3]
    assert tokenizer.decode([2, 4, 6, 7, 3]) == "ab word"
    table = tokenizer.token_table()
    assert [table.data[table.offsets[at]:table.offsets[at + 1]] for at in (2, 4, 6)] == [b"", b" a", b"b"]


_REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_DECODERS: dict[str, tuple[dict[str, Any], list[str], list[bytes]]] = {
    "ByteLevel": ({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
                  ["Ġa", "Ã", "©", "▁"], [b" a", b"\xc3", b"\xa9", "▁".encode()]),
    "WordPiece": ({"type": "WordPiece", "prefix": "@@", "cleanup": False}, ["a", "@@b", "##c"], [b" a", b"b", b" ##c"]),
    "Metaspace": ({"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True},
                  ["_a", "b_c", "▁"], [b" a", b"b c", "▁".encode()]),
    "BPEDecoder": ({"type": "BPEDecoder", "suffix": "</e>"}, ["a", "b</e>", "c</w>"], [b"a", b"b ", b"c</w>"]),
    "Replace": (_REPLACE, ["▁a▁", "<0xC3>"], [b" a ", b"<0xC3>"]),
    "Llama": ({"type": "Sequence", "decoders": [_REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"},
                                                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
              ["▁a", "b▁c", "<0xC3>", "<0xA9>", "<0x4>"], [b" a", b"b c", b"\xc3", b"\xa9", b"<0x4>"]),
}


@pytest.mark.parametrize("kind", _DECODERS)
def test_bytes_of_json_tokens_for_each_decoder(tmp_path: Path, kind: str) -> None:
    decoder, texts, expected = _DECODERS[kind]
    vocab = {text: token for token, text in enumerate(["[UNK]", *texts])}
    path = write_json(tmp_path, added_tokens=[], normalizer=None, pre_tokenizer=None, post_processor=None,
                      truncation=None, padding=None, decoder=decoder,
                      model={"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"})
    tokenizer = json_tokenizer(path)
    table = tokenizer.token_table()
    found = [table.data[table.offsets[at]:table.offsets[at + 1]] for at in range(1, len(vocab))]
    assert found == expected
    assert tokenizer.decode(range(1, len(vocab))).strip() == b"".join(expected).decode().strip()


@pytest.mark.parametrize("step", [
    {"type": "BertPreTokenizer"}, {"type": "WhitespaceSplit"}, None,
    {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "a.*z"}, "behavior": "Removed", "invert": False},
        {"type": "BertPreTokenizer"}]}], ids=str)
def test_the_first_tokens_of_a_long_text_are_those_of_the_text(tmp_path: Path, step: Any) -> None:
    """A long text may be cut before it is encoded only if its words do not depend on each other."""
    tokenizer = json_tokenizer(write_json(tmp_path, pre_tokenizer=step))
    for text in ("a " * 3000, "a " * 3000 + "z b", "word b a " * 900 + "b"):
        whole = tokenizer.encode(text, add_special=False).tolist()
        part = tokenizer.encode_batch([text], max_tokens=6, add_special=False).ids.tolist()
        assert part == whole[:6], text[-3:]


def test_json_control_tokens_in_text(tmp_path: Path) -> None:
    tokenizer = json_tokenizer(write_json(tmp_path))
    assert tokenizer.encode("a [SEP] b").tolist() == [2, 4, 8, 11, 9, 5, 3]
    assert tokenizer.encode("a [SEP] b", parse_special=True).tolist() == [2, 4, 3, 5, 3]
    packed = tokenizer.encode_batch(["a", "[CLS]", "b", "[CLS]"], add_special=False)
    assert packed.ids.tolist() == [4, 8, 10, 9, 5, 8, 10, 9] and packed.offsets.tolist() == [0, 1, 4, 5, 8]


def test_bos_and_eos_of_the_json_tokenizer_config(tmp_path: Path) -> None:
    path = write_json(tmp_path)
    config = {"bos_token": "[CLS]", "eos_token": "[SEP]", "add_bos_token": True, "add_eos_token": False}
    tokenizer = json_tokenizer(path, **config)  # the post-processor in the file takes precedence
    assert tokenizer.encode("a").tolist() == [2, 4, 3] and tokenizer.eog_ids == (3,)
    (tmp_path / "bare").mkdir()
    bare = write_json(tmp_path / "bare", post_processor=None)
    assert json_tokenizer(bare, **config).encode("a").tolist() == [2, 4]
    tokenizer = json_tokenizer(path, truncation_side="left", eos_token_id=[3, 1])
    assert tokenizer.encode_batch(["a b word"], max_tokens=4).ids.tolist() == [2, 5, 7, 3] and tokenizer.eog_ids == (1,
                                                                                                                     3)
    for wrong in (12, -1, "3", True):
        with pytest.raises(FormatError, match="0 to 11"):
            json_tokenizer(path, eos_token_id=[wrong])


def test_json_unigram_that_lists_control_tokens(tmp_path: Path) -> None:
    vocab = [["<s>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], ["▁", -2.0], ["<", -3.0], ["/", -3.0], ["s", -3.0], [">",
                                                                                                                -3.0],
              ["a", -3.0]]
    added = [{"id": at, "content": vocab[at][0], "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for at in range(3)]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    path = write_json(tmp_path, added_tokens=added, normalizer=None, pre_tokenizer=metaspace, decoder=metaspace,
                      post_processor=None, truncation=None, padding=None,
                      model={"type": "Unigram", "unk_id": 2, "vocab": vocab, "byte_fallback": False})
    tokenizer = json_tokenizer(path)
    for text in ("</s>", "a</s>a<s>", "</s></s>"):
        ids = tokenizer.encode(text).tolist()
        assert ids and not {0, 1} & set(ids)
        assert "".join(vocab[token][0] for token in ids).replace("▁", "") == text
    assert 1 in tokenizer.encode("</s>", parse_special=True).tolist()
    assert tokenizer.encode("aéa").tolist().count(2) == 1  # the unknown token stays allowed


def test_json_and_gguf_vocabularies_agree(tmp_path: Path) -> None:
    from tokenizers import AddedToken, decoders

    kv = bpe()
    kv[GGML + "token_type"] = [1, 1] + kv[GGML + "token_type"][2:]
    kv[GGML + "tokens"][1] = "<|fin|>"  # a text without a special meaning, so that the token stays ordinary
    hf, _ = build(GGUFVocab(kv))
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ("<s>", "<|fin|>")])
    hf.save(str(tmp_path / "t.json"))
    one = json_tokenizer(str(tmp_path / "t.json"), bos_token="<s>", eos_token="<|fin|>")
    kv[GGML + "token_type"][:2] = [3, 3]
    two = tokenizer_of(kv)
    assert (one.vocab_size, one.special, one.eog_ids) == (two.vocab_size, two.special, two.eog_ids)
    assert one.token_table().data == two.token_table().data and one.token_table().control == two.token_table().control
    for text in [*lines(300), "<s>hello<|fin|>"]:
        assert one.encode(text, parse_special=True).tolist() == two.encode(text, parse_special=True).tolist()
        if "<s>" not in text:
            assert one.encode(text).tolist() == two.encode(text).tolist()
        assert one.decode(one.encode(text)) == two.decode(two.encode(text)) == text


@pytest.mark.parametrize("eos, ends", [("<|fin|>", 1), ("</tool_call>", 266)])
def test_markers_of_tool_calls_are_text_unless_they_end_the_text(eos: str, ends: int, tmp_path: Path) -> None:
    from tokenizers import AddedToken, decoders

    control = ["<s>", "<|fin|>", "<tool_call>", "</tool_call>"]
    kv = bpe()
    kv[GGML + "tokens"] = [*control[:2], *kv[GGML + "tokens"][2:], *control[2:]]
    kv[GGML + "token_type"] = [1, 1, *kv[GGML + "token_type"][2:], 1, 1]
    hf, _ = build(GGUFVocab(kv))
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    hf.save(str(tmp_path / "t.json"))
    for token in (0, 1, 265, 266):
        kv[GGML + "token_type"][token] = 3
    for tokenizer in (json_tokenizer(str(tmp_path / "t.json"), bos_token="<s>", eos_token=eos),
                      tokenizer_of(kv | {GGML + "eos_token_id": ends})):
        table = tokenizer.token_table()  # the text of a completion consists of these bytes
        assert ends in table.eog and table.control[265:] == bytes((0, ends == 266))
        assert table.data[table.offsets[265]:] == b"<tool_call>" + b"</tool_call>" * (ends != 266)


def test_source_has_exactly_one_of_two_fields(tmp_path: Path) -> None:
    for source in (TokenizerSource(), TokenizerSource(json_path="x", gguf=bpe())):
        with pytest.raises(InvalidArgument):
            Tokenizer.from_source(source)
    with pytest.raises(FileError, match="No such file"):
        json_tokenizer(str(tmp_path / "none.json"))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FormatError, match="regular file"):
        json_tokenizer(str(tmp_path / "fifo"))
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(FormatError):
        json_tokenizer(str(tmp_path / "broken.json"))


# Damaged and malicious files

def test_tokens_missing_or_empty() -> None:
    refused(bpe(tokens=None), "tokens")
    refused(bpe(tokens=[]), "tokens")
    refused(bpe(tokens="abc"), "tokens")
    refused(bpe(tokens=[1, 2]), "tokens")
    refused(bpe(tokens=["a", b"b"]), "tokens")
    refused(bpe(tokens=["a", "b", "a"], token_type=None), "tokens")
    refused(bpe(model=None), "model")
    refused(bpe(model="nonsense"), "model")
    with pytest.raises(Unsupported, match="rwkv"):
        tokenizer_of(bpe(model="rwkv"))


def test_too_many_tokens() -> None:
    error = refused(bpe(tokens=["x"] * ((1 << 20) + 1)), "tokens", LimitError)
    assert "1,048,577" in str(error) and "max_vocab_tokens" in str(error)


@pytest.mark.parametrize("key, value", [
    ("token_type", [1]), ("token_type", [1] * 266), ("token_type", [1.0] * 265), ("token_type", ["1"] * 265),
    ("token_type", [True] * 265), ("token_type", [7] * 265), ("token_type", [-1] * 265), ("token_type", 1),
    ("token_type", np.zeros((265, 1), np.int32)), ("token_type", np.zeros(265, np.float32)),
    ("scores", [0.0]), ("scores", [0.0] * 266), ("scores", ["0"] * 265), ("scores", [float("nan")] * 265),
    ("scores", [float("inf")] * 265), ("scores", [True] * 265), ("scores", "x"), ("merges", [1, 2]), ("merges", None),
    ("merges", "h e"), ("add_bos_token", 1), ("add_bos_token", "true"), ("model", 5), ("pre", 3), ("bos_token_id", "0"),
    ("bos_token_id", 1.0), ("bos_token_id", True),
])
def test_wrong_length_or_type(key: str, value: Any) -> None:
    refused(bpe(**{key: value}), key)


def test_scores_are_required_by_some_models() -> None:
    refused(spm(scores=None), "scores")
    refused(spm(scores=[0.0] * 263), "scores")
    assert tokenizer_of(bpe(scores=[0.0] * 265)).encode("hello").tolist() == [261]


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id",
                                 "seperator_token_id", "cls_token_id", "mask_token_id", "eot_token_id", "eom_token_id",
                                 "fim_pre_token_id", "fim_pad_token_id", "prefix_token_id"])
def test_special_id_outside_the_vocabulary(key: str) -> None:
    for value in (265, 2**32 - 1, -1):
        error = refused(bpe(**{key: value}), key)
        assert error.got == value and error.allowed == "0 to 264"
    assert tokenizer_of(bpe(**{key: 264})).vocab_size == 265


@pytest.mark.parametrize("kv, key", [
    ({GGML + "model": "gpt2", GGML + "tokens": ["a", "b"], GGML + "merges": []}, "bos_token_id"),
    ({GGML + "model": "llama", GGML + "tokens": ["a", "b"], GGML + "scores": [0.0, 0.0]}, "eos_token_id"),
    ({GGML + "model": "t5", GGML + "tokens": ["a", "b"], GGML + "scores": [0.0, 0.0]}, "unknown_token_id"),
    ({GGML + "model": "bert", GGML + "tokens": ["a", "b"]}, "bos_token_id"),
])
def test_default_special_id_outside_the_vocabulary(kv: dict[str, Any], key: str) -> None:
    assert "by default" in refused(kv, key).got


@pytest.mark.parametrize(("pre", "given", "wanted"), [
    ("gemma4", False, True), ("gemma4", None, True), ("gpt-2", False, False), ("gpt-2", None, False)])
def test_files_of_gemma_4_get_the_bos_token(pre: str, given: bool | None, wanted: bool) -> None:
    """The files say that it is not added, by mistake."""
    assert tokenizer_of(bpe(pre=pre, add_bos_token=given)).encode("he").tolist()[:1] == ([0] if wanted else [258])


@pytest.mark.parametrize(("pre", "merges", "wanted"), [
    ("gemma4", ["\n \n", "\n\n \n\n"], {2: [2], 3: [3], 4: [4], 5: [4, 1]}),
    ("sarvam-moe", ["\n \n", "\n\n \n\n"], {2: [2], 3: [2, 1], 4: [4], 5: [4, 1]}),
    ("gemma4", ["\n \n", "\n\n \n", "\n\n \n\n"], {2: [2], 3: [3], 4: [4], 5: [2, 3]}),
    ("gemma4", [], {2: [2], 3: [3], 4: [4], 5: [1, 1, 1, 1, 1]})])
def test_newlines_that_are_a_token(pre: str, merges: list[str], wanted: dict[int, list[int]]) -> None:
    """For Gemma 4, as in llama.cpp, a run of newlines is one token if the vocabulary has it."""
    tokens = ["<s>", "\n", "\n\n", "\n\n\n", "\n\n\n\n", "a", "", "aa", "<0x41>", "<", "0", "x", "4", "1", ">"]
    made = tokenizer_of({GGML + "model": "gpt2", GGML + "pre": pre, GGML + "tokens": tokens, GGML + "merges": merges,
                         GGML + "token_type": [3, 1, 1, 1, 1, 1, 1, 1, 6, 1, 1, 1, 1, 1, 1], GGML + "bos_token_id": 0,
                         GGML + "eos_token_id": 0})
    bos = [0] if pre == "gemma4" else []
    for count, ids in wanted.items():
        assert made.encode(f"a{chr(10) * count}a").tolist() == [*bos, 5, *ids, 5]
        # merges make all other words, also lines that are the text of a token
        lines = made.encode(f"aa{chr(10) * count}<0x41>{chr(10) * count}").tolist()
        assert lines == [*bos, 5, 5, *ids, 9, 10, 11, 12, 13, 14, *ids]


def test_vocabulary_whose_tokens_have_too_many_splits() -> None:
    """With tokens of 1 to 2,000 times the same letter, merges would take gigabytes."""
    kv = spm()
    tokens = [*kv[GGML + "tokens"], *("c" * size for size in range(1, 2000))]
    kv |= {GGML + "tokens": tokens, GGML + "token_type": [*kv[GGML + "token_type"], *[1] * 1999],
           GGML + "scores": [*kv[GGML + "scores"], *[-1.0] * 1999]}
    with pytest.raises(LimitError, match="the squares of their lengths add up to 2,664,"):
        tokenizer_of(kv)


def test_order_of_splits_that_overlap() -> None:
    """The result is that of swaps in a list, one pair after the other, for every word of two letters."""
    for size in range(1, 11):
        for letters in itertools.product("ab", repeat=size):
            text, cuts = "".join(letters), list(range(size - 1, 0, -1))
            expected = list(cuts)
            for short in cuts:
                long = size - short
                if short < long and text[short:] == text[:long] and text[long:] != text[:short]:
                    a, b = expected.index(short), expected.index(long)
                    if b < a:
                        expected[a], expected[b] = expected[b], expected[a]
            assert leftmost_first(text, cuts) == expected


def test_bos_is_wanted_but_missing() -> None:
    refused(bpe(pre="glm4", bos_token_id=None, add_bos_token=True), "bos_token_id")


@pytest.mark.parametrize("text", ["<0x-1>", "<0xZZ>", "<0x1>", "<0x123>", "0x12", "<0xab>", "", "<0x 1>"])
def test_malformed_byte_token(text: str) -> None:
    kv = spm()
    kv[GGML + "tokens"][100] = text
    assert "byte token 100" in refused(kv, "tokens").got


def test_token_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = bpe()
    kv[GGML + "tokens"][5] = "x" * 4097
    error = refused(kv, "tokens", LimitError)
    assert "4,097" in str(error) and "max_token_bytes" in str(error)
    monkeypatch.setattr(limits, "max_token_bytes", 5000)
    assert tokenizer_of(kv).token_text(5) == "x" * 4097


@pytest.mark.parametrize("merge", ["h zzz", "zzz h", "e h"])
def test_merge_of_missing_tokens(merge: str) -> None:
    error = refused(bpe(merges=["h e", merge]), "merges")
    assert "is not a token" in error.got and merge in error.got


@pytest.mark.parametrize("merge", [" h", "h ", "h", "", " "])
def test_merge_without_two_parts(merge: str) -> None:
    refused(bpe(merges=["h e", merge]), "merges")


def test_duplicate_merges_have_no_effect() -> None:
    one, two = tokenizer_of(bpe()), tokenizer_of(bpe(merges=bpe()[GGML + "merges"] * 2))
    assert one.encode("hello world").tolist() == two.encode("hello world").tolist()


def test_more_tokens_than_embedding_rows() -> None:
    tokenizer = tokenizer_of(bpe())
    tokenizer.fit(265)
    tokenizer.fit(300)
    with pytest.raises(FormatError, match="0 to 263, the rows of the embedding"):
        tokenizer.fit(264)


def test_unknown_pre_tokenizer() -> None:
    error = refused(bpe(pre="nonsense"), "pre")
    assert error.got == "'nonsense'" and "smollm" in error.allowed and "qwen2" in error.allowed


def test_charsmap_in_base64() -> None:
    """Ollama's snowflake-arctic-embed2 stores base64 with one character per array element."""
    letters = list(base64.b64encode(make_vocabs.charsmap(make_vocabs.CHARSMAP)).decode())
    for text in ("ab", "\uff41b", "e\u0301"):
        assert tokenizer_of(unigram(precompiled_charsmap=letters)).encode(text).tolist() \
            == tokenizer_of(unigram()).encode(text).tolist()
    refused(unigram(precompiled_charsmap=["?", *letters]), "precompiled_charsmap")
    refused(unigram(precompiled_charsmap=["A", 5]), "precompiled_charsmap")


@pytest.mark.parametrize("size", [0, 1, 3, 4, 100, -1, -5])
def test_truncated_charsmap(size: int) -> None:
    blob = make_vocabs.charsmap(make_vocabs.CHARSMAP)
    cut = blob[:size] if size >= 0 else blob[:len(blob) + size]
    refused(unigram(precompiled_charsmap=list(cut)), "precompiled_charsmap")
    refused(unigram(precompiled_charsmap=bytes(cut)), "precompiled_charsmap")


@pytest.mark.slow
def test_charsmap_with_invalid_pointers() -> None:
    blob = bytearray(make_vocabs.charsmap(make_vocabs.CHARSMAP))
    size = int.from_bytes(blob[:4], "little")
    rng = np.random.default_rng(1)
    for _ in range(60):
        broken = bytearray(blob)
        for at in rng.integers(4, 4 + size, 40):
            broken[at] ^= int(rng.integers(1, 256))
        broken[4:8] = blob[4:8]
        try:
            tokenizer = tokenizer_of(unigram(precompiled_charsmap=list(broken)))
        except FormatError as error:
            assert error.field == GGML + "precompiled_charsmap"
        else:
            for text in lines(60):
                tokenizer.encode(text)
    root = bytearray(blob)
    root[4:8] = (0xFFFFFFFF).to_bytes(4, "little")
    refused(unigram(precompiled_charsmap=list(root)), "precompiled_charsmap")
    refused(unigram(precompiled_charsmap=["x"]), "precompiled_charsmap")


def test_json_that_is_too_large_or_too_deep(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    with open(path, "wb") as stream:
        stream.truncate((64 << 20) + 1)
    with pytest.raises(LimitError, match="max_tokenizer_json_bytes"):
        json_tokenizer(str(path))
    for text in ("[" * 100_000, '{"a":' * 100_000, '{"normalizer":' + '{"type":"Sequence","normalizers":[' * 10_000):
        path.write_text(text)
        with pytest.raises(LimitError, match="127 levels"):
            json_tokenizer(str(path))
    with pytest.raises(LimitError, match="127 levels"):
        json_tokenizer(write_json(tmp_path, more=json.loads("[" * 200 + "]" * 200)))
    path.write_text('{"normalizer": "' + "[{" * 1000)
    with pytest.raises(FormatError):
        json_tokenizer(str(path))


def test_json_with_a_huge_token_id(tmp_path: Path) -> None:
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
             "max_input_chars_per_word": 100, "vocab": {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3,
                                                        "a": 4_000_000_000}}
    with pytest.raises(LimitError, match="max_vocab_tokens"):
        json_tokenizer(write_json(tmp_path, model=model))


@pytest.fixture
def watchdog() -> Iterator[None]:
    """Ends the process with a traceback if a test hangs."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


RUNS = ["a", "A", "é", "你", " ", "\n", "1", "!", "'", "\u0301", "aB", " \n", "'s", "🙂", "<"]


def distinct_pre() -> list[str]:
    seen = {}
    for name, pre in PRE_TOKENIZERS.items():
        if pre.byte_level:
            seen.setdefault(pre.patterns, name)
    return sorted(seen.values())


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [*distinct_pre(), "spm", "unigram", "wordpiece"])
def test_unbroken_run(name: str, watchdog: None) -> None:
    if name in ("spm", "unigram", "wordpiece"):
        tokenizer = big(name)
    else:
        tokenizer = tokenizer_of({**make_vocabs.load()["bpe"], GGML + "pre": name})
    for run in RUNS:
        text = run * (26_000 // len(run))
        ids = tokenizer.encode(text, add_special=False)
        # a unigram or WordPiece tokenizer may encode the whole run as one unknown token, or drop it
        assert len(ids) > 20 or tokenizer.special.get("unk") in ids or (name != "spm" and not run.strip(" \n\u0301"))
        if name not in ("spm", "unigram", "wordpiece"):
            assert tokenizer.decode(ids) == text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "qwen05"])
def test_unbroken_run_on_real_vocabularies(name: str, watchdog: None) -> None:
    tokenizer = tokenizer_of(make_goldens.read_gguf(real_path(name)))
    for run in RUNS:
        text = run * (26_000 // len(run))
        assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


# Surrogates, and control tokens in text

@pytest.mark.parametrize("source", ["gguf", "json"])
@pytest.mark.parametrize("parse", [False, True])
def test_surrogates_and_nul(source: str, parse: bool, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(bpe()) if source == "gguf" else json_tokenizer(write_json(tmp_path))
    for text, at in (("\ud800", 0), ("abc\udfff", 3), ("a" * 5000 + "\udc80", 5000), ("<s>\ud83d", 3)):
        wanted = f"`text` must be Unicode text, got half of a surrogate pair .* at character {at}"
        with pytest.raises(InvalidArgument, match=wanted):
            tokenizer.encode(text, parse_special=parse)
        with pytest.raises(ValueError, match=wanted.replace("`text`", r"`texts\[1\]`")):
            tokenizer.encode_batch(["ok", text], parse_special=parse)
        with pytest.raises(InvalidArgument):
            tokenizer.count(text, parse_special=parse)
    for wrong in (None, b"x", 3, ["x"]):
        with pytest.raises(InvalidArgument, match="`text` must be str"):
            tokenizer.encode(wrong, parse_special=parse)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=r"`texts\[1\]` must be str"):
            tokenizer.encode_batch(["ok", wrong], parse_special=parse)  # type: ignore[list-item]
    assert len(tokenizer.encode("a\0b", parse_special=parse)) > 0


@pytest.mark.parametrize("name", ["bpe", "spm", "unigram", "wordpiece"])
def test_control_tokens_in_text_are_plain(name: str) -> None:
    tokenizer = big(name)
    control = set(map(tokenizer.token_id, tokenizer.control_texts)) - {tokenizer.special.get("unk")}
    for text in tokenizer.control_texts:
        for around in (text, f"a {text} b", text * 3, f"x{text}\n"):
            assert control.isdisjoint(tokenizer.encode(around, add_special=False).tolist())
            found = tokenizer.encode(around, add_special=False, parse_special=True).tolist()
            assert found.count(tokenizer.token_id(text)) == around.count(text)
