"""The number of tokens that a text has at least (``Tokenizer.least_tokens``) never exceeds the number that it has."""

from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool.models.formats.byte_pairs import BYTE_TEXTS, byte_alphabet
from mpool.models.spec import TokenizerSource
from mpool.tokenizers import Tokenizer

TEXTS = ["", "a", "a" * 50_000, " " * 50_000, "\n\t \u3000" * 9000, "e\u0301\u0323" * 20_000, "\u1f82" * 5000,
         "\U0001f600\u200d" * 5000, "the cat " * 8000, "<|im_start|> <|im_end|>  \n" * 2000,
         "".join(map(chr, range(1, 0xd800))), "\u00e4\u4e2d" * 9000]


@pytest.mark.parametrize("name", ["llama", "qwen2", "bert"])
def test_never_more_than_the_tokens_of_a_text(name: str, request: pytest.FixtureRequest, pool: mpool.Pool) -> None:
    folder: Path = request.getfixturevalue(name)
    capability: Any = "text_embedding" if name == "bert" else "text_to_text"
    tokenizer = pool._find(str(folder), capability).tokenizer()
    texts = [*TEXTS, "".join(control * 50 for control in tokenizer.control_texts) + "x y"]
    for text in texts:
        for special in (False, True):
            ids = tokenizer.encode(text, add_special=False, parse_special=special)
            assert tokenizer.least_tokens(text, special) <= len(ids), (name, text[:20])
    if name != "bert":
        assert tokenizer.least_tokens("a" * 50_000, False) >= 50_000 // 100
        control = tokenizer.control_texts[0]
        assert tokenizer.least_tokens(control * 1000, True) >= 1000 > tokenizer.least_tokens(control * 10, False)


def _gguf(kind: str, tokens: list[str], types: list[int], **more: Any) -> Tokenizer:
    kv: dict[str, Any] = {"model": kind, "tokens": tokens, "token_type": types, **more}
    if kind == "llama":
        kv["scores"] = [-float(at) for at in range(len(tokens))]
    return Tokenizer.from_source(TokenizerSource(gguf={f"tokenizer.ggml.{key}": value for key, value in kv.items()}))


def _json(folder: Path, tokens: list[str], normalizer: Any) -> Tokenizer:
    from tokenizers import Tokenizer as HF
    from tokenizers import models

    made = HF(models.BPE(vocab={text: at for at, text in enumerate(tokens)}, merges=[("a", "b")], byte_fallback=True,
                         fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizer
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_source(TokenizerSource(json_path=str(folder / "tokenizer.json")))


def test_vocabularies_with_byte_tokens(tmp_path: Path) -> None:
    """Llama 2, Mistral and Gemma, as GGUF and as JSON. A vocabulary without a byte has no bound: a run of characters
    that are no tokens is one unknown token, however long it is."""
    from tokenizers import normalizers

    tokens, spaces = ["<unk>", "<s>", "</s>", *BYTE_TEXTS, "\u2581", "a", "b", "ab"], normalizers.Replace(" ", "\u2581")
    types = [2, 3, 3] + [6] * 256 + [1] * 4
    bounded = [_gguf("llama", tokens, types), _json(tmp_path, tokens, spaces), _json(tmp_path, tokens, None),
               _json(tmp_path, tokens, normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])),
               _gguf("gpt2", ["<s>", *byte_alphabet().values(), "ab"], [3] + [1] * 257, merges=["a b"], pre="gpt-2")]
    free = [_gguf("llama", tokens[:10] + tokens[11:], types[:10] + types[11:]),
            _json(tmp_path, tokens[:10] + tokens[11:], spaces), _json(tmp_path, tokens, normalizers.Strip()),
            _json(tmp_path, tokens, normalizers.Replace("ab", "")), _json(tmp_path, tokens, normalizers.NFKC())]
    for tokenizer in (*bounded, *free):
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special=False, parse_special=True)
            assert tokenizer.least_tokens(text, True) <= len(ids), text[:20]
    assert all(tokenizer.least_tokens("a" * 50_000, False) >= 5000 for tokenizer in bounded)
    assert not any(tokenizer.least_tokens("a" * 50_000, False) for tokenizer in free)
