"""Two captures held against each other: how far each stage of a model is apart, for each token."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..checks import integer, shown
from ..errors import FormatError, InvalidArgument
from ..tasks.capture_files import CaptureRecord
from ..tasks.capture_files import read_capture as read_capture

if TYPE_CHECKING:
    CaptureLike = str | os.PathLike[str] | Iterable[CaptureRecord]
    #: A job and which of its calls, a token, a stage.
    _Place = tuple[tuple[str, int], int, str]

Grade = Literal["exact", "close", "acceptable", "apart"]
#: Grade -> the largest absolute difference that it allows.
GRADES: dict[Grade, float] = {"exact": 1e-5, "close": 1e-3, "acceptable": 1e-1, "apart": math.inf}


def grade_of(difference: float) -> Grade:
    """The best grade that allows a difference; NaN is apart."""
    return next((grade for grade, most in GRADES.items() if difference <= most), "apart")


@dataclass(frozen=True, slots=True)
class CaptureDifference:
    """How far one record is from the other's.

    Attributes:
        job_id, token_idx, checkpoint: which one; ``job_id`` of the first capture.
        call: from 1 on: which one of the calls with that ``job_id``, in the order that they were written in.
        most, mean: the largest and the mean absolute difference of the values. Infinite where one is not finite and the
            other is.
    """

    job_id: str
    token_idx: int
    checkpoint: str
    most: float
    mean: float
    call: int = 1

    @property
    def grade(self) -> Grade:
        """By the largest."""
        return grade_of(self.most)


@dataclass(frozen=True, slots=True)
class CaptureComparison:
    """Result of :func:`mpool.compare_captures`. ``differences``: one for each record, in the order of the
    first capture."""

    differences: tuple[CaptureDifference, ...]

    @property
    def worst(self) -> CaptureDifference:
        """The one with the largest difference."""
        return max(self.differences, key=lambda found: found.most)

    @property
    def grade(self) -> Grade:
        """Grade of the worst record."""
        return self.worst.grade

    @property
    def mean(self) -> float:
        """Over all records."""
        return sum(found.mean for found in self.differences) / len(self.differences)

    def departs(self, grade: Grade = "exact") -> CaptureDifference | None:
        """The first record that is not within a grade: where the engines part. None: all are.

        Raises:
            InvalidArgument: there is no such grade.
        """
        if not isinstance(grade, str) or grade not in GRADES:
            raise InvalidArgument(f"grade is {shown(grade)}, allowed: {', '.join(GRADES)}")
        return next((found for found in self.differences if not found.most <= GRADES[grade]), None)


def compare_captures(first: CaptureLike, second: CaptureLike, *, tokens: int | None = None) -> CaptureComparison:
    """Holds two captures of the same prompt against each other.

    Grades are by the largest absolute difference: exact up to 1e-5, close up to 1e-3, acceptable up to 1e-1.

    Args:
        first, second: files, folders, or records. If each has one ``job_id``, its calls are compared whatever it is;
            otherwise calls of the same ``job_id``. Where one was used again, the first call with the first, and so on:
            the next begins where the records begin anew.
        tokens: tokens of each request to compare, the first ones; None: all.

    Raises:
        FormatError: they are not of the same calls, tokens and stages, of the same shapes and with as many values; or
            one says something twice. The message names the first that does not fit.
        FileError, FormatError: as :func:`read_capture`.
        InvalidArgument: ``tokens`` is not 1 or more, or there is nothing to compare.

    Example:
        >>> with mpool.capture() as a, mpool.capture() as b:
        ...     for capture in (a, b):
        ...         done = mpool.generate("Hello", temperature=0, max_tokens=3, capture=capture)
        >>> found = mpool.compare_captures(a.records(), b.records())
        >>> found.grade, found.worst.most, found.departs()
        ('exact', 0.0, None)
    """
    most = None if tokens is None else integer(tokens)
    if tokens is not None and (most is None or most < 1):
        raise InvalidArgument(f"tokens is {shown(tokens)}, allowed: 1 or more, or None")
    a, b = _by_place(first, "first", most), _by_place(second, "second", most)
    if not a or not b:
        raise InvalidArgument(f"the {'second' if a else 'first'} capture has no records")
    jobs = [{job: None for (job, _), _, _ in table} for table in (a, b)]
    renamed = dict(zip(jobs[0], jobs[1])) if len(jobs[0]) == len(jobs[1]) == 1 else {job: job for job in jobs[0]}
    found = []
    for place, record in a.items():
        where, ((job, call), token, checkpoint) = _named(place), place
        other = b.pop(((renamed[job], call), token, checkpoint), None)
        if other is None:
            raise FormatError(f"the captures do not match: the second has no {where}")
        if other.shape != record.shape or len(other.values) != len(record.values):
            raise FormatError(f"the captures do not match: {where} has {len(record.values)} values of shape "
                              f"{record.shape} in the first, {len(other.values)} of {other.shape} in the second")
        found.append(_difference(place, record.values, other.values))
    if b:
        raise FormatError(f"the captures do not match: the first has no {_named(next(iter(b)))}")
    return CaptureComparison(tuple(found))


def _named(place: _Place) -> str:
    (job, call), token, checkpoint = place
    return f"{checkpoint} of token {token} of job {job!r}" + (f", call {call}" if call > 1 else "")


def _by_place(capture: CaptureLike, which: str, tokens: int | None) -> dict[_Place, CaptureRecord]:
    if isinstance(capture, (str, os.PathLike)):
        capture = read_capture(capture)
    found: dict[_Place, CaptureRecord] = {}
    begins: dict[str, tuple[int, str]] = {}  # job -> the first of its records
    calls: dict[str, int] = {}
    for record in capture:
        if not isinstance(record, CaptureRecord):
            raise InvalidArgument(f"the {which} capture has {shown(record)}, allowed: mpool.CaptureRecord")
        job, at = record.job_id, (record.token_idx, record.checkpoint)
        if begins.setdefault(job, at) == at:
            calls[job] = calls.get(job, 0) + 1
        place = ((job, calls[job]), *at)
        if place in found:
            raise FormatError(f"the {which} capture has {_named(place)} twice")
        if tokens is None or record.token_idx < tokens:
            found[place] = record
    return found


def _difference(place: _Place, a: tuple[float | None, ...], b: tuple[float | None, ...]) -> CaptureDifference:
    (job, call), token, checkpoint = place
    apart = [abs(x - y) if x is not None and y is not None else 0.0 if x is y else math.inf for x, y in zip(a, b)]
    return CaptureDifference(job, token, checkpoint, max(apart), sum(apart) / len(apart), call)


__all__ = ["CaptureComparison", "CaptureDifference", "GRADES", "compare_captures", "grade_of", "read_capture"]
