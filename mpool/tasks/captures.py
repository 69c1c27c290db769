"""Captures: the first numbers of what a model's layers give out while it writes (:func:`mpool.capture`).

The core copies them as it computes, into memory that a call has from its beginning (``csrc/models/capture.h``). One
thread for the whole process waits for the ends of such calls, and writes what they have.
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
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import integer, shown
from ..errors import FileError, InvalidArgument
from ..runtime import logs as _logging
from .capture_files import SUFFIX, CaptureRecord, read_capture

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .. import _core

#: The engine that writes the records.
TEAM = "mpool"
#: Numbers of a record, as the core allows; records of a call; characters of a job's name; calls that run, or are not
#: written yet, at once: those beyond are not captured.
MAX_VALUES, MAX_RECORDS, MAX_JOB_ID, MAX_CALLS = 1 << 20, 2**31 - 1, 256, 256
#: Seconds after which calls that ended before the oldest one are seen.
_PERIOD = 0.1
#: Seconds that the end of the interpreter waits for a disk.
_LAST = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class CaptureJob:
    """A name for the call that is made with it as ``capture=``. Made by :meth:`Capture.job`."""

    capture: Capture
    id: str

    def begins(self) -> bool:
        """True if a request that starts now can be captured.

        Raises:
            FileError: another capture writes the file by now.
        """
        self.capture._hold()
        if not _writer().full():
            return True
        self.capture._lose(self.id, f"{MAX_CALLS} others run, or wait to be written")
        return False

    def follow(self, ticket: _core.Ticket) -> None:
        """Has its records written once it is done."""
        _writer().follow(_Followed(self, ticket))


class Capture:
    """Where the records of calls go. Made by :func:`mpool.capture`; for ``capture=`` of calls from any thread.

    Attributes:
        path: the file or folder; None: the records are kept in memory.
        values: numbers a record.
        limit: records a call.
        written: calls whose records were written.
        dropped: records that had no room, since their calls had more than ``limit``.
        failed: calls whose records could not be written, as on a full disk (the logger ``mpool`` says why), or that
            were not captured since 256 others ran or waited to be written.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, values: int = 10,
                 records: int = 1_000_000) -> None:
        self.path = _checked(path)
        self._claim = os.path.realpath(self.path) if self.path is not None and self.path.suffix == SUFFIX else None
        self.values = _count("values", values, MAX_VALUES)
        self.limit = _count("records", records, MAX_RECORDS)
        self.written = self.dropped = self.failed = 0
        self._numbers = itertools.count(1)
        self._kept: list[CaptureRecord] = []
        self._next_file = 0  # in a folder; what it has is not counted again
        self._hold()

    def job(self, job_id: str | None = None) -> CaptureJob:
        """A name for one call, as ``capture=capture.job("a")``; None: the next number, as for calls without a name.

        Raises:
            InvalidArgument: not a text of 1 to 256 characters.
        """
        if job_id is None:
            with _lock:
                job_id = str(next(self._numbers))
        if not isinstance(job_id, str) or not 1 <= len(job_id) <= MAX_JOB_ID:
            raise InvalidArgument(f"job_id is {shown(job_id)}, allowed: a text of 1 to {MAX_JOB_ID} characters")
        return CaptureJob(self, job_id)

    def records(self) -> tuple[CaptureRecord, ...]:
        """All records of the calls that have ended, after :meth:`flush`; read from ``path`` if there is one."""
        self.flush()
        if self.path is None:
            with _lock:
                return tuple(self._kept)
        return read_capture(self.path) if self.written else ()

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until the captured calls have ended and their records are written; False: not within ``timeout``."""
        return _flush(self, timeout)

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *error: object) -> None:
        self.flush()
        with _lock:
            if self._claim is not None and _open.get(self._claim) is self:
                del _open[self._claim]

    def __repr__(self) -> str:
        return f"<mpool.Capture of {self.written} calls, in {'memory' if self.path is None else self.path}>"

    def _hold(self) -> None:
        """Makes the file this one's until its ``with`` is left: each call writes it anew, with what it had from it."""
        if self._claim is None:
            return
        with _lock:
            if _open.setdefault(self._claim, self) is not self:
                raise FileError(f"a capture cannot be written: {self.path} is written by another open mpool.capture() "
                                "of this process. Use that one for both, or leave its with first")

    # ---- by the thread -----------------------------------------------------------------------------------------------

    def _take(self, job_id: str, ticket: _core.Ticket) -> None:
        """Takes the records of a finished request."""
        try:
            data, layers, hidden, vocab, beyond = ticket.capture()
            with _lock:
                self.dropped += beyond * (layers + 3)
            self._put(_Table(job_id, self.values, data, layers, hidden, vocab))
        except Exception as error:
            self._lose(job_id, error)

    def _lose(self, job_id: str, reason: object) -> None:
        with _lock:
            self.failed += 1
        _logging.log.warning("The capture of job %r is lost: %s", job_id, reason)

    def _put(self, table: _Table) -> None:
        if self.path is None:
            found = list(table.records())
            with _lock:
                self._kept += found
        elif self.path.suffix == SUFFIX:
            with _beside(self.path.parent, table, self.path if self.written else None) as whole:
                os.replace(whole, self.path)
        else:
            self._add(self.path, table)
        with _lock:
            self.written += 1

    def _add(self, folder: Path, table: _Table) -> None:
        """A file in a folder, which others may write to as well."""
        if not self._next_file:
            self._next_file = 1 + max((int(old.stem) for old in _numbered(folder)), default=0)
        with _beside(folder, table, None) as whole:
            while True:
                try:
                    os.link(whole, folder / f"{self._next_file:06d}{SUFFIX}")
                    return
                except FileExistsError:
                    self._next_file += 1


def capture(path: str | os.PathLike[str] | None = None, *, values: int = 10, records: int = 1_000_000) -> Capture:
    """Records the outputs of a model's layers, for comparison with another engine or another machine.

    Pass what this returns as ``capture=`` to :func:`mpool.generate`, :func:`mpool.chat`, :func:`mpool.vision` or
    :func:`mpool.submit`, here or in ``mpool.aio``. A call has layers + 3 records for each token that it samples: of
    the row that the token is sampled from. Completions are the same as without. Calls with ``n`` above 1 cannot be
    captured.

    Args:
        path: a ``.jsonl`` file, which is replaced, and then written anew with each call, by one open capture at a time;
            or a folder, which gets a file a call (``000001.jsonl``), for many of them, also of several processes. It is
            made if its name has no suffix or ends in ``/``. None: they are kept in memory. Files appear complete, by
            renaming, when their call ends: a process that is killed keeps those of the calls before, and may leave a
            file ``mpool-*.tmp`` beside them.
        values: numbers in a record, the first ones; fewer if the stage has fewer.
        records: records of one request. Their memory is reserved when it starts (for no more than
            ``max_tokens`` can need); further ones are dropped and counted.

    Returns:
        a :class:`mpool.Capture`; leaving its ``with`` waits until everything is written.

    Raises:
        InvalidArgument: an argument is not as described.
        FileError: the file or folder cannot be made there, or another capture of this process writes the file.

    Example:
        >>> with mpool.capture() as capture:
        ...     done = mpool.generate("Once upon a time", temperature=0, max_tokens=2, capture=capture)
        >>> found = capture.records()
        >>> len(found), found[0].checkpoint, found[0].shape, found[-1].checkpoint, found[-1].token_idx
        (66, 'embedding', (576,), 'logits', 1)
    """
    return Capture(path, values=values, records=records)


def job_of(value: Any) -> CaptureJob | None:
    """The job for the argument ``capture=`` of a request.

    Raises:
        InvalidArgument: something else.
    """
    if value is None or isinstance(value, CaptureJob):
        return value
    if isinstance(value, Capture):
        return value.job()
    raise InvalidArgument(f"capture is {shown(value)}, allowed: what mpool.capture() returns, or a job() of it")


def _count(name: str, value: Any, most: int) -> int:
    found = integer(value)
    if found is None or not 1 <= found <= most:
        raise InvalidArgument(f"{name} is {shown(value)}, allowed: 1 to {most:,}")
    return found


def _checked(path: Any) -> Path | None:
    if path is None:
        return None
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise InvalidArgument(f"path is {shown(path)}, allowed: a {SUFFIX} file or a folder")
    found = Path(os.path.abspath(path))  # wherever the process goes
    is_file = found.suffix == SUFFIX
    folder = found.parent if is_file else found
    reason = ""
    if is_file:
        if found.is_dir():
            reason = "is a folder"
        elif not folder.is_dir():
            reason = "is in no folder"
    elif found.exists() and not found.is_dir():
        reason = f"is not a folder, and a file has to end in {SUFFIX}"
    elif not found.exists():
        if found.suffix and not os.fspath(path).endswith(os.sep):
            reason = (f"does not exist. Allowed: a file that ends in {SUFFIX}, a folder that exists, or a new one, "
                      "whose name ends in / if it has a suffix")
        else:
            try:
                folder.mkdir(exist_ok=True)
            except OSError as error:
                reason = f"cannot be made: {error.strerror}"
    if not reason and not os.access(folder, os.W_OK | os.X_OK):
        reason = f"cannot be made: {folder} is not writable" if is_file else "is not writable"
    if reason:
        raise FileError(f"a capture cannot be written: {found} {reason}")
    return found


def _numbered(folder: Path) -> Iterator[Path]:
    """Captures in a folder."""
    for old in folder.glob(f"*{SUFFIX}"):
        if old.stem.isascii() and old.stem.isdigit():
            yield old


# ---- what a call has -------------------------------------------------------------------------------------------------

#: Nine digits tell every float32 from all others.
_NUMBER = "%.9g"
_NOT_FINITE = re.compile("-?(nan|inf)")


class _Table:
    """The records of a call, in the order that they are computed in.

    Args:
        job_id: the call.
        values: numbers a record, where there are as many.
        data: float32 ``(tokens, numbers)``, the records of a token in sequence.
        layers, hidden, vocab: sizes of the model.
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
        """One after the other."""
        for token, row in enumerate(self._data):
            for name, size, place in self._stages:
                values = (float(_NUMBER % value) if math.isfinite(value) else None for value in row[place].tolist())
                yield CaptureRecord(name, TEAM, token, self.job_id, "float32", (size,), tuple(values))

    def lines(self) -> Iterator[str]:
        """The same as lines of JSON."""
        job = json.dumps(self.job_id).replace("%", "%%")
        heads = [f'{{"checkpoint": "{name}", "team": "{TEAM}", "token_idx": %d, "job_id": {job}, "dtype": "float32", '
                 f'"shape": [{size}], "values": [' for name, size, _ in self._stages]
        formats = [", ".join([_NUMBER] * (place.stop - place.start)) for _, _, place in self._stages]
        for token, row in enumerate(self._data):
            values = row.tolist()
            finite = all(map(math.isfinite, values))
            for head, numbers, (_, _, place) in zip(heads, formats, self._stages):
                body = numbers % tuple(values[place])
                yield f"{head % token}{body if finite else _NOT_FINITE.sub('null', body)}]}}\n"


@contextmanager
def _beside(folder: Path, table: _Table, before: Path | None) -> Iterator[Path]:
    """A file in a folder with what is in ``before``, and behind it a call's records: whole, or there is an error."""
    found = folder / f"mpool-{os.getpid()}-{secrets.token_hex(8)}.tmp"
    file = open(found, "xb")  # outside of the try: a file that exists already belongs to another writer
    try:
        with file:
            if before is not None:
                with open(before, "rb") as old:
                    shutil.copyfileobj(old, file, 1 << 20)
            file.writelines(line.encode() for line in table.lines())
        yield found
    finally:
        found.unlink(missing_ok=True)


# ---- the thread ------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True, eq=False)
class _Followed:
    job: CaptureJob
    ticket: _core.Ticket


class _Writer:
    """Waits for the oldest call, and looks at the others now and then: nothing is done while calls write."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._calls: list[_Followed] = []
        threading.Thread(target=self._run, name="mpool-capture", daemon=True).start()

    def follow(self, call: _Followed) -> None:
        """From now until it has ended and is written."""
        with self._moved:
            self._calls.append(call)
            self._moved.notify_all()

    def full(self) -> bool:
        """True if no more requests can be followed."""
        return len(self._calls) >= MAX_CALLS

    def flush(self, capture: Capture | None, timeout: float | None) -> bool:
        """Until no call is left, of a capture or of any."""
        with self._moved:
            return self._moved.wait_for(
                lambda: not any(capture in (None, call.job.capture) for call in self._calls), timeout)

    def _run(self) -> None:
        while True:
            with self._moved:
                self._moved.wait_for(lambda: self._calls)
                oldest = self._calls[0].ticket
            oldest.wait(_PERIOD)
            del oldest
            self._sweep()

    def _sweep(self) -> None:
        for call in [call for call in self._calls if call.ticket.done()]:
            call.job.capture._take(call.job.id, call.ticket)
            with self._moved:
                self._calls.remove(call)
                self._moved.notify_all()


_started: _Writer | None = None
_lock = threading.Lock()
#: File -> the open capture that writes it.
_open: weakref.WeakValueDictionary[str, Capture] = weakref.WeakValueDictionary()


def _writer() -> _Writer:
    global _started
    with _lock:
        if _started is None:
            _started = _Writer()
        return _started


def _flush(capture: Capture | None, timeout: float | None) -> bool:
    writer = _started
    return writer is None or writer.flush(capture, timeout)


def finish() -> None:
    """Writes the records of finished requests when the interpreter ends."""
    _flush(None, _LAST)


def _after_fork_in_child() -> None:
    global _started, _lock
    _started, _lock = None, threading.Lock()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)

__all__ = ["Capture", "CaptureJob", "CaptureRecord", "capture", "finish", "job_of"]
