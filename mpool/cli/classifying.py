"""``mpool classify``: label texts, or with ``--tokens`` parts of texts."""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import Any

from ..errors import InvalidArgument
from .common import adapter_of, for_output, load, make_pool, print_json, say, texts_of

#: Number of texts that are classified at once: by a classifier, and with the labels of ``--labels``.
_BATCH, _BATCH_PAIRS = 256, 1024
#: Arguments that apply only with ``--tokens``.
_OF_TOKENS = ("aggregation", "stride")


def classify(arguments: argparse.Namespace) -> int:
    """Run ``mpool classify``. Blank lines are skipped."""
    if arguments.tokens:
        return _classify_tokens(arguments)
    for name in _OF_TOKENS:
        if hasattr(arguments, name):
            raise InvalidArgument(f"--{name} needs --tokens", param=name)
    adapters, adapter = adapter_of(arguments)
    options: dict[str, Any] = {"compute": arguments.compute, "truncate": not arguments.no_truncate, "adapter": adapter}
    if arguments.labels is not None:
        options["labels"] = [label.strip() for label in arguments.labels.split(",") if label.strip()]
        if not options["labels"]:
            raise InvalidArgument(param="labels", got=repr(arguments.labels),
                                  allowed="one or more labels, separated by commas")
    for name in ("template", "multi_label", "function_to_apply"):
        if hasattr(arguments, name):
            options[name] = getattr(arguments, name)
    if arguments.pair is not None and arguments.labels is not None:
        raise InvalidArgument("--pair and --labels exclude each other: the labels make the second text of each pair")
    batch = max(1, _BATCH_PAIRS // len(options["labels"])) if options.get("labels") else _BATCH
    source = texts_of(arguments)
    lines = enumerate(source, 1)
    rows: list[dict[str, Any]] = []
    with make_pool(arguments) as pool:
        first = [(line, text) for line, text in enumerate(source.begin()) if text.strip()]
        with source.named([line for line, _ in first]):
            texts = [text if arguments.pair is None else (text, arguments.pair) for _, text in first]
            model = load(pool, "classify", arguments.model, {"texts": texts, "top_k": arguments.top_k, **options},
                         compute=arguments.compute, adapters=adapters, progress=False if arguments.quiet else None)
        while part := list(itertools.islice(lines, batch)):
            given = [(line, text) for line, text in part if text.strip()]
            if not given:
                continue
            inputs: Any = [text if arguments.pair is None else (text, arguments.pair) for _, text in given]
            count = len(given) * max(1, len(options.get("labels", ())))
            with source.named([line - 1 for line, _ in given]):
                found = model.classify(inputs, top_k=arguments.top_k, max_inputs=count, progress=False, **options)
            for (line, text), one in zip(given, found):
                if arguments.json:
                    rows.append({"line": line, "text": text, "label": one.label, "score": one.score,
                                 "results": [{"label": each.label, "score": each.score} for each in one]})
                else:
                    _print(text, one, arguments)
    if arguments.json:
        print_json(rows)
    return 0


def _classify_tokens(arguments: argparse.Namespace) -> int:
    """Run ``mpool classify --tokens``. Blank lines are skipped."""
    for name, option in (("pair", "--pair"), ("labels", "--labels"), ("top_k", "--top-k"), ("template", "--template"),
                         ("multi_label", "--multi-label"), ("function_to_apply", "--function-to-apply")):
        if getattr(arguments, name, None) is not None:
            raise InvalidArgument(f"{option} and --tokens exclude each other", param=name)
    options = {name: getattr(arguments, name) for name in _OF_TOKENS if hasattr(arguments, name)}
    adapters, adapter = adapter_of(arguments)
    options = {"aggregation": "simple", **options, "compute": arguments.compute, "truncate": not arguments.no_truncate,
               "adapter": adapter}
    source = texts_of(arguments)
    lines = ((line, text) for line, text in enumerate(source, 1) if text.strip())
    rows: list[dict[str, Any]] = []
    with make_pool(arguments) as pool:
        first = [(line, text) for line, text in enumerate(source.begin()) if text.strip()]
        with source.named([line for line, _ in first]):
            model = load(pool, "classify_tokens", arguments.model, {"texts": [text for _, text in first], **options},
                         compute=arguments.compute, adapters=adapters, progress=False if arguments.quiet else None)
        while part := list(itertools.islice(lines, _BATCH)):
            with source.named([line - 1 for line, _ in part]):
                found = model.classify_tokens([text for _, text in part], progress=False, **options)
            for (line, text), spans in zip(part, found):
                if arguments.json:
                    rows.append({"line": line, "text": text, "spans": [
                        {"label": one.label, "score": one.score, "start": one.start, "end": one.end, "word": one.word}
                        for one in spans]})
                    continue
                for one in spans:
                    say(f"{line}:{one.start}-{one.end}  {one.score:.4f} {for_output(one.label, sys.stdout)}  "
                        f"{for_output(text[one.start:one.end], sys.stdout)}")
    if arguments.json:
        print_json(rows)
    return 0


def _print(text: str, found: Any, arguments: argparse.Namespace) -> None:
    """Print the best label and the text, or with ``--top-k`` the best labels."""
    best = found.results[:arguments.top_k or 1]
    labels = ", ".join(f"{one.score:.4f} {for_output(one.label, sys.stdout)}" for one in best)
    say(f"{labels}  {for_output(text, sys.stdout)}")
