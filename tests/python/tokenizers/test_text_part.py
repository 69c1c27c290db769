"""Partial tokenizers yield the same ids as the whole tokenizer."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "parity" / "text"))

from make_lines import lines  # noqa: E402
from realmodels import real_path  # noqa: E402

import mpool  # noqa: E402
from mpool import _core, errors  # noqa: E402
from mpool.models.formats.byte_pairs import byte_alphabet  # noqa: E402
from mpool.models.formats.gguf_model import GGUFKeys  # noqa: E402
from mpool.tokenizers import gguf_part  # noqa: E402
from mpool.tokenizers.gguf_tokenizer import GGUFTokenizer  # noqa: E402
from mpool.tokenizers.gguf_vocab import GGUFVocab  # noqa: E402

GGML = "tokenizer.ggml."
CONTROL = ("<s>", "<|end|>", "</s>", "quit")


def vocabulary(**changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary with random merges. ``</s>`` looks like a control token and is the result of merges."""
    rng = random.Random(7)
    alphabet = [*byte_alphabet().values()]
    tokens, merges = [*CONTROL[:2], *alphabet], []
    made = list("etaoinshrdluĠĠĊ0123")
    for _ in range(600):
        left, right = rng.choice(made), rng.choice(made)
        if left + right not in tokens and len(left + right) < 12:
            tokens.append(left + right)
            made.append(left + right)
            merges.append(f"{left} {right}")
        elif len(merges) > 50 and left + right in tokens and rng.random() < 0.1:
            merges.append(f"{left} {right}")  # a second merge with the same result
    for left, right in (("<", "/"), ("</", "s"), ("</s", ">")):
        tokens.append(left + right)
        merges.append(f"{left} {right}")
    tokens += ["quit", "<user>", "the user"]
    types = [4 if token in ("<user>", "the user") else 3 if token in CONTROL else 1 for token in tokens]
    kv = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": types,
          "merges": list(dict.fromkeys(merges)), "bos_token_id": 0, "eos_token_id": 1}
    kv.update(changes)
    return {GGML + key: value for key, value in kv.items()}


def write_gguf(path: Path, kv: dict[str, Any]) -> GGUFKeys:
    gguf = pytest.importorskip("gguf", reason="writes the file")
    writer = gguf.GGUFWriter(path, "test")
    for key, value in kv.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFKeys(_core.read_gguf(str(path)))


def texts() -> list[str]:
    rng = random.Random(3)
    made = ["", " ", "\n\n ", "a" * 300,
            "hello the user <user>there", "x</s>y", "<s>", "quite", "the<|end|> end",
            "é\u0301\U0001f600"]
    for _ in range(300):
        bits = ["the", "tea ", " ", "\n", "  ", "0123", "lords", "é", "€", "</", "s>", "'s", "\t"]
        made.append("".join(rng.choices(bits, k=rng.randint(1, 40))))
    return made + lines(200)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_part, "MIN_TOKENS", 1)


def check_partial(partial: gguf_part.PartialTokenizers, whole: GGUFTokenizer) -> int:
    """Checks that partial tokenizers yield the ids of the whole one; returns how many texts they could encode."""
    served = 0
    for text in texts():
        part = partial.tokenizer([text])
        if part is not None:
            served += 1
            ids = part.encode(text, add_special_tokens=False).ids
            assert ids == whole.encode(text, add_special=False).tolist(), text
    return served


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2", "llama-bpe", "smollm"])
def test_partial_tokenizers_yield_the_same_ids(pre: str, tmp_path: Path, small: None) -> None:
    keys = write_gguf(tmp_path / "v.gguf", vocabulary(pre=pre))
    partial = gguf_part.PartialTokenizers.for_vocab(GGUFVocab(keys))
    whole = GGUFTokenizer(GGUFVocab(dict(keys)))  # not read from a file, so built at once
    assert partial is not None and whole._partial is None
    assert check_partial(partial, whole) > 300
    assert partial.tokenizer(["the user"]) is None  # user-defined tokens are found before text is split into words
    assert partial.tokenizer(["to quit"]) is None  # a control token, which text must not become
    assert partial.tokenizer(["a", "b" * 40_000]) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "qwen05"])
def test_partial_tokenizers_of_real_vocabularies(name: str) -> None:
    keys = GGUFKeys(_core.read_gguf(str(real_path(name)))).with_prefix("tokenizer.")
    partial = gguf_part.PartialTokenizers.for_vocab(GGUFVocab(keys))
    whole = GGUFTokenizer(GGUFVocab(dict(keys)))
    assert partial is not None
    assert check_partial(partial, whole) > 400


def test_ids_are_the_same_before_and_after_finish(tmp_path: Path, small: None) -> None:
    keys = write_gguf(tmp_path / "v.gguf", vocabulary())
    for parse in (False, True):
        deferred, whole = GGUFTokenizer(GGUFVocab(keys)), GGUFTokenizer(GGUFVocab(dict(keys)))
        assert not deferred.complete
        first = "the tea lords <|end|>" if parse else "the tea lords"
        for _ in range(2):
            assert deferred.encode(first, parse_special=parse).tolist() == \
                whole.encode(first, parse_special=parse).tolist()
        assert not deferred.complete
        deferred.finish()
        assert deferred.complete and whole.finish_later() is None  # type: ignore[func-returns-value]
        for text in texts():
            assert deferred.encode(text, parse_special=parse).tolist() == \
                whole.encode(text, parse_special=parse).tolist()


def test_texts_that_need_the_whole_tokenizer_build_it(tmp_path: Path, small: None) -> None:
    keys = write_gguf(tmp_path / "v.gguf", vocabulary())
    tokenizer, whole = GGUFTokenizer(GGUFVocab(keys)), GGUFTokenizer(GGUFVocab(dict(keys)))
    assert tokenizer.encode("quit").tolist() == whole.encode("quit").tolist()
    assert tokenizer._whole is not None


@pytest.mark.parametrize("changes, words", [
    ({"merges": ["h e", "q zz"]}, "not a token"), ({"merges": ["he"]}, "two tokens with a space"),
    ({"merges": ["h ~"]}, "not a token")])
def test_invalid_merges_are_refused_at_once(changes: dict[str, Any], words: str, tmp_path: Path,
                                            small: None) -> None:
    keys = write_gguf(tmp_path / "v.gguf", vocabulary(**changes))
    with pytest.raises(errors.FormatError, match=words):
        GGUFTokenizer(GGUFVocab(keys))


def test_surrogates_are_refused(tmp_path: Path, small: None) -> None:
    tokenizer = GGUFTokenizer(GGUFVocab(write_gguf(tmp_path / "v.gguf", vocabulary())))
    for parse in (False, True):
        with pytest.raises(mpool.InvalidArgument, match="surrogate pair .* at character 3"):
            tokenizer.encode("abc\ud800", parse_special=parse)
