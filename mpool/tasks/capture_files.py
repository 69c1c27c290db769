"""Records of captures, and the files that hold them: one JSON object a line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..checks import shown
from ..errors import FileError, FormatError, InvalidArgument

#: Suffix of the files.
SUFFIX = ".jsonl"
#: Longest line, in bytes.
_MAX_LINE = 64 << 20


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """The output of one stage of a model for one token.

    Attributes:
        checkpoint: ``"embedding"``, ``"layer.0"`` ... (outputs, with what is added to them), ``"norm"`` (the last one)
            or ``"logits"`` (as they are drawn from, before any option of sampling).
        team: the engine that computed it: ``"mpool"``.
        token_idx: 0: the last token of the prompt; from 1 on the tokens of the answer, as far as they were computed: a
            token's record leads to the next one.
        job_id: the call.
        dtype: type of the numbers during computation.
        shape: of all of them, ``(n,)``.
        values: the first of them; None: not finite.
    """

    checkpoint: str
    team: str
    token_idx: int
    job_id: str
    dtype: str
    shape: tuple[int, ...]
    values: tuple[float | None, ...]


def read_capture(path: str | os.PathLike[str]) -> tuple[CaptureRecord, ...]:
    """The records of a file, or of all ``.jsonl`` files of a folder in order of name.

    Raises:
        FileError: it cannot be read.
        FormatError: a line is no record; the message says which and why.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidArgument(f"path is {shown(path)}, allowed: a {SUFFIX} file, or a folder of them")
    try:
        found = Path(path)
        files = sorted(found.glob(f"*{SUFFIX}")) if found.is_dir() else [found]
        return tuple(record for file in files for record in _records(file))
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"a capture cannot be read: {error.filename or path}: {error.strerror or error}") from None


def _records(path: Path) -> Iterator[CaptureRecord]:
    with open(path, "rb") as file:
        for number in range(1, 1 << 62):
            line = file.readline(_MAX_LINE + 1)
            if not line:
                return
            try:
                if len(line) > _MAX_LINE:
                    raise ValueError("it is too long")
                found = _record(_parsed(line))
            except ValueError as error:
                raise FormatError(f"{path}, line {number}: no record of a capture: {error}") from None
            yield found


def _parsed(line: bytes) -> Any:
    """The JSON value of a line. The last line may lack its newline if it is complete."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError as error:
        if not line.endswith(b"\n"):
            raise ValueError("it is cut short") from None
        if isinstance(error, UnicodeDecodeError):
            raise ValueError("it is not UTF-8") from None
        if isinstance(error, json.JSONDecodeError):
            raise ValueError(f"it is not JSON: {error.msg}, column {error.colno}") from None
        raise ValueError("a number has too many digits") from None


def _record(value: Any) -> CaptureRecord:
    names = [field.name for field in fields(CaptureRecord)]
    if not isinstance(value, dict) or set(value) != set(names):
        raise ValueError("it has to have " + ", ".join(names))
    for name in ("checkpoint", "team", "job_id", "dtype"):
        if not isinstance(value[name], str) or not 1 <= len(value[name]) <= 256:
            raise ValueError(f"{name} is no text of 1 to 256 characters")
    token, shape, values = (value[name] for name in ("token_idx", "shape", "values"))
    if type(token) is not int or not 0 <= token < 1 << 31:
        raise ValueError("token_idx is no number from 0 on")
    if not isinstance(shape, list) or not all(type(size) is int and 0 < size < 1 << 62 for size in shape):
        raise ValueError("shape is no list of sizes")
    if not isinstance(values, list) or not 1 <= len(values) <= math.prod(shape) \
            or not all(one is None or type(one) in (int, float) for one in values):
        raise ValueError("values is no list of numbers, at least one and no more than shape says")
    try:
        numbers = tuple(None if one is None or not math.isfinite(one) else float(one) for one in values)
    except OverflowError:
        raise ValueError("values has a number that is too large for a float64") from None
    return CaptureRecord(value["checkpoint"], value["team"], token, value["job_id"], value["dtype"], tuple(shape),
                         numbers)


__all__ = ["SUFFIX", "CaptureRecord", "read_capture"]
