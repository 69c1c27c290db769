"""``mpool search`` and ``mpool rerank``: find the texts that answer a query best."""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
from typing import Any

from ..errors import InvalidArgument
from ..search import cosines
from .common import (
    adapter_of,
    check_request,
    default_model,
    for_output,
    load,
    make_pool,
    no_inputs,
    print_json,
    say,
    texts_of,
)

#: Number of texts that are embedded at once. Memory use does not depend on the length of the input.
_BATCH = 256


def search(arguments: argparse.Namespace) -> int:
    """Run ``mpool search``. Blank lines are skipped."""
    if arguments.top_k < 1:
        raise InvalidArgument(param="top_k", got=str(arguments.top_k), allowed="1 or more")
    source, (adapters, adapter) = texts_of(arguments), adapter_of(arguments)
    name = arguments.model or default_model("text_embedding")
    best: list[tuple[float, int, str]] = []  # (score, -line, text), a heap with the worst first
    count = 0
    with make_pool(arguments) as pool:
        options = {"compute": arguments.compute, "adapter": adapter}
        first = [(line, text) for line, text in enumerate(source.begin()) if text.strip()]
        with source.named([line for line, _ in first]):
            check_request(pool, "embed", name, {"inputs": [text for _, text in first], **options})
        model = load(pool, "embed", name, {"inputs": arguments.query, **options}, compute=arguments.compute,
                     adapters=adapters, progress=False if arguments.quiet else None)
        query = model.embed(arguments.query, task="query", **options)
        while part := list(itertools.islice(source, _BATCH)):
            given = [(count + at, text) for at, text in enumerate(part) if text.strip()]
            count += len(part)
            if not given:
                continue
            with source.named([line for line, _ in given]):
                vectors = model.embed([text for _, text in given], task="document", **options)
            for score, (line, text) in zip(cosines(query, vectors), given):
                found = (score, -line, text)
                if len(best) < arguments.top_k:
                    heapq.heappush(best, found)
                elif found > best[0]:
                    heapq.heapreplace(best, found)
    _print([{"score": score, "line": -line + 1, "text": text} for score, line, text in sorted(best, reverse=True)],
           arguments)
    return 0


def rerank(arguments: argparse.Namespace) -> int:
    """Run ``mpool rerank``. Blank lines are skipped."""
    source, (adapters, adapter) = texts_of(arguments), adapter_of(arguments)
    given = [(line, text) for line, text in enumerate(source) if text.strip()]
    if not given:
        raise no_inputs("text")
    with make_pool(arguments) as pool:
        options = {"top_k": arguments.top_k, "compute": arguments.compute, "adapter": adapter}
        documents = [text for _, text in given]
        with source.named([line for line, _ in given]):
            model = load(pool, "rerank", arguments.model or default_model("rerank"),
                         {"query": arguments.query, "documents": documents, **options}, compute=arguments.compute,
                         adapters=adapters, progress=False if arguments.quiet else None)
            ranking = model.rerank(arguments.query, documents, **options)
    _print([{"score": one.score, "line": given[one.index][0] + 1, "text": one.text} for one in ranking], arguments)
    return 0


def _print(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json(rows)
        return
    for row in rows:
        say(f"{row['score']:.4f}  {for_output(row['text'], sys.stdout)}")
