"""Capture records and their files, which hold one JSON object per line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..checks import check_path, refuse
from ..errors import FileError, FormatError
from ..host.resources import typed

#: Suffix of capture files.
SUFFIX = ".jsonl"
#: Maximum length of a line in bytes, and number of dimensions of a shape: the product of a million takes hours.
_MAX_LINE, _MAX_DIMENSIONS = 64 << 20, 8


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """The output of one stage of a model for one token.

    Attributes:
        checkpoint: stage of the model: ``"embedding"``, ``"layer.0"`` ... (layer outputs with the residual),
            ``"norm"`` (the final norm) or ``"logits"`` (before temperature, penalties and filters).
        team: name of the engine that computed the record: ``"mpool"``.
        token_idx: position of the token: 0 is the last token of the prompt, 1 and up are tokens of the completion. The
            logits of a token's record are the ones that the next token is sampled from, so the last
            sampled token has no record.
        job_id: name of the request.
        dtype: data type of the computation.
        shape: shape of the stage's whole output, ``(n,)``.
        values: the first values of the output; None stands for NaN and infinity.
    """

    checkpoint: str
    team: str
    token_idx: int
    job_id: str
    dtype: str
    shape: tuple[int, ...]
    values: tuple[float | None, ...]


@typed
def read_capture(path: str | os.PathLike[str]) -> tuple[CaptureRecord, ...]:
    """Reads the records of a capture file, or of all ``.jsonl`` files of a folder in the order of their names.

    Args:
        path: a capture file or a folder of them.

    Raises:
        InvalidArgument: ``path`` is not a path.
        FileError: the file or folder cannot be read.
        FormatError: a line is not a valid record; the message has the line number and the reason.
    """
    if not isinstance(path, (str, os.PathLike)):
        refuse("path", path, f"a {SUFFIX} file or a folder of them")
    check_path("path", path)
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
                    raise ValueError(f"the line is longer than {_MAX_LINE >> 20} MiB")
                found = _record(_parsed(line))
            except ValueError as error:
                raise FormatError(f"{path}, line {number}: not a capture record: {error}") from None
            yield found


def _parsed(line: bytes) -> Any:
    """Parse a line as JSON. A complete last line may lack its newline."""
    try:
        return json.loads(line.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    except ValueError as error:
        if not line.endswith(b"\n"):
            raise ValueError("the line is truncated") from None
        if isinstance(error, UnicodeDecodeError):
            raise ValueError("the line is not UTF-8") from None
        if isinstance(error, json.JSONDecodeError):
            raise ValueError(f"the line is not JSON: {error.msg}, column {error.colno}") from None
        raise ValueError("a number has too many digits") from None


def _record(value: Any) -> CaptureRecord:
    names = [field.name for field in fields(CaptureRecord)]
    if not isinstance(value, dict) or set(value) != set(names):
        raise ValueError("the line must be an object with the fields " + ", ".join(names))
    for name in ("checkpoint", "team", "job_id", "dtype"):
        if not isinstance(value[name], str) or not 1 <= len(value[name]) <= 256:
            raise ValueError(f"`{name}` must be a string of 1 to 256 characters")
    token, shape, values = (value[name] for name in ("token_idx", "shape", "values"))
    if type(token) is not int or not 0 <= token < 1 << 31:
        raise ValueError("`token_idx` must be an integer from 0 to 2**31 - 1")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS \
            or not all(type(size) is int and 0 < size < 1 << 62 for size in shape):
        raise ValueError(f"`shape` must be a list of at most {_MAX_DIMENSIONS} integers of 1 or more")
    if not isinstance(values, list) or not 1 <= len(values) <= math.prod(shape) \
            or not all(one is None or type(one) in (int, float) for one in values):
        raise ValueError("`values` must be a list of numbers: at least one, and at most the product of `shape`")
    try:
        numbers = tuple(None if one is None or not math.isfinite(one) else float(one) for one in values)
    except OverflowError:
        raise ValueError("`values` has a number that is too large for float64") from None
    return CaptureRecord(value["checkpoint"], value["team"], token, value["job_id"], value["dtype"], tuple(shape),
                         numbers)


__all__ = ["SUFFIX", "CaptureRecord", "read_capture"]
