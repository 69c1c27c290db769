"""The look-alikes of sentence-transformers' classes, compared with that library on the same folders."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.integrations.sentence_transformers import CrossEncoder, SentenceTransformer

torch = pytest.importorskip("torch")
library = pytest.importorskip("sentence_transformers")

TEXTS = ["one", "the quick brown fox jumps over the lazy dog", "", "two three four five"]
PAIRS = [("what is this", "a text"), ("another query", "one two three"), ("what is this", "the lazy dog")]


@pytest.fixture(scope="module", params=["bert", "prompted"])
def both(request: Any) -> Iterator[tuple[Any, Any]]:
    folder = str(request.getfixturevalue(request.param))
    yield SentenceTransformer(folder), library.SentenceTransformer(folder, device="cpu")


@pytest.fixture(scope="module")
def rankers(ranker: Path) -> tuple[Any, Any]:
    return CrossEncoder(str(ranker)), library.CrossEncoder(str(ranker), device="cpu")


def _same(found: Any, wanted: Any) -> None:
    """Check type, shape, dtype, and values to 1e-4 of the scale."""
    assert type(found) is type(wanted), (type(found), type(wanted))
    if isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted):
            _same(one, other)
        return
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    one, other = (np.asarray(value, dtype=np.float64) for value in (found, wanted))
    assert other.size == 0 or np.abs(one - other).max() <= 1e-4 * max(1.0, np.abs(other).max())


@pytest.mark.parametrize("inputs", [TEXTS, "one text", ["one text"], [], np.array(TEXTS), tuple(TEXTS)],
                         ids=["list", "str", "one", "none", "array", "tuple"])
@pytest.mark.parametrize("options", [
    {}, {"convert_to_tensor": True}, {"convert_to_numpy": False}, {"normalize_embeddings": True},
    {"truncate_dim": 8}, {"truncate_dim": 8, "normalize_embeddings": True}, {"truncate_dim": 100_000},
    {"prompt": "query: "}, {"batch_size": 2, "show_progress_bar": False, "device": "cpu"},
    {"precision": "binary"}, {"precision": "ubinary"}], ids=str)
def test_encode(both: tuple[Any, Any], inputs: Any, options: dict[str, Any]) -> None:
    ours, theirs = both
    found, wanted = ours.encode(inputs, **options), theirs.encode(inputs, **options)
    if str(options.get("precision", "")).endswith("binary") and len(wanted):
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        wrong = np.unpackbits((found ^ wanted).view(np.uint8)).mean()  # a component of about 0 may have either sign
        assert wrong < 0.05
        return
    _same(found, wanted)


def test_scalar_precisions(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    texts = [f"text number {at}" for at in range(120)]
    for precision in ("int8", "uint8"):
        found, wanted = (model.encode(texts, precision=precision) for model in both)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert np.abs(found.astype(int) - wanted.astype(int)).max() <= 1
    assert ours.encode(texts).shape == theirs.encode(texts).shape


@pytest.mark.parametrize("inputs", [TEXTS[:2], "one text"], ids=["list", "str"])
def test_token_embeddings(both: tuple[Any, Any], inputs: Any) -> None:
    found, wanted = (model.encode(inputs, output_value="token_embeddings") for model in both)
    _same(found, wanted)


def test_prompts(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    assert ours.prompts == theirs.prompts and ours.default_prompt_name == theirs.default_prompt_name
    for method in ("encode", "encode_query", "encode_document"):
        _same(getattr(ours, method)(TEXTS), getattr(theirs, method)(TEXTS))
        _same(getattr(ours, method)("one", prompt="x "), getattr(theirs, method)("one", prompt="x "))
    for name in ours.prompts:
        _same(ours.encode(TEXTS, prompt_name=name), theirs.encode(TEXTS, prompt_name=name))


def test_prompts_of_the_constructor(prompted: Path) -> None:
    options: dict[str, Any] = {"prompts": {"query": "find: ", "own": "own: "}, "default_prompt_name": "own"}
    ours = SentenceTransformer(prompted, **options)
    theirs = library.SentenceTransformer(str(prompted), device="cpu", **options)
    for method in ("encode", "encode_query", "encode_document"):
        _same(getattr(ours, method)(TEXTS), getattr(theirs, method)(TEXTS))


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean", "manhattan", None])
def test_similarity(bert: Path, metric: Any) -> None:
    ours = SentenceTransformer(bert, similarity_fn_name=metric)
    theirs = library.SentenceTransformer(str(bert), device="cpu", similarity_fn_name=metric)
    assert ours.similarity_fn_name == str(theirs.similarity_fn_name)
    rows = ours.encode(TEXTS)
    for one, other in ((rows, rows[:2]), (rows[0], rows)):
        _same(ours.similarity(torch.as_tensor(one), torch.as_tensor(other)), theirs.similarity(one, other))
        assert isinstance(ours.similarity(one, other), np.ndarray)
    _same(ours.similarity_pairwise(list(torch.as_tensor(rows)), rows), theirs.similarity_pairwise(rows, rows))


def test_facts(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    assert ours.max_seq_length == theirs.max_seq_length == ours.get_max_seq_length()
    assert ours.get_sentence_embedding_dimension() == theirs.get_sentence_embedding_dimension()
    with ours.truncate_sentence_embeddings(8), theirs.truncate_sentence_embeddings(8):
        assert ours.get_embedding_dimension() == theirs.get_embedding_dimension() == 8
        _same(ours.encode(TEXTS), theirs.encode(TEXTS))
    assert ours.truncate_dim is None
    found, wanted = (model.tokenize(TEXTS) for model in both)
    for name in ("input_ids", "attention_mask"):
        assert found[name].dtype == wanted[name].dtype
        assert torch.equal(found[name] * found["attention_mask"], wanted[name] * wanted["attention_mask"])


def test_pool_of_processes_is_not_needed(both: tuple[Any, Any]) -> None:
    ours, _ = both
    pool = ours.start_multi_process_pool()
    _same(ours.encode_multi_process(TEXTS, pool), ours.encode(TEXTS))
    _same(ours.encode(TEXTS, pool=pool, device=["cpu", "cpu"], chunk_size=1), ours.encode(TEXTS))
    ours.stop_multi_process_pool(pool)


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"precision": "int4"}, {"prompt_name": "none"},
                                     {"unknown": 1}], ids=str)
def test_errors_are_of_the_same_kind(both: tuple[Any, Any], options: dict[str, Any]) -> None:
    for model in both:
        with pytest.raises(ValueError, match="(?i)" + next(iter(options)).split("_")[0]):
            model.encode(TEXTS, **options)


def test_options_that_do_not_exist_say_what_to_do(bert: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SentenceTransformer(bert)
    for options, name in (({"device": "cuda"}, "device"), ({"output_value": None}, "output_value")):
        with pytest.raises(mpool.InvalidArgument, match=name):
            model.encode("a", **options)  # type: ignore[arg-type]
    with pytest.raises(mpool.Unsupported, match="revision") as caught:
        SentenceTransformer(bert, revision="main")
    assert "owner/name@revision" in (caught.value.hint or "")
    with pytest.raises(TypeError, match="unknown"):
        SentenceTransformer(bert, unknown=1)
    assert SentenceTransformer(bert, backend="torch", trust_remote_code=False).device == "cpu"
    with pytest.raises(mpool.WrongCapability):
        SentenceTransformer(llama)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert model.encode("a").ndim == 1
    with pytest.raises(mpool.Unsupported, match="torch"):
        model.encode("a", convert_to_tensor=True)


def test_predict(rankers: tuple[Any, Any]) -> None:
    ours, theirs = rankers
    for options in ({}, {"convert_to_tensor": True}, {"convert_to_numpy": False}):
        _same(ours.predict(PAIRS, **options), theirs.predict(PAIRS, **options))
    _same(ours.predict([list(pair) for pair in PAIRS]), theirs.predict([list(pair) for pair in PAIRS]))
    found, wanted = (model.predict(PAIRS[0]) for model in rankers)
    assert type(found) is type(wanted) and abs(found - wanted) <= 1e-4
    for bad in ([("a",)], [("a", 3)], [("a", "b"), 3], "text"):
        with pytest.raises(mpool.InvalidArgument, match="inputs"):
            ours.predict(bad)
    assert ours.predict([]).shape == (0,)
    with pytest.raises(mpool.InvalidArgument, match="activation_fn"):
        ours.predict(PAIRS, activation_fn=torch.nn.Identity())


def test_rank(rankers: tuple[Any, Any]) -> None:
    documents = [document for _, document in PAIRS]
    for options in ({}, {"top_k": 2}, {"return_documents": True}):
        found, wanted = (model.rank("what is this", documents, **options) for model in rankers)
        assert [one.keys() for one in found] == [one.keys() for one in wanted]
        assert [(one["corpus_id"], one.get("text")) for one in found] \
            == [(one["corpus_id"], one.get("text")) for one in wanted]
        assert all(abs(one["score"] - other["score"]) <= 1e-4 for one, other in zip(found, wanted))


def test_progress_bar_follows_the_logger(bert: Path, capsys: pytest.CaptureFixture[str],
                                         caplog: pytest.LogCaptureFixture) -> None:
    model = SentenceTransformer(bert)
    model.encode(TEXTS)
    assert capsys.readouterr().err == ""
    with caplog.at_level(logging.INFO, "mpool"):
        model.encode(TEXTS, show_progress_bar=False)
        assert capsys.readouterr().err == ""
    model.encode(TEXTS, show_progress_bar=True)
    assert capsys.readouterr().err != ""
