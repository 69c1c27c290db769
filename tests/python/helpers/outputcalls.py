"""Every output of a text encoder: its functions, its results as bytes, its route, its command."""

import json
from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import mpool
from mpool import aio


@dataclass(frozen=True)
class Output:
    """An output of a text encoder.

    Attributes:
        model: fixture with a folder of a model that has it.
        function: name of the function that computes it, in :mod:`mpool`, in :mod:`mpool.aio` and of a model.
        parameter: name of the function's texts.
        options: options of the function.
        list_options: further options of the function that iterators do not have.
        submit: value of ``output`` for :func:`mpool.submit`.
        path, body, of_route: route, additional members of its body, and function from a response to results of texts.
        command: arguments of the command that prints it.
        of_line: function from a line of the command, parsed as JSON, to the result of a text.
        of_text: function from the result of a text to what ``of_route`` and ``of_line`` return.
        queued: False if a job is complete when it is submitted, because no network computes the result.
    """

    model: str
    function: str
    parameter: str = "inputs"
    options: dict[str, Any] = field(default_factory=dict)
    list_options: dict[str, Any] = field(default_factory=dict)
    submit: str = ""
    path: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    of_route: Callable[[Any], list[Any]] = list
    command: tuple[str, ...] = ()
    of_line: Callable[[dict[str, Any]], Any] = dict
    of_text: Callable[[Any], Any] = list
    queued: bool = True

    def call(self, pool: mpool.Pool, texts: list[str], model: Any, **more: Any) -> Any:
        """Return the result of the function of a pool."""
        return getattr(pool, self.function)(texts, model, **self.options, **self.list_options, **more)

    def of_model(self, model: mpool.Model, texts: list[str]) -> Any:
        """Return the result of the function of a model."""
        return getattr(model, self.function)(texts, **self.options, **self.list_options)

    def acall(self, pool: mpool.Pool, texts: list[str], model: Any, **more: Any) -> Any:
        """Return the awaitable of :mod:`mpool.aio`."""
        return getattr(aio, self.function)(texts, model, pool=pool, **self.options, **self.list_options,
                                            **more)

    def job(self, pool: mpool.Pool, texts: list[str], model: Any, **more: Any) -> mpool.Job:
        """Return the job of :func:`mpool.submit`."""
        return pool.submit("text_embedding", **{self.parameter: texts}, model=model, output=self.submit,
                           **self.options, **self.list_options, **more)

    def iterate(self, pool: mpool.Pool, texts: Any, model: Any, batch_size: int | None = None, **more: Any) -> Any:
        """Return the iterator of :func:`mpool.embed_iter`."""
        return pool.embed_iter(texts, model, output=self.submit, batch_size=batch_size, **self.options, **more)

    def aiterate(self, pool: mpool.Pool, texts: Any, model: Any) -> Any:
        """Return the asynchronous iterator of :func:`mpool.aio.embed_iter`."""
        return aio.embed_iter(texts, model, pool=pool, output=self.submit, **self.options)

    def payload(self, texts: list[str], model: str) -> dict[str, Any]:
        """Return the body of a request to ``path``."""
        inputs: Any = [[text] for text in texts] if self.path == "/predict" else texts
        return {"inputs": inputs, "model": model, **self.body}

    def lines(self, printed: str) -> list[Any]:
        """Return what the command printed, one object per text."""
        found: list[Any] = (json.loads(printed) if "--json" in self.command
                            else [json.loads(line) for line in printed.splitlines()])
        return found


#: Query of the tests of reranking.
QUERY = "w7 w31 Which dog jumps over w3?"


class Scores(Output):
    """Scores of texts for QUERY. Iterators have labels of pairs in place of an output of their own."""

    def call(self, pool: mpool.Pool, texts: list[str], model: Any, **more: Any) -> Any:
        return pool.rerank(QUERY, texts, model, **more)

    def of_model(self, model: mpool.Model, texts: list[str]) -> Any:
        return model.rerank(QUERY, texts)

    def acall(self, pool: mpool.Pool, texts: list[str], model: Any, **more: Any) -> Any:
        return aio.rerank(QUERY, texts, model, pool=pool, **more)

    def job(self, pool: mpool.Pool, texts: list[str], model: Any, **more: Any) -> mpool.Job:
        return pool.submit("text_embedding", query=QUERY, documents=texts, model=model, **more)

    def iterate(self, pool: mpool.Pool, texts: Any, model: Any, batch_size: int | None = None, **more: Any) -> Any:
        return super().iterate(pool, _pairs(texts), model, batch_size, **more)

    def aiterate(self, pool: mpool.Pool, texts: Any, model: Any) -> Any:
        return super().aiterate(pool, _pairs(texts), model)

    def payload(self, texts: list[str], model: str) -> dict[str, Any]:
        return {"query": QUERY, "texts": texts, "model": model, **self.body}

    def lines(self, printed: str) -> list[Any]:
        return sorted(super().lines(printed), key=lambda row: row["line"])


def _pairs(texts: Any) -> Any:
    """Return pairs of QUERY and each text: a list, an iterator or an asynchronous iterator, as the texts are."""
    if isinstance(texts, (list, tuple)):
        return [(QUERY, text) for text in texts]
    if isinstance(texts, AsyncIterable):
        return ((QUERY, text) async for text in texts)
    return ((QUERY, text) for text in texts)


def bytes_of(found: Any) -> list[bytes]:
    """Return the bytes of each text of a result, whatever the result is."""
    if isinstance(found, np.ndarray):
        return [row.tobytes() for row in found]
    if isinstance(found, mpool.TextEmbeddings):
        parts = (bytes_of(one) for one in (found.dense, found.sparse, found.tokens) if one is not None)
        return [b"".join(each) for each in zip(*parts, strict=True)]
    if isinstance(found, mpool.SparseVectors):
        return [ids.tobytes() + values.tobytes() for ids, values in found]
    if isinstance(found, mpool.TokenVectors):
        return [matrix.tobytes() for matrix in found]
    if isinstance(found, mpool.Classifications):
        return [one.scores.tobytes() for one in found]
    if isinstance(found, mpool.Ranking):
        return [np.float32(score).tobytes() for score in found.scores]
    return [_bytes_of_spans(spans) for spans in found]


def bytes_of_one(found: Any) -> bytes:
    """Return the bytes of what :func:`mpool.embed_iter` yields for one text."""
    if isinstance(found, mpool.TextEmbeddings):
        return bytes_of(found)[0]
    if isinstance(found, mpool.results.Classification):
        return bytes(found.scores.tobytes())
    if isinstance(found, mpool.results.TokenClassification):
        return _bytes_of_spans(found)
    return b"".join(array.tobytes() for array in found) if isinstance(found, tuple) else bytes(found.tobytes())


def _bytes_of_spans(spans: Any) -> bytes:
    return json.dumps(_spans(spans)).encode()


def _spans(spans: Any) -> list[Any]:
    return [[one.label, one.score, one.start, one.end] for one in spans]


def _pair(found: Any) -> tuple[list[int], list[float]]:
    return found[0].tolist(), found[1].tolist()


def _f32(values: Any) -> Any:
    return np.float32(values).tolist()


def _sparse(model: str, *command: str, **more: Any) -> Output:
    return Output(
        model, "embed_sparse", submit="sparse", path="/embed_sparse",
        of_route=lambda rows: [([one["index"] for one in row], [one["value"] for one in row]) for row in rows],
        command=("embed", "--vectors", "sparse", *command),
        of_line=lambda line: (line["sparse"]["indices"], _f32(line["sparse"]["values"])), of_text=_pair, **more)


def _tokens(model: str, *command: str, **more: Any) -> Output:
    return Output(model, "embed_tokens", submit="tokens", path="/embed_all",
                  command=("embed", "--vectors", "tokens", *command), of_line=lambda line: _f32(line["tokens"]),
                  of_text=lambda matrix: matrix.tolist(), **more)


def _task(name: str) -> dict[str, Any]:
    """Return the options and the members of the body for a task."""
    return {"options": {"task": name}, "body": {"task": name}}


def _labels(model: str) -> Output:
    """Scores in the order of the model's labels; the route and the command sort them."""
    return Output(
        model, "classify", "texts", submit="labels", path="/predict",
        of_route=lambda rows: [_by_label(row) for row in rows], command=("classify", "--json"),
        of_line=lambda line: _by_label(line["results"]), of_text=lambda one: _by_label(
            [{"label": each.label, "score": each.score} for each in one]))


def _by_label(results: list[dict[str, Any]]) -> list[Any]:
    return sorted([one["label"], one["score"]] for one in results)


def _spans_of(model: str, aggregation: str, *command: str, **more: Any) -> Output:
    return Output(
        model, "classify_tokens", "texts", {"aggregation": aggregation}, submit="spans", path="/classify_tokens",
        of_route=lambda rows: [[[one["entity_group"], one["score"], one["start"], one["end"]] for one in row]
                               for row in rows],
        command=("classify", "--tokens", "--json", *command),
        of_line=lambda line: [[one["label"], one["score"], one["start"], one["end"]] for one in line["spans"]],
        of_text=_spans, **more)


#: Labels of the tests of zero-shot classification.
LABELS = ("w3 dogs", "w5", "a fox2 that jumps")

OUTPUTS = {
    "dense": Output(
        "m3", "embed", submit="dense", path="/embed", command=("embed",), of_line=lambda line: _f32(line["embedding"]),
        of_text=lambda row: row.tolist()),
    "static": Output(
        "letters", "embed", submit="dense", path="/embed", command=("embed",),
        of_line=lambda line: _f32(line["embedding"]), of_text=lambda row: row.tolist()),
    "sparse": _sparse("m3"),
    "splade": _sparse("splade"),
    "query table": _sparse("query_table", "--task", "query", queued=False, **_task("query")),
    "documents of a query table": _sparse("query_table", "--task", "document", **_task("document")),
    "tokens": _tokens("m3"),
    "queries of ColBERT": _tokens("colbert", "--task", "query", **_task("query")),
    "documents of ColBERT": _tokens("colbert", "--task", "document", **_task("document")),
    "all": Output("m3", "embed_all", submit="all", command=("embed", "--vectors", "all"),
                  of_line=lambda line: (_f32(line["embedding"]), line["sparse"]["indices"],
                                        _f32(line["sparse"]["values"]), _f32(line["tokens"]))),
    "labels": _labels("sentiment"),
    "several labels": _labels("topics"),
    "zero-shot": Output(
        "nli", "classify", "texts", {"labels": LABELS}, {"max_inputs": 1 << 20}, "labels",
        command=("classify", "--json", "--labels", ",".join(LABELS)), of_line=lambda line: _by_label(line["results"]),
        of_text=lambda one: _by_label([{"label": each.label, "score": each.score} for each in one])),
    "spans": _spans_of("tagger", "simple"),
    "spans of words": _spans_of("names", "first", "--aggregation", "first",
                                body={"parameters": {"aggregation_strategy": "first"}}),
    "scores": Scores(
        "ranker", "rerank", "documents", submit="labels", path="/rerank",
        of_route=lambda rows: [one["score"] for one in sorted(rows, key=lambda one: one["index"])],
        command=("rerank", "--json", QUERY), of_line=lambda line: line["score"], of_text=float)}


def texts_of(result: Any) -> list[Any]:
    """Return the result of each text."""
    if isinstance(result, mpool.TextEmbeddings):
        return [(dense.tolist(), *_pair(sparse), tokens.tolist())
                for dense, sparse, tokens in zip(result.dense, result.sparse, result.tokens)]
    return list(result.scores if isinstance(result, mpool.Ranking) else result)
