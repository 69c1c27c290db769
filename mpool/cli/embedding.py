"""``mpool embed`` and ``mpool embed-image``: embed texts or images, as lines of JSON or one numpy array, in constant
memory."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, cast

from .common import make_pool

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Rows written in one go.
_BATCH = 256


def embed(arguments: argparse.Namespace) -> int:
    """Run ``mpool embed``."""
    from ..errors import InvalidArgument

    if arguments.text and arguments.file:
        raise InvalidArgument("texts must be arguments or in a --file, got both")
    form = _form(arguments)
    source = iter(arguments.text) if arguments.text else _lines(arguments.file or ["-"])
    options: dict[str, Any] = {name: getattr(arguments, name) for name in
                               ("task", "prompt", "prompt_name", "dimensions", "normalize", "precision", "compute",
                                "on_error")}
    options["truncate"] = not arguments.no_truncate
    texts: list[str] = []  # texts in flight, until their vectors are written
    with make_pool(arguments) as pool:
        progress = False if arguments.quiet else None
        pool.load(arguments.model or _default(), compute=arguments.compute, progress=progress)
        with _opened(arguments.output) as file:
            writer = _ArrayWriter(file) if form == "npy" else _LineWriter(file, texts)
            for rows in _vectors(pool, source, texts if form == "jsonl" else None, arguments, options):
                writer.rows(rows)
            writer.close()
    return 0


def embed_image(arguments: argparse.Namespace) -> int:
    """Run ``mpool embed-image``."""
    form = _form(arguments)
    options: dict[str, Any] = {name: getattr(arguments, name) for name in
                               ("dimensions", "normalize", "precision", "compute", "on_error", "allow_urls")}
    source = iter(arguments.image) if arguments.image else _lines(["-"])
    whole = options["precision"] in ("int8", "uint8")  # their ranges need all vectors at once
    names: list[str] = []  # those in flight
    count = 0
    with make_pool(arguments) as pool:
        pool.load(arguments.model, compute=arguments.compute, progress=False if arguments.quiet else None)
        with _opened(arguments.output) as file:
            writer = _ArrayWriter(file) if form == "npy" else _LineWriter(file, names, "image")
            while part := list(source if whole else itertools.islice(source, _BATCH)):
                count += len(part)
                names += part
                writer.rows(pool.embed_image(part, arguments.model, max_inputs=len(part), progress=_bar(arguments),
                                             **options))
            _some(count, "image")
            writer.close()
    return 0


def _form(arguments: argparse.Namespace) -> str:
    """The writer for the output format."""
    from ..errors import InvalidArgument

    form: str = arguments.format or ("npy" if (arguments.output or "").endswith(".npy") else "jsonl")
    if form == "npy" and not arguments.output and sys.stdout.isatty():
        raise InvalidArgument("`--format npy` must not write to a terminal",
                              hint="Name a file with --output, or redirect the output")
    return form


def _some(count: int, unit: str) -> None:
    from ..errors import InvalidArgument

    if not count:
        raise InvalidArgument(f"there must be at least one {unit} to embed, got none")


def _default() -> str:
    from ..models import load_catalogue

    return load_catalogue().default("text_embedding").key


def _lines(paths: list[str]) -> Iterator[str]:
    """Lines of files, without line ends."""
    from ..errors import FileError

    for path in paths:
        if path == "-":
            yield from (line.rstrip("\r\n") for line in sys.stdin)
            continue
        try:
            with open(path, encoding="utf-8") as file:
                yield from (line.rstrip("\r\n") for line in file)
        except UnicodeDecodeError as error:
            raise FileError(f"{path} is not UTF-8 text: {error.reason}",
                            hint="Convert it first, as with iconv") from None


def _vectors(pool: Any, source: Iterator[str], kept: list[str] | None, arguments: argparse.Namespace,
             options: dict[str, Any]) -> Iterator[NDArray[Any]]:
    """Arrays (n, d) in the order of the texts. Appends each text to ``kept`` when it is read."""
    def keep(texts: Iterable[str]) -> Iterator[str]:
        for text in texts:
            if kept is not None:
                kept.append(text)
            yield text

    model = arguments.model
    if options["precision"] in ("int8", "uint8"):  # their ranges need all vectors at once
        texts = list(keep(source))
        _some(len(texts), "text")
        yield pool.embed(texts, model, max_inputs=len(texts), progress=_bar(arguments), **options)
        return
    count = 0
    for rows in pool.embed_iter(keep(source), model, batch_size=_BATCH, progress=_bar(arguments), **options):
        count += len(rows)
        yield rows
    _some(count, "text")


def _bar(arguments: argparse.Namespace) -> bool:
    """A progress bar, if standard error is a terminal and the output goes elsewhere."""
    return bool(arguments.output) and not arguments.quiet and sys.stderr.isatty()


class _LineWriter:
    """Writes one JSON object per line: the text or image, and its vector or null."""

    def __init__(self, file: IO[bytes], texts: list[str], unit: str = "text") -> None:
        self.file, self.texts, self.unit = file, texts, unit

    def rows(self, vectors: NDArray[Any]) -> None:
        """Write the vectors (n, d) of the first n texts, and drop these texts."""
        # nine digits are enough to tell any two float32 apart
        form = "%.9g" if vectors.dtype.kind == "f" else "%d"
        for text, values in zip(self.texts, vectors.tolist()):
            known = all(value == value for value in values)
            vector = "[" + ", ".join([form % value for value in values]) + "]" if known else "null"
            line = f'{{"{self.unit}": {json.dumps(text, ensure_ascii=False)}, "embedding": {vector}}}\n'
            self.file.write(line.encode("utf-8", "backslashreplace"))  # file names may not be UTF-8
        del self.texts[:len(vectors)]
        self.file.flush()

    def close(self) -> None:
        """Do nothing."""


class _ArrayWriter:
    """Writes one numpy array of any length: the header has room for the final length and is rewritten at the end.
    Output that cannot seek is collected in memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.seekable = file, file.seekable()
        self.parts: list[NDArray[Any]] = []
        self.dtype: np.dtype[Any] | None = None
        self.count = self.width = self.start = 0

    def rows(self, vectors: NDArray[Any]) -> None:
        """Add vectors (n, d)."""
        import numpy as np

        if not self.seekable:
            self.parts.append(vectors)
            return
        if self.dtype is None:
            self.dtype, self.width = vectors.dtype, vectors.shape[1]
            self._header()
            self.start = self.file.tell()
        self.file.write(np.ascontiguousarray(vectors).data)
        self.count += len(vectors)

    def close(self) -> None:
        """Complete the array."""
        import numpy as np

        if not self.seekable:
            np.save(self.file, np.concatenate(self.parts))
            return
        self.file.seek(0)
        self._header()
        assert self.file.tell() == self.start, "numpy's header has grown"

    def _header(self) -> None:
        from numpy.lib import format as npy

        assert self.dtype is not None
        npy.write_array_header_1_0(self.file, {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False,
                                               "shape": (self.count, self.width)})


@contextmanager
def _opened(path: str | None) -> Iterator[IO[bytes]]:
    """Standard output, or a file that appears only when it is complete."""
    if path is None or path == "-":
        yield cast("IO[bytes]", _Forward(sys.stdout.buffer))
        return
    if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
        with open(path, "wb") as file:  # a pipe or device cannot be renamed
            yield cast("IO[bytes]", _Forward(file))
        return
    part = f"{path}.part"
    try:
        with open(part, "wb") as file:
            yield file
        os.replace(part, path)
    except BaseException:
        try:
            os.unlink(part)
        except OSError:
            pass
        raise


class _Forward:
    """A file that reports that it cannot seek: another program may be reading it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.write, self.flush = file.write, file.flush

    def seekable(self) -> bool:
        """Return False."""
        return False
