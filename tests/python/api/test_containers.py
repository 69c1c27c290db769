"""Containers of texts: each verb reads the rows in their order, or raises an error that names what it got."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import aio

pandas = pytest.importorskip("pandas")
pyarrow = pytest.importorskip("pyarrow")

TEXTS = ["one", "the quick brown fox", "two three four five"]


class Table:
    """A table as polars and datasets have it: without ``ndim``, and iterating gives its columns."""

    columns = column_names = ["text"]
    shape = (3, 1)

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter(self.columns)


class Column:
    """A column as datasets has it: a sequence without array attributes."""

    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, at: int) -> str:
        return TEXTS[at]

    def __iter__(self) -> Any:
        return iter(TEXTS)


ROWS: dict[str, Any] = {
    "tuple": tuple(TEXTS), "array": np.array(TEXTS), "objects": np.array(TEXTS, dtype=object),
    "series": pandas.Series(TEXTS, index=[2, 0, 1]), "labels": pandas.Series(TEXTS, index=["c", "a", "b"]),
    "categories": pandas.Series(TEXTS).astype("category"), "index": pandas.Index(TEXTS), "column": Column(),
    "arrow": pyarrow.array(TEXTS), "chunks": pyarrow.chunked_array([TEXTS[:1], TEXTS[1:]]),
    "dictionary": pyarrow.array(TEXTS).dictionary_encode(), "values": dict(enumerate(TEXTS)).values()}
NO_ROWS: dict[str, Callable[[], Any]] = {
    "table": lambda: pandas.DataFrame({"text": TEXTS, "other": TEXTS}), "one column": lambda: pandas.DataFrame(
        {"text": TEXTS}), "arrow table": lambda: pyarrow.table({"text": TEXTS}), "other table": Table,
    "batch": lambda: pyarrow.RecordBatch.from_pydict({"text": TEXTS}), "0-d": lambda: np.array("one"),
    "2-d": lambda: np.array([TEXTS]), "dict": lambda: {"text": TEXTS}, "set": lambda: set(TEXTS),
    "keys": lambda: dict.fromkeys(TEXTS).keys(), "bytes": lambda: b"one", "view": lambda: memoryview(b"one"),
    "numbers": lambda: np.arange(3), "byte texts": lambda: np.array([b"one"])}


@pytest.fixture(scope="module")
def calls(bert: Path, ranker: Path) -> dict[str, Callable[[Any], Any]]:
    """Return the calls of every verb by name: each returns what it computed for the texts, as plain values."""
    from mpool.integrations import _requests
    from mpool.integrations.sentence_transformers import SentenceTransformer

    model, scorer, ours = str(bert), str(ranker), SentenceTransformer(bert)

    def scores(found: Any) -> Any:
        return [(one.index, one.text, one.score) for one in found]

    return {
        "embed": lambda texts: mpool.embed(texts, model).tolist(),
        "null": lambda texts: mpool.embed(texts, model, on_error="null").tolist(),
        "embed_iter": lambda texts: [row.tolist() for row in mpool.embed_iter(texts, model)],
        "embed_tokens": lambda texts: [row.tolist() for row in mpool.embed_tokens(texts, model)],
        "rerank": lambda texts: scores(mpool.rerank("one", texts, scorer)),
        "classify": lambda texts: mpool.classify(texts, scorer).scores.tolist(),
        "aio": lambda texts: asyncio.run(aio.embed(texts, model)).tolist(),
        "submit": lambda texts: mpool.submit("text_embedding", inputs=texts, model=model).result().tolist(),
        "submit rerank": lambda texts: scores(mpool.submit("text_embedding", query="one", documents=texts,
                                                           model=scorer).result()),
        "encode": lambda texts: ours.encode(texts).tolist(),
        "encode_query": lambda texts: ours.encode_query(texts).tolist(),
        "adapters": lambda texts: _requests.embed(model, texts, "document", {}).tolist(),
        "adapters rerank": lambda texts: _requests.scores(scorer, "one", texts, {}).values.tolist(),
    }


VERBS = ("embed", "null", "embed_iter", "embed_tokens", "rerank", "classify", "aio", "submit", "submit rerank",
         "encode", "encode_query", "adapters", "adapters rerank")


@pytest.mark.parametrize("verb", VERBS)
def test_rows_are_read_in_their_order(calls: dict[str, Callable[[Any], Any]], verb: str) -> None:
    wanted = calls[verb](list(TEXTS))
    for name, texts in ROWS.items():
        assert calls[verb](texts) == wanted, name


@pytest.mark.parametrize("verb", VERBS)
def test_other_containers_are_refused(calls: dict[str, Callable[[Any], Any]], verb: str) -> None:
    for name, made in NO_ROWS.items():
        if verb.startswith("encode") and name == "dict":
            continue  # {"text": ...} is one text, as in sentence-transformers
        with pytest.raises(mpool.InvalidArgument, match="inputs|iterable|documents|texts"):
            pytest.fail(f"{name}: {calls[verb](made())}")


@pytest.mark.parametrize("rows", [
    pandas.Series(["one", pandas.NA], dtype="string", index=[7, 3]), pandas.Series(["one", None]),
    pandas.Series(["one", float("nan")]), pandas.Series(["one", pandas.NaT], dtype=object), ["one", pandas.NA],
    np.array(["one", None], dtype=object)], ids=lambda rows: repr(list(rows)))
def test_missing_rows_of_pandas(bert: Path, rows: Any) -> None:
    """An error that names the row, or a row of NaN; every verb, also with an iterator and in the look-alike."""
    from mpool.integrations.sentence_transformers import SentenceTransformer

    with mpool.Pool() as pool:
        found = [pool.embed(rows, bert, on_error="null"), np.stack(list(pool.embed_iter(rows, bert, on_error="null"))),
                 asyncio.run(aio.embed(rows, bert, on_error="null", pool=pool)),
                 pool.submit("text_embedding", inputs=rows, model=bert, on_error="null").result(60)]
        for vectors in found:
            assert np.array_equal(vectors[0], pool.embed("one", bert)) and np.isnan(vectors[1]).all()
        model = SentenceTransformer(pool.get(bert))
        for call in (lambda: pool.embed(rows, bert), lambda: list(pool.embed_iter(rows, bert)),
                     lambda: pool.embed_sparse(rows, bert), lambda: pool.embed_tokens(rows, bert),
                     lambda: pool.embed_all(rows, bert), lambda: pool.classify(rows, bert, labels=["a", "b"]),
                     lambda: pool.classify_tokens(rows, bert), lambda: pool.rerank("one", rows, bert),
                     lambda: model.encode(rows)):
            with pytest.raises(mpool.InvalidArgument) as caught:
                call()
            assert (caught.value.param or "").endswith("[1]")


def test_missing_rows_of_arrow_have_no_vector(bert: Path) -> None:
    found = mpool.embed(pyarrow.array(["one", None]), str(bert), on_error="null")
    assert np.isfinite(found[0]).all() and np.isnan(found[1]).all()


def test_tables_of_images_are_refused(tmp_path: Path) -> None:
    from mpool.images.loading import images_of

    for made in ("table", "arrow table", "other table", "batch", "dict", "set"):
        with pytest.raises(mpool.InvalidArgument, match="images"):
            images_of(NO_ROWS[made](), 100)
    assert images_of(pyarrow.array(["a.png", "b.png"]), 100) == ["a.png", "b.png"]


def test_labels_of_other_containers() -> None:
    from mpool.tasks.classification import _labels

    for labels in (np.array(TEXTS), pandas.Series(TEXTS, index=[2, 1, 0]), pyarrow.array(TEXTS)):
        assert _labels(labels, 100) == tuple(TEXTS)
    for made in NO_ROWS.values():
        with pytest.raises(mpool.InvalidArgument, match="labels"):
            _labels(made(), 100)
