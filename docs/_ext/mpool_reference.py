"""Directives that make reference tables from the program, so that no page repeats by hand what the code says."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Generated(SphinxDirective):
    """A directive whose content is Markdown that :meth:`lines` writes."""

    has_content = False

    def lines(self) -> Iterator[str]:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        text = StringList(list(self.lines()), source=self.get_source_info()[0])
        holder = nodes.section()
        holder.document = self.state.document
        self.state.nested_parse(text, self.content_offset, holder, match_titles=True)
        return holder.children


class CatalogueTable(Generated):
    """The models that have a key."""

    def lines(self) -> Iterator[str]:
        from mpool.models import load_catalogue

        yield from ("| key | also | capability | memory | hashes | licence |", "|---|---|---|---|---|---|")
        catalogue = load_catalogue()
        for row in catalogue.rows.values():
            name = f"`{row.key}`{catalogue.default_note(row.key)}"
            also = ", ".join(f"`{alias}`" for alias in row.aliases)
            yield (f"| {name} | {also} | `{row.capability}` | {row.est_memory_allocation_mb:,} MB | "
                   f"{'unpinned' if row.unpinned else 'pinned'} | {row.license} |")


class OptionTypes(Generated):
    """The named types in the signatures of functions."""

    def lines(self) -> Iterator[str]:
        from mpool.completions import FinishReason
        from mpool.runtime.events import Kind
        from mpool.search.similarities import Metric
        from mpool.tasks import options

        aliases = {name: getattr(options, name) for name in ("Compute", "Precision", "Priority", "Policy", "Progress")}
        yield "```{eval-rst}"
        for name, alias in {**aliases, "FinishReason": FinishReason, "Kind": Kind, "Metric": Metric,
                            "ImageInput": "str | os.PathLike[str] | bytes | bytearray | memoryview | Image | NDArray"
                            }.items():
            text = str(alias).replace("typing.", "").replace("collections.abc.", "")
            yield from (f".. py:type:: {name}", f"   :canonical: {text}", "")
        yield "```"


class CommandLine(Generated):
    """Every command of ``mpool`` with its help, in the words of the parser."""

    def lines(self) -> Iterator[str]:
        from mpool.cli.parser import make_parser

        yield from _command("mpool", make_parser(), 2)


def _command(name: str, parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    yield from ("#" * level + f" `{name}`", "", "```text", *_help(parser), "```", "")
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            seen: set[int] = set()
            for child, sub in action.choices.items():
                if id(sub) not in seen:
                    seen.add(id(sub))
                    yield from _command(f"{name} {child}", sub, min(level + 1, 4))


def _help(parser: argparse.ArgumentParser) -> list[str]:
    os.environ["COLUMNS"] = "80"  # argparse wraps at the width of the terminal
    lines = parser.format_help().rstrip().splitlines()
    return [line[max(0, len(line) - 80):] for line in lines]  # a long choice in the usage is indented less


def _dashes(app: Sphinx, document: nodes.document) -> None:
    """Write a dash between a parameter and its description. Without smart quotes, Sphinx leaves two hyphens there."""
    for text in list(document.findall(nodes.Text)):
        if " -- " in text and not isinstance(text.parent, (nodes.literal, nodes.literal_block)):
            text.parent.replace(text, nodes.Text(text.replace(" -- ", " \N{EN DASH} ")))


def setup(app: Sphinx) -> dict[str, Any]:
    for name, directive in (("mpool-catalogue", CatalogueTable), ("mpool-cli", CommandLine),
                            ("mpool-types", OptionTypes)):
        app.add_directive(name, directive)
    app.connect("doctree-read", _dashes)
    return {"parallel_read_safe": True}
