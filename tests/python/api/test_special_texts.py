"""`parse_special` of embed, embed_iter and rerank, and token ids as input of embed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.tasks import text_embedding

from paritymodels import torch
from rerankers import make_reranker

MARKED = "A cat [SEP] sat [MASK] down"


def test_embed_parses_special_tokens_only_on_request(pool: mpool.Pool, bert: Path) -> None:
    model = str(bert)
    plain, parsed = (pool.tokenize(MARKED, model, parse_special=parse) for parse in (False, True))
    assert plain != parsed
    for ids, options in ((plain, {}), (plain, {"parse_special": False}), (parsed, {"parse_special": True})):
        wanted = pool.embed([ids], model)[0]
        assert np.array_equal(pool.embed(MARKED, model, **options), wanted)
        assert np.array_equal(pool.embed([MARKED, "other"], model, **options)[0], wanted)
        assert np.array_equal(next(iter(pool.embed_iter([MARKED], model, **options))), wanted)
        assert np.array_equal(asyncio.run(mpool.aio.embed(MARKED, model, pool=pool, **options)), wanted)
        assert np.array_equal(pool.submit("text_embedding", inputs=MARKED, model=model, **options).result(), wanted)
    assert not np.array_equal(pool.embed(MARKED, model), pool.embed(MARKED, model, parse_special=True))


def test_the_prompt_is_parsed_like_the_text(pool: mpool.Pool, bert: Path) -> None:
    model = str(bert)
    for parse in (False, True):
        ids = pool.tokenize("[SEP] cats", model, parse_special=parse)
        assert np.array_equal(pool.embed("cats", model, prompt="[SEP] ", parse_special=parse),
                              pool.embed([ids], model)[0])


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_parse_special_is_true_or_false(pool: mpool.Pool, bert: Path, value: Any) -> None:
    pool.embed("x", str(bert), parse_special=True)  # 1 == True: the cached plan must not be used
    with pytest.raises(mpool.InvalidArgument, match="parse_special"):
        pool.embed("x", str(bert), parse_special=value)


def test_rerank_parses_special_tokens_only_on_request(pool: mpool.Pool, tmp_path: Path) -> None:
    """transformers parses them always."""
    cross = pytest.importorskip("sentence_transformers").CrossEncoder
    folder, query, documents = make_reranker(tmp_path / "m", "bert"), "Where [SEP] cat?", [MARKED, "The [SEP] dog", "x"]
    with torch.no_grad():
        expected = cross(str(folder)).predict([(query, document) for document in documents])
    parsed = pool.rerank(query, documents, str(folder), compute="float32", parse_special=True)
    assert np.abs(np.array(parsed.scores) - expected).max() <= 1e-5
    plain = pool.rerank(query, documents, str(folder), compute="float32")
    assert np.abs(np.array(plain.scores) - expected)[:2].min() > 1e-4

    async def again() -> mpool.Ranking:
        return await mpool.aio.rerank(query, documents, str(folder), pool=pool, compute="float32", parse_special=True)

    assert asyncio.run(again()).scores == parsed.scores


@pytest.mark.parametrize(("ids", "where"), [
    ([[5, -1]], r"inputs\[0\]\[1\]"), ([[5], [6, 1 << 40]], r"inputs\[1\]\[1\]"), ([[5, 6.5]], r"inputs\[0\]\[1\]"),
    ([[6.0]], r"inputs\[0\]\[0\]"), ([[5], 6], r"inputs\[1\]"), ([[5], "text"], r"inputs\[1\]"),
    ([[True]], r"inputs\[0\]\[0\]"), ([[5, float("nan")]], r"inputs\[0\]\[1\]"), ([[5, "6"]], r"inputs\[0\]\[1\]")],
    ids=str)
def test_invalid_ids_are_named(pool: mpool.Pool, bert: Path, ids: Any, where: str) -> None:
    with pytest.raises(mpool.InvalidArgument, match=where):
        pool.embed(ids, str(bert))


def test_ids_from_the_end_of_the_vocabulary(pool: mpool.Pool, bert: Path) -> None:
    size = pool.get(str(bert)).tokenizer.vocab_size
    pool.embed([[size - 1]], str(bert))
    with pytest.raises(mpool.InvalidArgument, match=rf"inputs\[0\]\[1\].*0 to {size - 1}"):
        pool.embed([[5, size]], str(bert))


def test_token_ids_can_be_refused(pool: mpool.Pool, bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(mpool.InvalidArgument, match="check_embedding_ctx_length=False"):
        pool.embed([[5, 6]], str(bert), allow_token_ids=False)
    assert pool.embed("x", str(bert), allow_token_ids=False).shape
    monkeypatch.setattr(text_embedding, "_has_openai_ids", lambda tokenizer: True)
    assert pool.embed([[5, 6]], str(bert), allow_token_ids=False).shape


def test_vocabulary_of_openai_is_recognised() -> None:
    texts = [b"?"] * 20_000
    for token, text in text_embedding._CL100K.items():
        texts[token] = text
    for change, found in ((None, True), (1917, False)):
        if change is not None:
            texts[change] = b"world"
        offsets = np.cumsum([0, *map(len, texts)])
        table = SimpleNamespace(data=b"".join(texts), offsets=offsets)
        tokenizer: Any = SimpleNamespace(vocab_size=len(texts), token_table=lambda table=table: table)
        assert text_embedding._has_openai_ids(tokenizer) == found
    small: Any = SimpleNamespace(vocab_size=100)
    assert not text_embedding._has_openai_ids(small)
