"""``mpool search`` and ``mpool rerank``: find the texts that answer a query best."""

from __future__ import annotations

import argparse
import heapq
import itertools
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager

from ..errors import InvalidArgument
from ..search import cosines
from .common import (
    adapter_of,
    check_request,
    default_model,
    load,
    make_pool,
    naming,
    print_json,
    say,
)
from .passages import Passage, no_passages, passages_of

#: Number of texts that are embedded at once. Memory use does not depend on the length of the input.
_BATCH = 256


def search(arguments: argparse.Namespace) -> int:
    """Run ``mpool search``."""
    if arguments.top_k < 1:
        raise InvalidArgument(param="top_k", got=str(arguments.top_k), allowed="1 or more")
    source, (adapters, adapter) = passages_of(arguments), adapter_of(arguments)
    name = arguments.model or default_model("text_embedding")
    best: list[tuple[float, int, Passage]] = []  # (score, -index, passage), a heap with the worst first
    count = 0
    part = list(itertools.islice(source, _BATCH))
    if not part:
        raise no_passages(arguments)
    with make_pool(arguments) as pool:
        options = {"compute": arguments.compute, "adapter": adapter}
        with _named(part):
            check_request(pool, "embed", name, {"inputs": [one.text for one in part], **options})
        model = load(pool, "embed", name, {"inputs": arguments.query, **options}, compute=arguments.compute,
                     adapters=adapters, progress=False if arguments.quiet else None)
        query = model.embed(arguments.query, task="query", **options)
        while part:
            with _named(part):
                vectors = model.embed([one.text for one in part], task="document", **options)
            for score, passage in zip(cosines(query, vectors), part):
                found = (score, -count, passage)
                count += 1
                if len(best) < arguments.top_k:
                    heapq.heappush(best, found)
                elif found > best[0]:
                    heapq.heapreplace(best, found)
            part = list(itertools.islice(source, _BATCH))
    _print([(score, passage) for score, _, passage in sorted(best, reverse=True)], arguments)
    return 0


def rerank(arguments: argparse.Namespace) -> int:
    """Run ``mpool rerank``."""
    source, (adapters, adapter) = passages_of(arguments), adapter_of(arguments)
    given = list(source)
    if not given:
        raise no_passages(arguments)
    with make_pool(arguments) as pool:
        options = {"top_k": arguments.top_k, "compute": arguments.compute, "adapter": adapter}
        documents = [one.text for one in given]
        with _named(given):
            model = load(pool, "rerank", arguments.model or default_model("rerank"),
                         {"query": arguments.query, "documents": documents, **options}, compute=arguments.compute,
                         adapters=adapters, progress=False if arguments.quiet else None)
            ranking = model.rerank(arguments.query, documents, **options)
    _print([(one.score, given[one.index]) for one in ranking], arguments)
    return 0


def _named(given: Sequence[Passage]) -> AbstractContextManager[None]:
    """Let errors about a text that is passed to the library name its place."""
    return naming(lambda at, noun: given[at].place() if at < len(given) else None)


def _print(hits: Sequence[tuple[float, Passage]], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json([{"score": score, "file": one.file, "line": one.line, "text": one.text} for score, one in hits])
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for score, one in hits:
        if one.file in (None, "-"):
            say(f"{score:.4f}  {one.text}")
            continue
        say(f"{score:.4f}  {one.file}:{one.line}")
        for line in filter(str.strip, one.text.splitlines()):
            say(textwrap.fill(line, width, initial_indent="    ", subsequent_indent="    ") if width and
                len(line) + 4 > width else f"    {line}")
