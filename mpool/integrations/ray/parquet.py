"""Embeddings and labels for the texts of Parquet files, computed by one process per CPU."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _share  # isort: skip - before Ray is imported

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data

from ...checks import integer, one_of, refuse
from ...errors import FileError, IntegrityError, InvalidArgument, MpoolError
from ...models import describe
from ...models.formats.adapters import check_places
from ...names import WEIGHTS
from ...pool import Pool
from ...runtime.load_options import LoadOptions
from ...tasks.classification import Classifications
from ...tasks.embedding_results import SparseVectors, TextEmbeddings, TokenVectors
from ...tasks.output_table import OUTPUTS
from ...tasks.token_labels import TokenClassifications
from ...tasks.vectors import check_progress
from . import provenance

if TYPE_CHECKING:
    from ...model import Model

#: Default number of rows per batch: for outputs without vectors of tokens, and with them (``"tokens"``, ``"all"``).
ROWS, TOKEN_ROWS = 1024, 64
#: Types of a column of labels and of one of labelled spans.
_LABELS = pa.list_(pa.struct([("label", pa.string()), ("score", pa.float32())]))
_SPANS = pa.list_(pa.struct([("label", pa.string()), ("score", pa.float32()), ("start", pa.int32()),
                             ("end", pa.int32()), ("word", pa.string())]))


class EmbedBatches:
    """Add a column of vectors to pyarrow batches, for ``map_batches`` of Ray Data.

    ``dataset.map_batches(EmbedBatches, fn_constructor_kwargs={"column": "text"}, batch_format="pyarrow",
    batch_size=1024, num_cpus=1, concurrency=2)`` uses two processes with one CPU each.

    Args:
        column: name of the column of texts.
        output: name of the column of vectors; an existing column is replaced. See ``vectors`` for its type.
        model: a key, a path or a reference, as for :func:`mpool.embed`; None: all-MiniLM-L6-v2,
            but required with ``vectors="labels"`` and ``"spans"``.
        cpus: number of CPUs of the actor, the same as ``num_cpus`` of ``map_batches``.
        memory_mb: memory for the model in MiB; 0: the machine's memory for pools, divided in proportion to
            ``cpus`` and Ray's CPUs.
        weights: see :class:`mpool.PoolConfig`; with ``"mapped"``, the actors of a machine share the pages of the file.
        vectors: ``"dense"``: fixed-size lists of float32; ``"sparse"``: structs of two lists, ``indices`` (int32,
            ascending) and ``values`` (float32); ``"tokens"``: lists of fixed-size lists of float32, one per token;
            ``"all"``: structs with those of the fields ``dense``, ``sparse`` and ``tokens`` that the model has, of
            these types, computed in one pass; ``"labels"``: lists of structs ``label`` (string) and ``score``
            (float32), best first; ``"spans"``: lists of structs ``label``, ``score``, ``start`` and ``end`` (int32, in
            characters), and ``word``.
        adapters: adapters (LoRA) that are loaded with the model, as for :func:`mpool.load`; the option ``adapter``
            selects one.
        **options: options of :func:`mpool.embed`, :func:`mpool.embed_sparse`, :func:`mpool.embed_tokens`,
            :func:`mpool.embed_all`, :func:`mpool.classify` or :func:`mpool.classify_tokens`. With
            ``on_error="null"``, which dense vectors have, texts that are missing or cannot be embedded get a null
            instead of a vector.

    Raises:
        InvalidArgument: the column does not exist, or does not have texts; or an option is invalid.
        IntegrityError: a file of the model or of the adapter changed after the actor read it.
        MpoolError: see :func:`mpool.embed`.
    """

    def __init__(self, column: str = "text", output: str = "embedding", model: str | None = None, cpus: int = 1,
                 memory_mb: int = 0, weights: str = "auto", vectors: str = "dense",
                 adapters: Mapping[str, str | os.PathLike[str]] | None = None, **options: Any) -> None:
        provenance.check_options(options, vectors, model)
        name = provenance.default_model(model, vectors)
        self.column, self.output, self.model, self.options = column, output, model, options
        self.vectors, self.adapters = vectors, places_of(adapters)
        self.pool = Pool(_share.config(cpus, memory_mb, None, weights=weights))
        self._handle: Model | None = None  # the same version of the files for all batches
        if self.adapters:
            self._handle = self.pool.load(name, compute=options.get("compute", "auto"), adapters=self.adapters,
                                          progress=False)
        self._made: dict[str, Any] | None = None
        self._made_of = 0

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Return the batch with the column of vectors."""
        if not isinstance(batch, pa.Table):
            refuse("batch", batch, "a pyarrow table", hint='Pass batch_format="pyarrow" to map_batches')
        check_column(batch.schema, self.column, "the batch")
        texts = batch.column(self.column).to_pylist()
        compute = getattr(self.pool, OUTPUTS[self.vectors].function)
        # the pool's limit of inputs counts each pair of a text and a label, and each window of a long text
        configured = self.pool.config.max_embed_inputs
        most = None if configured is None else max(len(texts) * max(1, len(self.options.get("labels") or ())),
                                                   configured)
        if self._handle is None:
            self._handle = self.pool.get(provenance.default_model(self.model, self.vectors), "text_embedding")
        vectors = array_of(compute(texts, self._handle, **{"max_inputs": most, **self.options}))
        at = batch.schema.get_field_index(self.output)
        found = batch.append_column(self.output, vectors) if at < 0 else batch.set_column(at, self.output, vectors)
        return found.replace_schema_metadata(provenance.with_record(batch.schema.metadata, self.output,
                                                                        self._record(self._handle)))

    def _record(self, model: Model) -> dict[str, Any]:
        """Return the record of the vectors; see :mod:`mpool.integrations.ray.provenance`.

        Raises:
            IntegrityError: a file changed since the pool read it. The record would have the hash of other files than
                those that computed the vectors.
        """
        if self._made is None:
            revision = model.revision
            made = provenance.record_of(model.description, self.column, self.options, self.vectors, self.adapters)
            path = model.changed_file()  # after the hashes: the files were the same while they were read
            if path is not None:
                raise IntegrityError(f"{path} changed since it was read", key=model.key,
                                     hint="Run the call again, which reads the files again")
            self._made, self._made_of = made, revision
        if model.revision != self._made_of:  # it was loaded again
            raise IntegrityError("the files of the model or of an adapter changed since they were read", key=model.key,
                                 hint="Run the call again, which reads the files again")
        return self._made


def array_of(found: Any) -> pa.Array:
    """Return vectors, labels or spans as an Arrow array with an element per text. :class:`EmbedBatches` has its type.

    Args:
        found: result of :func:`mpool.embed`, :func:`mpool.embed_sparse`, :func:`mpool.embed_tokens`,
            :func:`mpool.embed_all`, :func:`mpool.classify` or :func:`mpool.classify_tokens`. A row of NaN becomes a
            null.
    """
    if isinstance(found, Classifications):
        return pa.array([[{"label": one.label, "score": one.score} for one in text] for text in found], _LABELS)
    if isinstance(found, TokenClassifications):
        names = [field.name for field in _SPANS.value_type]
        return pa.array([[{name: getattr(one, name) for name in names} for one in text] for text in found], _SPANS)
    if isinstance(found, TextEmbeddings):
        fields = {name: array_of(one) for name in ("dense", "sparse", "tokens")
                  if (one := getattr(found, name)) is not None}
        return pa.StructArray.from_arrays(list(fields.values()), list(fields))
    if isinstance(found, SparseVectors):
        lists = [pa.ListArray.from_arrays(pa.array(found.indptr, pa.int32()), pa.array(values))
                 for values in (found.indices, found.values)]
        return pa.StructArray.from_arrays(lists, ["indices", "values"])
    if isinstance(found, TokenVectors):
        rows = pa.FixedSizeListArray.from_arrays(pa.array(found.values.ravel()), found.values.shape[1])
        return pa.ListArray.from_arrays(pa.array(found.offsets, pa.int32()), rows)
    missing = np.isnan(found[:, 0]) if found.dtype == np.float32 else np.zeros(len(found), dtype=bool)
    return pa.FixedSizeListArray.from_arrays(pa.array(found.ravel()), found.shape[1],
                                             mask=pa.array(missing) if missing.any() else None)


def places_of(adapters: object) -> dict[str, str]:
    """Return the absolute path, or the reference to the hub, of each adapter.

    Raises:
        InvalidArgument: ``adapters`` is no dict from name to path.
    """
    return dict(LoadOptions.checked(None, None, None, None, adapters).adapters or ())


def _positive(name: str, value: Any) -> int:
    number = integer(value)
    if number is None or number < 1:
        refuse(name, value, "an integer of 1 or more")
    return number


def check_column(schema: pa.Schema, column: str, where: str) -> None:
    """Check that a schema has a column of texts with this name.

    Raises:
        InvalidArgument: the column does not exist, or does not have texts. ``where`` names the file or batch.
    """
    if column not in schema.names:
        refuse("column", column, "one of " + ", ".join(schema.names), hint=f"These are the columns of {where}")
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
            or pa.types.is_null(kind) or pa.types.is_dictionary(kind) and pa.types.is_string(kind.value_type)):
        raise InvalidArgument(param="column", got=f"{column!r} of type {kind} in {where}",
                              allowed="a column of strings")


class _EmbedFiles:
    """Embed whole files, for ``map`` of Ray Data: each row is a file."""

    def __init__(self, rows: int, **more: Any) -> None:
        self._embed, self._rows = EmbedBatches(**more), rows

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        done = 0
        part = f"{row['target']}.{secrets.token_hex(8)}.part"
        try:
            with pq.ParquetFile(row["source"]) as file:
                writer = None
                try:
                    for batch in file.iter_batches(batch_size=self._rows):
                        table = self._embed(pa.Table.from_batches([batch]))
                        writer = writer or pq.ParquetWriter(part, table.schema)
                        writer.write_table(table)
                        done += len(table)
                    if writer is None:  # a file without rows gets the column too
                        table = self._embed(file.schema_arrow.empty_table())
                        writer = pq.ParquetWriter(part, table.schema)
                        writer.write_table(table)
                finally:
                    if writer is not None:
                        writer.close()
            with open(part, "rb") as written:
                os.fsync(written.fileno())
            os.replace(part, row["target"])
            return {"rows": done, "error": ""}
        except (MpoolError, OSError, pa.ArrowException) as error:
            if os.path.exists(part):
                os.unlink(part)
            return {"rows": done, "error": f"{row['source']}: {type(error).__name__}: {error}"}


@dataclass(frozen=True)
class Embedded:
    """Result of :func:`embed_parquet`.

    Attributes:
        files: number of files that were written.
        rows: number of rows in these files.
        skipped: number of files that existed in the target folder before.
    """

    files: int
    rows: int
    skipped: int


def embed_parquet(source: str | os.PathLike[str], target: str | os.PathLike[str], *, column: str = "text",
                  output: str = "embedding", model: str | None = None, cpus: int = 1, actors: int | None = None,
                  memory_mb: int = 0, weights: str = "auto", rows: int | None = None, address: str | None = None,
                  progress: bool | Callable[[int, int], object] | None = True, overwrite: bool = False,
                  vectors: str = "dense", adapters: Mapping[str, str | os.PathLike[str]] | None = None,
                  **options: Any) -> Embedded:
    """Copy the Parquet files of a folder and add a column with the vectors of the texts of another column.

    If this process is not connected to Ray, the function starts Ray and stops it at the end. Each file is processed by
    one actor, which reads it in batches, so that memory use does not depend on the size of the file. The copy has the
    same name and all columns and rows in the same order. It gets its name only when it is complete, and existing
    copies are skipped. After an error, a kill or a reboot, the same call continues with the missing files. The
    metadata of a copy records the model, its revision, the adapter, the options and the version of mpool under the key
    ``mpool.OUTPUT``; a folder with copies that differ in one of them is refused before any work. In a cluster, both
    folders and the adapters must have the same paths on every machine.

    Args:
        source: a folder with ``.parquet`` files; subfolders are ignored.
        target: another folder; it is created if it does not exist.
        column, output, model, memory_mb, weights, vectors, adapters, **options: see :class:`EmbedBatches`.
        cpus: number of CPUs and compute threads of an actor.
        actors: number of processes; None: as many as Ray has CPUs for, but at most one per file.
        rows: number of rows per batch; None: 1,024, or 64 with ``vectors="tokens"`` and ``"all"``.
        address: address of a cluster, as for ``ray.init``; None: the cluster that this process is connected to, or
            a new one on this machine.
        progress: True: show a progress bar; a function: call it with (finished rows, all rows) after each file;
            False or None: show nothing.
        overwrite: True: embed all files again and replace existing copies, whatever computed them.

    Returns:
        the numbers of written and skipped files, and of rows.

    Raises:
        InvalidArgument: a file does not have the column, the target folder has a copy that another model, revision,
            adapter, option or version of mpool computed (nothing is written), or another argument is invalid.
        FileError: the folder does not exist or has no Parquet files, the target folder cannot be created, or a file
            cannot be read or written; complete copies are kept.
    """
    source_folder, target_folder = Path(source).absolute(), Path(target).absolute()
    if not source_folder.is_dir():
        raise FileError(f"`source` must be an existing folder, got {source_folder}")
    if target_folder.exists() and os.path.samefile(source_folder, target_folder):
        refuse("target", str(target_folder), "another folder than `source`")
    check_progress(progress)
    cpus = _positive("cpus", cpus)
    rows = None if rows is None else _positive("rows", rows)
    actors = None if actors is None else _positive("actors", actors)
    files = sorted(source_folder.glob("*.parquet"))
    if not files:
        raise FileError(f"{source_folder} has no .parquet files")
    one_of("weights", weights, WEIGHTS)
    provenance.check_options(options, vectors, model)
    if rows is None:
        rows = TOKEN_ROWS if OUTPUTS[vectors].token_vectors else ROWS
    name = provenance.default_model(model, vectors)
    places = places_of(adapters)
    check_places(places.items(), ())
    if not isinstance(overwrite, bool):
        refuse("overwrite", overwrite, "True or False")
    rows_of = {path: _rows_of(path, column) for path in files}
    missing = [path for path in files if overwrite or not (target_folder / path.name).exists()]
    if len(missing) < len(files) or options.get("adapter") is not None:  # an adapter is checked before any work
        record = provenance.record_of(describe(name), column, options, vectors, places)
        for path in files:
            if path not in missing:
                _check_copy(target_folder / path.name, rows_of[path], output, record)
    total = sum(rows_of[path] for path in missing)
    try:
        target_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"`target` must be a folder, but {target_folder} cannot be created: "
                        f"{error.strerror}") from error
    if not missing:
        return Embedded(0, 0, len(files))
    done = 0
    failed = []
    with _RayConnection(address):
        available = int(ray.cluster_resources().get("CPU", 1))
        possible = available // cpus
        if possible < 1:
            refuse("cpus", cpus, f"at most {available}, the number of Ray's CPUs")
        results = _run([{"source": str(path), "target": str(target_folder / path.name)} for path in missing],
                       min(actors or possible, possible, len(missing)), cpus,
                       {"rows": rows, "column": column, "output": output, "model": model, "cpus": cpus,
                        "memory_mb": memory_mb, "weights": weights, "vectors": vectors, "adapters": places,
                        **options})
        with _Progress(progress, total) as report:
            for result in results:
                failed += [result["error"]] if result["error"] else []
                done += 0 if result["error"] else result["rows"]
                report(done)
    if failed:
        raise FileError(f"{len(failed)} of {len(missing)} files could not be embedded; the first error: {failed[0]}",
                        hint="The same call retries the missing files")
    return Embedded(len(missing), done, len(files) - len(missing))


def _rows_of(path: Path, column: str) -> int:
    try:
        with pq.ParquetFile(path) as file:
            check_column(file.schema_arrow, column, str(path))
            count: int = file.metadata.num_rows
            return count
    except (OSError, pa.ArrowException) as error:
        raise FileError(f"{path} cannot be read: {error}") from None


def _check_copy(path: Path, rows: int, output: str, record: dict[str, Any]) -> None:
    """Check that an existing copy is what this call would write.

    Raises:
        InvalidArgument: another model, revision, adapter, column, option or version of mpool computed it, or its source
            changed.
    """
    try:
        with pq.ParquetFile(path) as file:
            wrong = provenance.difference(file.schema_arrow.metadata, output, record)
            if wrong is None and file.metadata.num_rows != rows:
                wrong = f"it has {file.metadata.num_rows:,} rows, and its source has {rows:,}"
    except (OSError, pa.ArrowException) as error:
        wrong = f"it cannot be read: {error}"
    if wrong is not None:
        raise InvalidArgument(f"`target` has a file of another call, {path}: {wrong}", param="target", got=str(path),
                              allowed="a folder without files, or with those of the same call",
                              hint="Use another target folder, or overwrite=True (--overwrite) to embed every file "
                                   "again")


def _run(files: list[dict[str, str]], actors: int, cpus: int, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # _Progress counts rows, Ray would count files
    data = ray.data.from_items(files, override_num_blocks=len(files)).map(
        _EmbedFiles, fn_constructor_kwargs=arguments, num_cpus=cpus,
        compute=ray.data.ActorPoolStrategy(size=actors))
    return iter(data.iter_rows())


class _Progress:
    """Reports progress to a progress bar or to the caller's function, or not at all."""

    def __init__(self, progress: bool | Callable[[int, int], object] | None, total: int) -> None:
        self._call, self._total = progress, total
        self._bar: Any = None

    def __enter__(self) -> Callable[[int], None]:
        if self._call is True:
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit=" rows")
        return self._report

    def _report(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif callable(self._call):
            self._call(done, self._total)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


class _RayConnection:
    """Connects to Ray, and disconnects at the end of the ``with`` block. Does nothing if this process is connected."""

    def __init__(self, address: str | None) -> None:
        self._address, self._mine = address, not ray.is_initialized()

    def __enter__(self) -> None:
        if self._mine:
            _share.connect(self._address)

    def __exit__(self, *error: object) -> None:
        if self._mine:
            ray.shutdown()


__all__ = ["Embedded", "EmbedBatches", "array_of", "check_column", "embed_parquet"]
