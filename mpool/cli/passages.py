"""Texts that ``mpool search`` and ``mpool rerank`` compare with a query: passages of files and folders, arguments, and
lines of standard input and of ``--file``.

A passage is one or more whole paragraphs. Memory use does not depend on the size of a file.
"""

from __future__ import annotations

import argparse
import codecs
import io
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..errors import InvalidArgument
from .common import check_source, lines_in, note

#: Characters of a passage. An empty line ends a passage of at least _ENOUGH characters; no passage has more than _MOST,
#: about 200 tokens of English: all-MiniLM-L6-v2 reads 256.
_ENOUGH, _MOST = 300, 800
#: Largest file of a folder, in bytes. Larger ones are data rather than documents. Files that are named have no limit.
_LARGEST = 1 << 22
#: Largest number of files in a folder and its subfolders.
_MOST_FILES = 10_000
#: Bytes at the beginning of a file that show if it is text.
_SNIFFED = 1 << 16

#: Texts that look like paths, such as ``notes/``, ``a.md`` and ``*.txt``.
_PATH = re.compile(r"\S*(/|\.[A-Za-z]{2,5})")


class Passage(NamedTuple):
    """A text and its place.

    Attributes:
        text: the text.
        file: path of its file; "-": standard input; None: the text is an argument.
        line: first line in the file, or number of the argument; the first is 1.
    """

    text: str
    file: str | None
    line: int

    def place(self) -> str:
        """Return where the text stands, for errors."""
        if self.file is None:
            return f"text {self.line} of the command line"
        return f"line {self.line} of {'standard input' if self.file == '-' else self.file}"


def passages_of(arguments: argparse.Namespace) -> Iterator[Passage]:
    """Return the texts of a command, without blank ones. An argument that is the path of a file or folder is read.

    Raises:
        InvalidArgument: there are both arguments and ``--file``, or a folder has too many files.
        OSError: a file of ``--file`` does not exist.
    """
    check_source(arguments)
    sources: list[tuple[str, list[str] | None]] = []  # arguments, with the files that they stand for
    for given in arguments.text or arguments.file or ["-"]:
        if given == "-":
            sources.append((given, [given]))
        elif os.path.isdir(given):
            sources.append((given, _files_in(given)))
        elif arguments.file or os.path.exists(given):
            os.stat(given)  # before a model is loaded
            sources.append((given, [given]))
        else:
            if _PATH.fullmatch(given):
                note(f"mpool: {given!r} is a text here: there is no such file")
            sources.append((given, None))
    return _read(sources, by_line=bool(arguments.file))


def _read(sources: Iterable[tuple[str, list[str] | None]], by_line: bool) -> Iterator[Passage]:
    """Yield the passages of the sources. ``by_line``: each line of a file is one, except in a folder."""
    for number, (given, paths) in enumerate(sources, 1):
        if paths is None:
            if given.strip():
                yield Passage(given, None, number)
            continue
        skipped: list[str] = []
        for path in paths:
            if path == "-":
                lines = enumerate(lines_in(sys.stdin, "standard input"), 1)
                yield from (Passage(text, "-", line) for line, text in lines if text.strip())
            elif os.path.isdir(given) and os.path.getsize(path) > _LARGEST:
                skipped.append(path)
            else:
                yield from _passages_in(path, skipped, by_line and not os.path.isdir(given))
        if skipped:
            rest = f" and {len(skipped) - 3} more" if len(skipped) > 3 else ""
            why = f"not UTF-8 text, or larger than {_LARGEST >> 20} MiB" if os.path.isdir(given) else "not UTF-8 text"
            note(f"mpool: skipped ({why}): {', '.join(skipped[:3])}{rest}")


def _files_in(folder: str) -> list[str]:
    """Return the files of a folder and its subfolders in the order of their names, without hidden ones."""
    found: list[str] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (os.path.join(parent, name) for name in sorted(names) if not name.startswith("."))
        found += [path for path in paths if os.path.isfile(path)]
        if len(found) > _MOST_FILES:
            raise InvalidArgument(f"{folder} has more than {_MOST_FILES:,} files", param="text",
                                  hint="Name a smaller folder, or the files")
    return found


def _passages_in(path: str, skipped: list[str], by_line: bool) -> Iterator[Passage]:
    """Yield the passages of a file, or append its path to ``skipped`` if it is not text."""
    with io.BufferedReader(io.FileIO(path), _SNIFFED) as file:
        head = file.peek(_SNIFFED)
        if not _is_text(head, len(head) < _SNIFFED and os.path.isfile(path)):
            skipped.append(path)
            return
        with io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace") as lines:
            texts = lines_in(lines, path)
            yield from (Passage(text, path, line) for line, text in enumerate(texts, 1) if text.strip()) if by_line \
                else _joined(texts, path)


def _is_text(head: bytes, whole: bool) -> bool:
    """Return True if the beginning of a file is UTF-8 text. ``whole``: it is the whole file."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, whole)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _joined(lines: Iterable[str], path: str) -> Iterator[Passage]:
    """Join the lines of paragraphs to passages."""
    held: list[str] = []
    size = first = 0
    for number, line in enumerate(lines, 1):
        for part in textwrap.wrap(line, _MOST) if len(line) > _MOST else [line]:
            blank = not part.strip()
            if held and (size + len(part) > _MOST or (blank and size >= _ENOUGH)):
                yield Passage("\n".join(held).rstrip(), path, first)
                held, size = [], 0
            if held or not blank:
                first = first if held else number
                held.append(part)
                size += len(part) + 1
    if held:
        yield Passage("\n".join(held).rstrip(), path, first)
