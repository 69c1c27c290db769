"""Vectors for the texts of Parquet files, by as many processes as there are CPUs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _share  # isort: skip - before Ray is imported

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data

from ...checks import refuse
from ...errors import FileError, InvalidArgument, MpoolError
from ...pool import Pool

#: Rows that are read and embedded together; end of the name of a file that is being written.
ROWS, _PART = 1024, ".part"


class EmbedBatches:
    """For ``map_batches`` of Ray Data: adds a column of vectors to batches of pyarrow.

    ``dataset.map_batches(EmbedBatches, fn_constructor_kwargs={"column": "text"}, batch_format="pyarrow",
    batch_size=1024, num_cpus=1, concurrency=2)`` has two processes with a CPU each.

    Args:
        column: of the texts.
        output: of the vectors: a list of fixed size of float32. One that is there is replaced.
        model: what :func:`mpool.embed` takes; None: all-MiniLM-L6-v2.
        cpus: of the actor (``num_cpus`` of ``map_batches``).
        memory_mb: for the model; 0: the actor's share of the machine.
        **options: of :func:`mpool.embed`. With ``on_error="null"`` texts that cannot be embedded, missing ones too,
            have no vector.

    Raises:
        InvalidArgument: there is no such column, or it holds no texts.
        and what :func:`mpool.embed` raises.
    """

    def __init__(self, column: str = "text", output: str = "embedding", model: str | None = None, cpus: int = 1,
                 memory_mb: int = 0, **options: Any) -> None:
        self.column, self.output, self.model, self.options = column, output, model, options
        self.pool = Pool(_share.config(cpus, memory_mb, None))

    def __call__(self, batch: pa.Table) -> pa.Table:
        """The batch with its vectors."""
        check_column(batch.schema, self.column, "the batch")
        texts = batch.column(self.column).to_pylist()
        rows = self.pool.embed(texts, self.model, max_inputs=max(len(texts), 1), **self.options)
        missing = np.isnan(rows[:, 0]) if rows.dtype == np.float32 else np.zeros(len(rows), dtype=bool)
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1],
                                                    mask=pa.array(missing) if missing.any() else None)
        at = batch.schema.get_field_index(self.output)
        return batch.append_column(self.output, vectors) if at < 0 else batch.set_column(at, self.output, vectors)


def check_column(schema: pa.Schema, column: str, where: str) -> None:
    """Raises InvalidArgument unless a schema has a column of texts by that name."""
    if column not in schema.names:
        raise InvalidArgument(f"{where} has no column {column}, only {', '.join(schema.names)}")
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
            or pa.types.is_null(kind) or pa.types.is_dictionary(kind) and pa.types.is_string(kind.value_type)):
        raise InvalidArgument(f"{where} has {kind} in the column {column}, allowed: texts")


class _EmbedFiles:
    """For ``map`` of Ray Data: rows are files."""

    def __init__(self, rows: int, **more: Any) -> None:
        self._embed, self._rows = EmbedBatches(**more), rows

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        done = 0
        part = row["target"] + _PART
        try:
            with pq.ParquetFile(row["source"]) as file:
                writer = None
                try:
                    for batch in file.iter_batches(batch_size=self._rows):
                        table = self._embed(pa.Table.from_batches([batch]))
                        writer = writer or pq.ParquetWriter(part, table.schema)
                        writer.write_table(table)
                        done += len(table)
                    if writer is None:  # no rows: the columns all the same
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
    """What :func:`embed_parquet` has done: files and rows that now have vectors, and files that had them before."""

    files: int
    rows: int
    skipped: int


def embed_parquet(source: str | os.PathLike[str], target: str | os.PathLike[str], *, column: str = "text",
                  output: str = "embedding", model: str | None = None, cpus: int = 1, actors: int | None = None,
                  memory_mb: int = 0, rows: int = ROWS, address: str | None = None,
                  progress: bool | Callable[[int, int], object] = True, **options: Any) -> Embedded:
    """Writes the Parquet files of a folder again, with vectors of one column's texts.

    Ray is started for it, unless this process is connected to one. A file is the unit of work: one actor reads some
    rows of it after the other, so that memory does not grow with files, and writes a file of the same name, with all
    columns and rows in their order. It appears under its name when it is complete, and files that are there are
    skipped: after an error, a kill or a reboot the same call goes on with what is missing. In a cluster, every machine
    has to see both folders under these paths.

    Args:
        source: a folder with ``.parquet`` files; folders in it are not looked into.
        target: another folder; made if it is not there.
        column, output, model, memory_mb, **options: see :class:`EmbedBatches`.
        cpus: threads and CPUs of one actor.
        actors: processes; None: as many as Ray has CPUs for, but no more than files.
        rows: that are read and embedded together.
        address: of a cluster, as of ``ray.init``; None: the one that this process is connected to, or one of its own.
        progress: True: a bar of rows; a function: called with (rows done, rows in all) whenever a file is complete.

    Returns:
        what was done.

    Raises:
        InvalidArgument: a file has no such column of texts, or another argument is not as described.
        FileError: the folder holds no Parquet files, or one of them cannot be read or written; what was complete
            stays.
    """
    where, to = Path(source).absolute(), Path(target).absolute()
    if where == to:
        refuse("target", to, "another folder than `source`")
    for name, value in (("cpus", cpus), ("rows", rows), ("actors", 1 if actors is None else actors)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            refuse(name, value, "1 or more")
    files = sorted(where.glob("*.parquet"))
    if not files:
        raise FileError(f"{where} holds no .parquet files")
    to.mkdir(parents=True, exist_ok=True)
    missing = [path for path in files if not (to / path.name).exists()]
    total = sum(_rows_of(path, column) for path in missing)
    if not missing:
        return Embedded(0, 0, len(files))
    done = 0
    failed = []
    with _connected(address):
        there = int(ray.cluster_resources().get("CPU", 1)) // cpus
        if there < 1:
            raise InvalidArgument(f"cpus is {cpus}, and Ray has {int(ray.cluster_resources().get('CPU', 0))}")
        found = _run([{"source": str(path), "target": str(to / path.name)} for path in missing],
                     min(actors or there, there, len(missing)), cpus,
                     {"rows": rows, "column": column, "output": output, "model": model, "cpus": cpus,
                      "memory_mb": memory_mb, **options})
        with _Told(progress, total) as told:
            for row in found:
                failed += [row["error"]] if row["error"] else []
                done += 0 if row["error"] else row["rows"]
                told(done)
    if failed:
        raise FileError(f"{len(failed)} of {len(missing)} files have no vectors; the first is {failed[0]}",
                        hint="The same call goes on with them")
    return Embedded(len(missing), done, len(files) - len(missing))


def _rows_of(path: Path, column: str) -> int:
    try:
        with pq.ParquetFile(path) as file:
            check_column(file.schema_arrow, column, str(path))
            count: int = file.metadata.num_rows
            return count
    except (OSError, pa.ArrowException) as error:
        raise FileError(f"{path} cannot be read: {error}") from None


def _run(files: list[dict[str, str]], actors: int, cpus: int, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # rows are told, and by what they hold
    data = ray.data.from_items(files, override_num_blocks=len(files)).map(
        _EmbedFiles, fn_constructor_kwargs=arguments, num_cpus=cpus,
        compute=ray.data.ActorPoolStrategy(size=actors))
    return iter(data.iter_rows())


class _Told:
    """Progress, as asked for."""

    def __init__(self, progress: bool | Callable[[int, int], object], total: int) -> None:
        self._call, self._total = progress, total
        self._bar: Any = None

    def __enter__(self) -> Callable[[int], None]:
        if self._call is True:
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit=" rows")
        return self._tell

    def _tell(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
        elif callable(self._call):
            self._call(done, self._total)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


class _connected:
    """A cluster, left again if it was joined here."""

    def __init__(self, address: str | None) -> None:
        self._address, self._mine = address, not ray.is_initialized()

    def __enter__(self) -> None:
        if self._mine:
            _share.connect(self._address)

    def __exit__(self, *error: object) -> None:
        if self._mine:
            ray.shutdown()


__all__ = ["Embedded", "EmbedBatches", "check_column", "embed_parquet"]
