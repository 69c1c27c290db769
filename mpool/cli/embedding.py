"""``mpool embed`` and ``mpool embed-image``: write embeddings as lines of JSON or as one numpy array.

Memory use does not depend on the number of inputs, except for the precisions int8 and uint8.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
from numpy.lib import format as npy

from ..checks import refuse
from ..errors import FileError, InvalidArgument
from ..models.catalogue import load as load_catalogue
from ..records import one_line
from ..tasks.embedding_results import SparseVectors, TextEmbeddings, TokenVectors
from ..tasks.output_table import OUTPUTS
from .common import (
    Texts,
    adapter_of,
    check_folder,
    default_model,
    load,
    make_pool,
    no_inputs,
    note,
    reads_terminal,
    say,
    texts_of,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Number of inputs that are embedded and written at once: in general, and if each token has a vector.
_BATCH, _BATCH_TOKENS = 256, 16
#: Suffixes of formats that the commands do not write. Other suffixes stand for lines of JSON.
_OTHER_FORMATS = (".csv", ".tsv", ".parquet", ".arrow", ".feather", ".xlsx", ".npz", ".pt", ".pth", ".safetensors",
                  ".pkl", ".pickle", ".h5", ".hdf5", ".gz", ".bz2", ".xz", ".zst", ".zip")


def embed(arguments: argparse.Namespace) -> int:
    """Run ``mpool embed``."""
    source = texts_of(arguments)
    _note_model(arguments)
    form = _format(arguments)
    options: dict[str, Any] = {name: getattr(arguments, name) for name in
                               ("task", "prompt", "prompt_name", "dimensions", "normalize", "precision", "compute",
                                "on_error")}
    options["truncate"] = not arguments.no_truncate
    adapters, adapter = adapter_of(arguments)
    options |= {"output": arguments.vectors, "max_active": arguments.max_active, "adapter": adapter}
    _check_output(arguments, form)
    _check_path(arguments.output, arguments.file or [])
    texts: list[str] = []  # texts in flight, until their vectors are written
    with make_pool(arguments) as pool:
        progress = False if arguments.quiet else None
        checked = {**options, "precision": "float32"} if options["precision"] in ("int8", "uint8") else options
        with source.named():
            load(pool, "embed_iter", arguments.model or default_model("text_embedding"),
                 {"texts": source.begin(blank=True), **checked}, compute=arguments.compute, adapters=adapters,
                 progress=progress)
        with _opened(arguments.output) as file, source.named():
            writer = _writer(form, file, texts)
            for rows in _vectors(pool, source, None if form == "npy" else texts, arguments, options):
                writer.rows(rows)
            writer.close()
    return 0


def _note_model(arguments: argparse.Namespace) -> None:
    """Print a note if the first text is the name of a model, which other programs take as their first argument."""
    if arguments.model is None and arguments.text and load_catalogue().get(arguments.text[0]) is not None:
        name = arguments.text[0]
        note(f"mpool: {name!r} is embedded as a text. To embed texts with this model: mpool embed --model {name} TEXT")


def embed_image(arguments: argparse.Namespace) -> int:
    """Run ``mpool embed-image``."""
    form = _format(arguments)
    _check_path(arguments.output, arguments.image)
    options: dict[str, Any] = {name: getattr(arguments, name) for name in
                               ("dimensions", "normalize", "precision", "compute", "on_error", "allow_urls")}
    asked = arguments.image == ["-"]
    if (asked or not arguments.image) and reads_terminal(asked):
        raise no_inputs("image")
    source = Texts(() if asked else arguments.image, ["-"])
    whole = options["precision"] in ("int8", "uint8")  # quantisation ranges depend on all vectors
    names: list[str] = []  # images in flight, until their vectors are written
    count = 0
    model = arguments.model or default_model("image_embedding")
    with make_pool(arguments) as pool:
        with source.named():
            load(pool, "embed_image", model, {"images": source.begin("image", True), **options},
                 compute=arguments.compute, progress=False if arguments.quiet else None)
        with _opened(arguments.output) as file:
            writer = _writer(form, file, names, "image")
            while part := list(source if whole else itertools.islice(source, _BATCH)):
                names += part
                with source.named(range(count, count + len(part))):
                    vectors = pool.embed_image(part, model, max_inputs=len(part), progress=_bar(arguments), **options)
                count += len(part)
                writer.rows(vectors)
            writer.close()
    return 0


def _format(arguments: argparse.Namespace) -> str:
    """Return the output format: ``"jsonl"``, ``"npy"``, or ``"screen"`` for a person who reads a terminal."""
    suffix = os.path.splitext(arguments.output or "")[1].lower()
    if arguments.format is None and suffix in _OTHER_FORMATS:
        refuse("output", arguments.output, "a .npy file (an array) or a .jsonl file (lines of JSON)",
               hint=f"To write lines of JSON under the suffix {suffix}, add --format jsonl")
    form: str = arguments.format or ("npy" if suffix == ".npy" else "jsonl")
    if form == "npy" and not arguments.output and sys.stdout.isatty():
        raise InvalidArgument("`--format npy` must not write to a terminal",
                              hint="Set a file with --output, or redirect standard output")
    if not arguments.format and arguments.output is None and sys.stdout.isatty():
        return "screen"
    return form


def _check_path(output: str | None, inputs: Sequence[str]) -> None:
    """Raise InvalidArgument if the output cannot be a file, or would replace an input file. Call before the model is
    loaded."""
    if output is None or output == "-":
        return
    if not output or os.path.isdir(output):
        refuse("output", output, "the path of a file")
    check_folder("output", output)
    for path in inputs if os.path.isfile(output) else ():
        if os.path.exists(path) and os.path.samefile(output, path):
            refuse("output", output, "another file than the inputs")


def _check_output(arguments: argparse.Namespace, form: str) -> None:
    """Raise InvalidArgument for options that do not apply to ``--vectors``. Call before the model is loaded."""
    if arguments.max_active is not None and arguments.vectors != "sparse":
        raise InvalidArgument("--max-active needs --vectors sparse", param="max_active")
    if arguments.vectors == "dense":
        return
    if form == "npy":
        given = "--format npy" if arguments.format else f"--output {arguments.output}, an array,"
        raise InvalidArgument(f"{given} and --vectors {arguments.vectors} exclude each other", param="format",
                              hint="These vectors are written as lines of JSON: use --format jsonl")
    for name, default in (("dimensions", None), ("normalize", None), ("precision", "float32"), ("on_error", "raise")):
        if getattr(arguments, name) != default:
            raise InvalidArgument(f"--{name.replace('_', '-')} and --vectors {arguments.vectors} exclude each other",
                                  param=name)


def _vectors(pool: Any, source: Iterator[str], kept: list[str] | None, arguments: argparse.Namespace,
             options: dict[str, Any]) -> Iterator[Any]:
    """Yield arrays ``(n, d)``, or the results for other values of ``--vectors``, in the order of the texts.

    Appends each text to ``kept`` when it is read.
    """
    def keep(texts: Iterable[str]) -> Iterator[str]:
        for text in texts:
            if kept is not None:
                kept.append(text)
            yield text

    model, output = arguments.model, options["output"]
    if options["precision"] in ("int8", "uint8"):  # quantisation ranges depend on all vectors
        texts = list(keep(source))
        own = {name: value for name, value in options.items() if name not in ("output", "max_active")}
        yield pool.embed(texts, model, max_inputs=len(texts), progress=_bar(arguments), **own)
        return
    batch = _BATCH_TOKENS if OUTPUTS[output].token_vectors else _BATCH
    yield from pool.embed_iter(keep(source), model, batch_size=batch, progress=_bar(arguments), **options)


def first_numbers(vector: NDArray[Any]) -> str:
    """Return the length and the first numbers of a vector."""
    return f"{len(vector)} numbers: " + " ".join(f"{value:.4g}" for value in vector[:6].tolist()) + (
        " ..." if len(vector) > 6 else "")


def _numbers(values: list[float], number: str = "%.9g") -> str:
    return "[" + ", ".join([number % value for value in values]) + "]"


def _parts_of(rows: Any) -> tuple[Any, ...]:
    """Return the outputs of texts: an array of vectors, SparseVectors, TokenVectors. None: the result lacks one."""
    return (rows.dense, rows.sparse, rows.tokens) if isinstance(rows, TextEmbeddings) else (rows,)


def _lines_of(rows: Any) -> Iterator[str]:
    """Yield the outputs of each text, as members of a JSON object: ``embedding`` (a vector), ``sparse`` (token ids and
    weights) and ``tokens`` (a vector per token). Outputs that the result lacks are left out."""
    columns: list[Iterable[str]] = []
    for part in _parts_of(rows):
        if isinstance(part, SparseVectors):
            columns.append(f'"sparse": {{"indices": {ids.tolist()}, "values": {_numbers(values.tolist())}}}'
                           for ids, values in part)
        elif isinstance(part, TokenVectors):
            columns.append(f'"tokens": [{", ".join(_numbers(row) for row in matrix.tolist())}]' for matrix in part)
        elif part is not None:
            columns.append(f'"embedding": {_numbers(row)}' for row in part.tolist())
    return (", ".join(members) for members in zip(*columns))


def _bar(arguments: argparse.Namespace) -> bool:
    """Return True if a progress bar is shown: standard error is a terminal and the output is a file."""
    return bool(arguments.output) and not arguments.quiet and sys.stderr.isatty()


def _writer(form: str, file: IO[bytes], texts: list[str], unit: str = "text") -> _ArrayWriter | _LineWriter | _Screen:
    """Return the writer of a format. ``texts``: the texts or images in flight."""
    if form == "screen":
        return _Screen(texts)
    return _ArrayWriter(file) if form == "npy" else _LineWriter(file, texts, unit)


class _Screen:
    """Printer of each output's size and first numbers, with the beginning of its text."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def rows(self, vectors: Any) -> None:
        """Print the outputs of the first texts, and remove these texts."""
        columns: list[Iterable[str]] = []
        for part in _parts_of(vectors):
            if isinstance(part, SparseVectors):
                columns.append(f"{len(ids)} weights: " + " ".join(f"{token}:{weight:.2f}" for token, weight in
                                                                  zip(ids[:4], weights)) + " ..."
                               for ids, weights in part)
            elif isinstance(part, TokenVectors):
                columns.append(f"{len(matrix)} vectors of {first_numbers(matrix[0])}" for matrix in part)
            elif part is not None:
                columns.append(map(first_numbers, part))
        count = 0
        for shown in zip(*columns):
            text = one_line(self.texts[count])
            say(text if len(text) <= 76 else text[:73] + "...")
            for line in shown:
                say(f"    {line}")
            count += 1
        del self.texts[:count]

    def close(self) -> None:
        """Say how to get all numbers."""
        note("mpool: a terminal shows the first numbers. --format jsonl prints all of them; --output FILE writes them "
             "to FILE.npy or FILE.jsonl")


class _LineWriter:
    """Writer of one JSON object per line: the text or image, and its vector or null, or its other outputs."""

    def __init__(self, file: IO[bytes], texts: list[str], unit: str = "text") -> None:
        self.file, self.texts, self.unit = file, texts, unit

    def rows(self, vectors: Any) -> None:
        """Write the vectors ``(n, d)`` or other outputs of the first n texts, and remove these texts."""
        if not isinstance(vectors, np.ndarray):
            self._lines(_lines_of(vectors))
            return
        # nine significant digits identify a float32 exactly
        number = "%.9g" if vectors.dtype.kind == "f" else "%d"
        known = (None if any(value != value for value in values) else values for values in vectors.tolist())
        self._lines('"embedding": ' + ("null" if values is None else _numbers(values, number)) for values in known)

    def _lines(self, members: Iterable[str]) -> None:
        """Write one JSON object per item of ``members``, for the first texts in order, and remove these texts."""
        count = 0
        for text, member in zip(self.texts, members):
            line = f'{{"{self.unit}": {json.dumps(text, ensure_ascii=False)}, {member}}}\n'
            self.file.write(line.encode("utf-8", "backslashreplace"))  # file names may not be UTF-8
            count += 1
        del self.texts[:count]
        self.file.flush()

    def close(self) -> None:
        """Do nothing."""


class _ArrayWriter:
    """Writer of one numpy array of unknown length.

    The header has room for the final length and is rewritten at the end. If the output is not seekable, the rows are
    collected in memory.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.seekable = file, file.seekable()
        self.parts: list[NDArray[Any]] = []
        self.dtype: np.dtype[Any] | None = None
        self.count = self.width = self.start = 0

    def rows(self, vectors: NDArray[Any]) -> None:
        """Append vectors ``(n, d)``."""
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
        """Write the final header, or the collected array."""
        if not self.seekable:
            np.save(self.file, np.concatenate(self.parts))
            return
        self.file.seek(0)
        self._header()
        assert self.file.tell() == self.start, "the final header of the array is longer than the first one"

    def _header(self) -> None:
        assert self.dtype is not None
        npy.write_array_header_1_0(self.file, {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False,
                                               "shape": (self.count, self.width)})


@contextmanager
def _opened(path: str | None) -> Iterator[IO[bytes]]:
    """Open the output: standard output, or a file that is renamed to ``path`` when it is complete."""
    if path is None or path == "-":
        yield cast("IO[bytes]", _Forward(sys.stdout.buffer))
        return
    if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
        with open(path, "wb") as file:  # a pipe or device cannot be renamed
            yield cast("IO[bytes]", _Forward(file))
        return
    part = f"{path}.{secrets.token_hex(8)}.part"
    try:
        made = open(part, "xb")  # noqa: SIM115 - closed below
    except OSError as error:  # the file that is named is the user's
        raise FileError(f"{path}: {error.strerror}") from None
    try:
        with made as file:
            yield file
        os.replace(part, path)
    except BaseException:
        try:
            os.unlink(part)
        except OSError:
            pass
        raise


class _Forward:
    """A file that is not seekable: standard output, a pipe or a device."""

    def __init__(self, file: IO[bytes]) -> None:
        self.write, self.flush = file.write, file.flush

    def seekable(self) -> bool:
        """Return False."""
        return False
