"""Comparison of two captures: the difference of each layer's output, for each token."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..checks import check_path, integer, one_of, refuse
from ..errors import FormatError, InvalidArgument
from ..host.resources import typed
from ..tasks.capture_files import CaptureRecord
from ..tasks.capture_files import read_capture as read_capture

if TYPE_CHECKING:
    CaptureLike = str | os.PathLike[str] | Iterable[CaptureRecord]
    #: Position of a record: (job id, number of the request), token index, checkpoint.
    _Position = tuple[tuple[str, int], int, str]

Grade = Literal["exact", "close", "acceptable", "apart"]
_CAPTURES = "a file, a folder, or an iterable of mpool.debug.CaptureRecord"
#: Grade -> maximum absolute difference.
GRADES: dict[Grade, float] = {"exact": 1e-5, "close": 1e-3, "acceptable": 1e-1, "apart": math.inf}


def grade_of(difference: float) -> Grade:
    """Return the best grade that allows a difference. NaN is ``"apart"``."""
    return next((grade for grade, most in GRADES.items() if difference <= most), "apart")


@dataclass(frozen=True, slots=True)
class CaptureDifference:
    """Difference between two records at the same position.

    Attributes:
        job_id: job id in the first capture.
        token_idx: index of the token.
        checkpoint: name of the layer output.
        most: maximum absolute difference of the values; infinite if only one of two values is finite.
        mean: mean absolute difference of the values.
        call: number of the request among those with this ``job_id``, from 1, in the order of writing.
    """

    job_id: str
    token_idx: int
    checkpoint: str
    most: float
    mean: float
    call: int = 1

    @property
    def grade(self) -> Grade:
        """Grade of the maximum difference."""
        return grade_of(self.most)


@dataclass(frozen=True, slots=True)
class CaptureComparison:
    """Result of :func:`mpool.debug.compare_captures`.

    Attributes:
        differences: one difference per record, in the order of the first capture.
    """

    differences: tuple[CaptureDifference, ...]

    @property
    def worst(self) -> CaptureDifference:
        """Record with the largest maximum difference."""
        return max(self.differences, key=lambda found: found.most)

    @property
    def grade(self) -> Grade:
        """Grade of the worst record."""
        return self.worst.grade

    @property
    def mean(self) -> float:
        """Mean absolute difference over all records."""
        return sum(found.mean for found in self.differences) / len(self.differences)

    def departs(self, grade: Grade = "exact") -> CaptureDifference | None:
        """Return the first record that does not reach a grade: the point where the engines diverge. None: all reach it.

        Raises:
            InvalidArgument: unknown grade.
        """
        one_of("grade", grade, tuple(GRADES))
        return next((found for found in self.differences if not found.most <= GRADES[grade]), None)


@typed
def compare_captures(first: CaptureLike, second: CaptureLike, *, tokens: int | None = None) -> CaptureComparison:
    """Compare two captures of the same prompt.

    The maximum absolute difference determines the grade: exact up to 1e-5, close up to 1e-3, acceptable up to 1e-1.

    Args:
        first, second: files, folders, or records. If each capture has a single ``job_id``, the two jobs are compared
            even if their ids differ; otherwise jobs with equal ids are compared. If an id was used for several
            requests, they are compared in order: each record at the position of the id's first record starts a new
            request.
        tokens: number of tokens of each request to compare; None: all.

    Raises:
        FormatError: the captures differ in their requests, tokens, checkpoints, shapes or numbers of values, or one of
            them has two records for one position. The message names the first mismatch.
        FileError, FormatError: as for :func:`read_capture`.
        InvalidArgument: ``tokens`` is not 1 or more, or a capture has no records.

    Example:
        >>> with mpool.debug.capture() as a, mpool.debug.capture() as b:
        ...     for capture in (a, b):
        ...         done = mpool.generate("Hello", temperature=0, max_tokens=3, capture=capture)
        >>> found = mpool.debug.compare_captures(a.records(), b.records())
        >>> found.grade, found.worst.most, found.departs()
        ('exact', 0.0, None)
    """
    most = None if tokens is None else integer(tokens)
    if tokens is not None and (most is None or most < 1):
        refuse("tokens", tokens, "an integer of 1 or more, or None")
    a, b = _by_position(first, "first", most), _by_position(second, "second", most)
    if not a or not b:
        name = "second" if a else "first"
        raise InvalidArgument(f"`{name}` must be a capture with records, got one without", param=name,
                              hint="Pass the capture of a request that has run")
    jobs = [{job: None for (job, _), _, _ in table} for table in (a, b)]
    renamed = dict(zip(jobs[0], jobs[1])) if len(jobs[0]) == len(jobs[1]) == 1 else {job: job for job in jobs[0]}
    found = []
    for position, record in a.items():
        where, ((job, call), token, checkpoint) = _text_of(position), position
        other = b.pop(((renamed[job], call), token, checkpoint), None)
        if other is None:
            raise FormatError(f"the captures do not match: the second has no {where}")
        if other.shape != record.shape or len(other.values) != len(record.values):
            raise FormatError(f"the captures do not match: {where} has {len(record.values)} values of shape "
                              f"{record.shape} in the first, {len(other.values)} of {other.shape} in the second")
        found.append(_difference(position, record.values, other.values))
    if b:
        raise FormatError(f"the captures do not match: the first has no {_text_of(next(iter(b)))}")
    return CaptureComparison(tuple(found))


def _text_of(position: _Position) -> str:
    (job, call), token, checkpoint = position
    return f"{checkpoint} of token {token} of job {job!r}" + (f", request {call}" if call > 1 else "")


def _by_position(capture: CaptureLike, which: str, tokens: int | None) -> dict[_Position, CaptureRecord]:
    if isinstance(capture, (str, os.PathLike)):
        check_path(which, capture)
        capture = read_capture(capture)
    if not isinstance(capture, Iterable) or getattr(capture, "shape", None) == ():
        refuse(which, capture, _CAPTURES)
    found: dict[_Position, CaptureRecord] = {}
    begins: dict[str, tuple[int, str]] = {}  # job id -> position of its first record
    calls: dict[str, int] = {}
    for record in capture:
        if not isinstance(record, CaptureRecord):
            refuse(which, record, _CAPTURES)
        job, at = record.job_id, (record.token_idx, record.checkpoint)
        if begins.setdefault(job, at) == at:
            calls[job] = calls.get(job, 0) + 1
        position = ((job, calls[job]), *at)
        if position in found:
            raise FormatError(f"the {which} capture has {_text_of(position)} twice")
        if tokens is None or record.token_idx < tokens:
            found[position] = record
    return found


def _difference(position: _Position, a: tuple[float | None, ...], b: tuple[float | None, ...]) -> CaptureDifference:
    (job, call), token, checkpoint = position
    apart = [abs(x - y) if x is not None and y is not None else 0.0 if x is y else math.inf for x, y in zip(a, b)]
    return CaptureDifference(job, token, checkpoint, max(apart), sum(apart) / len(apart), call)


__all__ = ["CaptureComparison", "CaptureDifference", "GRADES", "compare_captures", "grade_of", "read_capture"]
