"""Captures: the first values of the outputs of a model's layers during generation (:func:`mpool.debug.capture`).

The core copies the values during computation, into memory that is reserved when the request starts
(``csrc/models/capture.h``). One thread per process waits for captured requests to finish and writes their records.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import check_path, integer, refuse
from ..errors import FileError
from ..host.resources import start_thread, typed
from ..runtime import logs as _logging
from .capture_files import SUFFIX, CaptureRecord, read_capture

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .. import _core

#: Value of :attr:`CaptureRecord.team` in the records that this module writes.
TEAM = "mpool"
#: Maximum values per record (a limit of the core), records per request and characters of a job id.
MAX_VALUES, MAX_RECORDS, MAX_JOB_ID = 1 << 20, 2**31 - 1, 256
#: Maximum captured requests that are running or not yet written. Further requests run without being captured.
MAX_PENDING = 256
#: Seconds between two checks for finished requests while the oldest request runs.
_PERIOD = 0.1
#: Seconds that the exit of the interpreter waits for unwritten records.
_EXIT_TIMEOUT = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class CaptureJob:
    """A capture and the name of one request, for the request's ``capture=``. Returned by :meth:`Capture.job`."""

    capture: Capture
    id: str

    def begins(self) -> bool:
        """Return True if a request that starts now can be captured; otherwise count and log the failure.

        Raises:
            FileError: another capture has the file open.
        """
        self.capture._claim_file()
        if not _writer().full():
            return True
        self.capture._record_failure(self.id, f"{MAX_PENDING} other requests are running or not yet written")
        return False

    def follow(self, ticket: _core.Ticket) -> None:
        """Have the records written once the request is finished."""
        _writer().follow(_Pending(self, ticket))


class Capture:
    """The destination of capture records, from :func:`mpool.debug.capture`; pass it as ``capture=``, from any thread.

    Attributes:
        path: the file or folder; None: the records are kept in memory.
        values: values per record.
        limit: records per request.
        written: number of requests whose records were written.
        dropped: number of records beyond ``limit``, which were not kept.
        failed: number of requests whose records could not be written (a full disk, for example; the logger ``mpool``
            has the reason), or that were not captured because 256 others were running or not yet written.
    """

    @typed
    def __init__(self, path: str | os.PathLike[str] | None = None, *, values: int = 10,
                 records: int = 1_000_000) -> None:
        self.path = _check_path(path)
        self._file_id = os.path.realpath(self.path) if self.path is not None and self.path.suffix == SUFFIX else None
        self.values = _check_count("values", values, MAX_VALUES)
        self.limit = _check_count("records", records, MAX_RECORDS)
        self.written = self.dropped = self.failed = 0
        self._numbers = itertools.count(1)
        self._kept: list[CaptureRecord] = []
        self._next_file = 0  # number of the next file in a folder; 0: the folder was not listed yet
        self._claim_file()

    @typed
    def job(self, job_id: str | None = None) -> CaptureJob:
        """Returns this capture with a name for one request, as in ``capture=capture.job("a")``.

        Args:
            job_id: name of the request, a string of 1 to 256 characters; None: the next number, which is also the name
                of requests that get the capture itself.

        Raises:
            InvalidArgument: ``job_id`` is not such a string.
        """
        if job_id is None:
            with _lock:
                job_id = str(next(self._numbers))
        if not isinstance(job_id, str) or not 1 <= len(job_id) <= MAX_JOB_ID:
            refuse("job_id", job_id, f"a string of 1 to {MAX_JOB_ID} characters")
        return CaptureJob(self, job_id)

    @typed
    def records(self) -> tuple[CaptureRecord, ...]:
        """Calls :meth:`flush` and returns all records, read from ``path`` unless they are kept in memory."""
        self.flush()
        if self.path is None:
            with _lock:
                return tuple(self._kept)
        return read_capture(self.path) if self.written else ()

    @typed
    def flush(self, timeout: float | None = None) -> bool:
        """Waits until all captured requests are finished and written.

        Args:
            timeout: seconds to wait; None: no limit.

        Returns:
            False if the timeout ended the wait.
        """
        return _flush(self, timeout)

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *error: object) -> None:
        self.flush()
        with _lock:
            if self._file_id is not None and _open.get(self._file_id) is self:
                del _open[self._file_id]

    def __repr__(self) -> str:
        return f"<mpool.debug.Capture of {self.written} requests, in {'memory' if self.path is None else self.path}>"

    def _claim_file(self) -> None:
        """Reserve the file until the ``with`` block ends: two captures would overwrite each other's records, because
        every finished request rewrites the whole file."""
        if self._file_id is None:
            return
        with _lock:
            if _open.setdefault(self._file_id, self) is not self:
                raise FileError("a capture cannot be written: another open mpool.debug.capture() of this process "
                                f"writes {self.path}. Use that capture for both, or leave its `with` block first")

    # ---- called by the writer thread ---------------------------------------------------------------------------------

    def _collect(self, job_id: str, ticket: _core.Ticket) -> None:
        """Write the records of a finished request."""
        try:
            data, layers, hidden, vocab, beyond = ticket.capture()
            with _lock:
                self.dropped += beyond * (layers + 3)
            self._store(_RecordTable(job_id, self.values, data, layers, hidden, vocab))
        except Exception as error:
            self._record_failure(job_id, error)

    def _record_failure(self, job_id: str, reason: object) -> None:
        with _lock:
            self.failed += 1
        _logging.log.warning("Job %r was not captured: %s", job_id, reason)

    def _store(self, table: _RecordTable) -> None:
        if self.path is None:
            found = list(table.records())
            with _lock:
                self._kept += found
        elif self.path.suffix == SUFFIX:
            with _temporary_file(self.path.parent, table, self.path if self.written else None) as complete:
                os.replace(complete, self.path)
        else:
            self._add_file(self.path, table)
        with _lock:
            self.written += 1

    def _add_file(self, folder: Path, table: _RecordTable) -> None:
        """Add a file to a folder that other captures and processes may write to at the same time."""
        if not self._next_file:
            self._next_file = 1 + max((int(old.stem) for old in _numbered_files(folder)), default=0)
        with _temporary_file(folder, table, None) as complete:
            while True:
                try:
                    os.link(complete, folder / f"{self._next_file:06d}{SUFFIX}")
                    return
                except FileExistsError:
                    self._next_file += 1


@typed
def capture(path: str | os.PathLike[str] | None = None, *, values: int = 10, records: int = 1_000_000) -> Capture:
    """Records the outputs of a model's layers, for comparison with another engine or another machine.

    Pass the returned object as ``capture=`` to :func:`mpool.generate`, :func:`mpool.chat`, :func:`mpool.vision`,
    :func:`mpool.submit` or their counterparts in ``mpool.aio``. A request has layers + 3 records per sampled token,
    for the position whose logits the token is sampled from. Capturing does not change completions. Requests with ``n``
    above 1 cannot be captured.

    Args:
        path: destination of the records; None: memory. A ``.jsonl`` file is replaced, and then rewritten after each
            request; only one open capture may write it. A folder gets one file per request (``000001.jsonl``), also
            from several captures and processes; it is created if its name has no suffix or ends in ``/``. Files are
            written under a temporary name and renamed when the request is finished: a process that is killed keeps the
            files of earlier requests, and may leave a file ``mpool-*.tmp`` in the folder.
        values: leading values per record, 1 to 1,048,576; a stage with fewer values has shorter records.
        records: maximum number of records per request, 1 to 2**31 - 1. Their memory is reserved when the request starts
            (for at most as many as ``max_tokens`` needs); further records are dropped and counted.

    Returns:
        a :class:`mpool.debug.Capture`; the end of its ``with`` block waits until all records are written.

    Raises:
        InvalidArgument: an argument has a value that is not allowed.
        FileError: the file or folder cannot be created, or another capture of this process writes the file.

    Example:
        >>> with mpool.debug.capture() as capture:
        ...     done = mpool.generate("Once upon a time", temperature=0, max_tokens=2, capture=capture)
        >>> found = capture.records()
        >>> len(found), found[0].checkpoint, found[0].shape, found[-1].checkpoint, found[-1].token_idx
        (66, 'embedding', (576,), 'logits', 1)
    """
    return Capture(path, values=values, records=records)


def job_of(value: Any) -> CaptureJob | None:
    """Return the job for the argument ``capture=`` of a request.

    Raises:
        InvalidArgument: the value is neither a capture nor a job of one.
    """
    check_capture(value)
    return value.job() if isinstance(value, Capture) else value


def check_capture(value: Any) -> None:
    """Raise InvalidArgument unless the argument ``capture=`` is None, a capture or a job of one."""
    if value is not None and not isinstance(value, (Capture, CaptureJob)):
        refuse("capture", value, "the result of mpool.debug.capture(), or of its job()")


def _check_count(name: str, value: Any, most: int) -> int:
    found = integer(value)
    if found is None or not 1 <= found <= most:
        refuse(name, value, f"an integer from 1 to {most:,}")
    return found


def _check_path(path: Any) -> Path | None:
    if path is None:
        return None
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        refuse("path", path, f"a {SUFFIX} file or a folder")
    check_path("path", path)
    found = Path(os.path.abspath(path))  # independent of later changes of the working directory
    is_file = found.suffix == SUFFIX
    folder = found.parent if is_file else found
    reason = ""
    if is_file:
        if found.is_dir():
            reason = "is a folder"
        elif not folder.is_dir():
            reason = "is not in an existing folder"
    elif found.exists() and not found.is_dir():
        reason = f"is not a folder, and the name of a file must end in {SUFFIX}"
    elif not found.exists():
        if found.suffix and not os.fspath(path).endswith(os.sep):
            reason = (f"does not exist. Name a file that ends in {SUFFIX}, an existing folder, or a new folder. End "
                      "the name of a new folder in / if it has a suffix")
        else:
            try:
                folder.mkdir(exist_ok=True)
            except OSError as error:
                reason = f"cannot be created: {error.strerror}"
    if not reason and not os.access(folder, os.W_OK | os.X_OK):
        reason = f"cannot be created: {folder} is not writable" if is_file else "is not writable"
    if reason:
        raise FileError(f"a capture cannot be written: {found} {reason}")
    return found


def _numbered_files(folder: Path) -> Iterator[Path]:
    """Yield the capture files of a folder whose names are numbers."""
    for old in folder.glob(f"*{SUFFIX}"):
        if old.stem.isascii() and old.stem.isdigit():
            yield old


# ---- the records of a request ----------------------------------------------------------------------------------------

#: Nine significant digits identify every float32 uniquely.
_NUMBER = "%.9g"
_NOT_FINITE = re.compile("-?(nan|inf)")


class _RecordTable:
    """The records of a request, in the order of computation.

    Args:
        job_id: name of the request.
        values: maximum number of values per record.
        data: float32 ``(tokens, values of all stages)``; a row holds the records of one token in sequence.
        layers, hidden, vocab: dimensions of the model.
    """

    def __init__(self, job_id: str, values: int, data: NDArray[Any], layers: int, hidden: int, vocab: int) -> None:
        self.job_id, self._data, self._stages = job_id, data, []
        names = ["embedding", *(f"layer.{number}" for number in range(layers)), "norm", "logits"]
        start = 0
        for name in names:
            size = vocab if name == "logits" else hidden
            self._stages.append((name, size, slice(start, start + min(values, size))))
            start += min(values, size)

    def records(self) -> Iterator[CaptureRecord]:
        """Yield all records."""
        for token, row in enumerate(self._data):
            for name, size, columns in self._stages:
                values = (float(_NUMBER % value) if math.isfinite(value) else None for value in row[columns].tolist())
                yield CaptureRecord(name, TEAM, token, self.job_id, "float32", (size,), tuple(values))

    def lines(self) -> Iterator[str]:
        """Yield the same records as lines of JSON."""
        job = json.dumps(self.job_id).replace("%", "%%")
        heads = [f'{{"checkpoint": "{name}", "team": "{TEAM}", "token_idx": %d, "job_id": {job}, "dtype": "float32", '
                 f'"shape": [{size}], "values": [' for name, size, _ in self._stages]
        formats = [", ".join([_NUMBER] * (columns.stop - columns.start)) for _, _, columns in self._stages]
        for token, row in enumerate(self._data):
            values = row.tolist()
            finite = all(map(math.isfinite, values))
            for head, numbers, (_, _, columns) in zip(heads, formats, self._stages):
                body = numbers % tuple(values[columns])
                yield f"{head % token}{body if finite else _NOT_FINITE.sub('null', body)}]}}\n"


@contextmanager
def _temporary_file(folder: Path, table: _RecordTable, before: Path | None) -> Iterator[Path]:
    """Write a temporary file with the contents of ``before``, followed by a request's records, and remove it at the end
    of the ``with`` block. The block runs only if the file is complete."""
    found = folder / f"mpool-{os.getpid()}-{secrets.token_hex(8)}.tmp"
    file = open(found, "xb")  # outside the try block: an existing file belongs to another writer
    try:
        with file:
            if before is not None:
                with open(before, "rb") as old:
                    shutil.copyfileobj(old, file, 1 << 20)
            file.writelines(line.encode() for line in table.lines())
        yield found
    finally:
        found.unlink(missing_ok=True)


# ---- the writer thread -----------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """A captured request that is running or not yet written."""

    job: CaptureJob
    ticket: _core.Ticket


class _Writer:
    """Writes the records of finished requests. While requests run, its thread blocks on the oldest one and checks the
    others every :data:`_PERIOD` seconds: it does no work per token."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: list[_Pending] = []
        start_thread(self._run, "mpool-capture")

    def follow(self, request: _Pending) -> None:
        """Write the records of a request once it is finished."""
        with self._changed:
            self._pending.append(request)
            self._changed.notify_all()

    def full(self) -> bool:
        """True if no more requests can be followed."""
        return len(self._pending) >= MAX_PENDING

    def flush(self, capture: Capture | None, timeout: float | None) -> bool:
        """Wait until no request of a capture is pending; None: of any capture. Return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not any(capture in (None, request.job.capture) for request in self._pending), timeout)

    def _run(self) -> None:
        while True:
            try:
                with self._changed:
                    self._changed.wait_for(lambda: self._pending)
                    oldest = self._pending[0].ticket
                oldest.wait(_PERIOD)
                del oldest
                self._write_finished()
            except Exception:  # such as MemoryError: the requests stay pending, and the next round writes them
                time.sleep(_PERIOD)

    def _write_finished(self) -> None:
        for request in [request for request in self._pending if request.ticket.done()]:
            request.job.capture._collect(request.job.id, request.ticket)
            with self._changed:
                self._pending.remove(request)
                self._changed.notify_all()


_instance: _Writer | None = None
_lock = threading.Lock()
#: Resolved path of a file -> the open capture that writes it.
_open: weakref.WeakValueDictionary[str, Capture] = weakref.WeakValueDictionary()


def _writer() -> _Writer:
    global _instance
    with _lock:
        if _instance is None:
            _instance = _Writer()
        return _instance


def _flush(capture: Capture | None, timeout: float | None) -> bool:
    writer = _instance
    return writer is None or writer.flush(capture, timeout)


def finish() -> None:
    """Write the records of finished requests when the interpreter exits."""
    _flush(None, _EXIT_TIMEOUT)


def _after_fork_in_child() -> None:
    global _instance, _lock
    _instance, _lock = None, threading.Lock()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)

__all__ = ["Capture", "CaptureJob", "CaptureRecord", "capture", "finish", "job_of"]
