"""Every output of a text encoder: its functions, its results as bytes, its route, its command."""

from __future__ import annotations

import json
from collections.abc import Callable
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
        submit: value of ``output`` for :func:`mpool.submit`.
        path, body, of_route: route, additional members of its body, and function from a response to results of texts.
        command: arguments of the command that prints it.
        of_line: function from a line of the command, parsed as JSON, to the result of a text.
        of_text: function from the result of a text to what ``of_route`` and ``of_line`` return.
    """

    model: str
    function: str
    parameter: str = "inputs"
    options: dict[str, Any] = field(default_factory=dict)
    submit: str = ""
    path: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    of_route: Callable[[Any], list[Any]] = list
    command: tuple[str, ...] = ()
    of_line: Callable[[dict[str, Any]], Any] = dict
    of_text: Callable[[Any], Any] = list

    def call(self, pool: mpool.Pool, texts: list[str], model: Any, **more: Any) -> Any:
        """Return the result of the function of a pool."""
        return getattr(pool, self.function)(texts, model, **self.options, **more)

    def acall(self, pool: mpool.Pool, texts: list[str], model: Any, **more: Any) -> Any:
        """Return the awaitable of :mod:`mpool.aio`."""
        return getattr(aio, self.function)(texts, model, pool=pool, **self.options, **more)

    def job(self, pool: mpool.Pool, texts: list[str], model: Any, **more: Any) -> mpool.Job:
        """Return the job of :func:`mpool.submit`."""
        return pool.submit("text_embedding", **{self.parameter: texts}, model=model, output=self.submit,
                           **self.options, **more)

    def iterate(self, pool: mpool.Pool, texts: Any, model: Any, batch_size: int | None = None, **more: Any) -> Any:
        """Return the iterator of :func:`mpool.embed_iter`."""
        return pool.embed_iter(texts, model, output=self.submit, batch_size=batch_size, **self.options, **more)


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
    return [_bytes_of_spans(spans) for spans in found]


def bytes_of_one(found: Any) -> bytes:
    """Return the bytes of what :func:`mpool.embed_iter` yields for one text."""
    if isinstance(found, mpool.TextEmbeddings):
        return bytes_of(found)[0]
    if isinstance(found, mpool.Classification):
        return bytes(found.scores.tobytes())
    if isinstance(found, mpool.TokenClassification):
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


OUTPUTS = {
    "dense": Output(
        "m3", "embed", submit="dense", path="/embed", command=("embed",), of_line=lambda line: _f32(line["embedding"]),
        of_text=lambda row: row.tolist()),
    "static": Output(
        "letters", "embed", submit="dense", path="/embed", command=("embed",),
        of_line=lambda line: _f32(line["embedding"]), of_text=lambda row: row.tolist()),
    "sparse": Output(
        "m3", "embed_sparse", submit="sparse", path="/embed_sparse",
        of_route=lambda rows: [([one["index"] for one in row], [one["value"] for one in row]) for row in rows],
        command=("embed", "--vectors", "sparse"),
        of_line=lambda line: (line["sparse"]["indices"], _f32(line["sparse"]["values"])), of_text=_pair),
    "tokens": Output(
        "m3", "embed_tokens", submit="tokens", path="/embed_all", command=("embed", "--vectors", "tokens"),
        of_line=lambda line: _f32(line["tokens"]), of_text=lambda matrix: matrix.tolist()),
    "all": Output("m3", "embed_all", submit="all", command=("embed", "--vectors", "all"),
                  of_line=lambda line: (_f32(line["embedding"]), line["sparse"]["indices"],
                                        _f32(line["sparse"]["values"]), _f32(line["tokens"]))),
    "labels": Output(
        "ranker", "classify", "texts", submit="labels", path="/predict",
        of_route=lambda rows: [[one["score"] for one in row] for row in rows], command=("classify", "--json"),
        of_line=lambda line: [one["score"] for one in line["results"]], of_text=lambda one: one.scores.tolist()),
    "spans": Output(
        "tagger", "classify_tokens", "texts", {"aggregation": "simple"}, "spans",
        path="/classify_tokens",
        of_route=lambda rows: [[[one["entity_group"], one["score"], one["start"], one["end"]] for one in row]
                               for row in rows],
        command=("classify", "--tokens", "--json"),
        of_line=lambda line: [[one["label"], one["score"], one["start"], one["end"]] for one in line["spans"]],
        of_text=_spans)}


def texts_of(result: Any) -> list[Any]:
    """Return the result of each text."""
    if isinstance(result, mpool.TextEmbeddings):
        return [(dense.tolist(), *_pair(sparse), tokens.tolist())
                for dense, sparse, tokens in zip(result.dense, result.sparse, result.tokens)]
    return list(result)
