"""Writes a model as a GGUF file with weights of another type."""

from __future__ import annotations

import errno
import math
import os
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from ... import _core, records
from ...checks import refuse
from ...errors import FileError, FormatError, InvalidArgument
from ...host.resources import cpus, start_thread
from ...names import QUANTIZED
from ..files import close, open_regular, read_exactly
from ..formats.hf_quantised import DTYPES
from ..spec import TensorEntry
from .exports import Change
from .gguf_layout import header, padding, value
from .inputs import Input, Tensor, read_input
from .recipes import BLOCK, RECIPES, type_of

log = records.logger("mpool.models")

#: Values that a thread converts at once: at most 4 MiB of float32, unless one row or one head has more.
_CHUNK = 1 << 20
#: Bytes of a block of each type that is written.
_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "Q4_0": 18, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176,
          "Q6_K": 210}
_MAX_THREADS = 64
_FLOATS = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True)
class Report:
    """The result of :func:`quantize`.

    Attributes:
        path: the file that was written.
        nbytes: its size in bytes.
        types: number of tensors by type.
    """

    path: str
    nbytes: int
    types: dict[str, int]


@dataclass(frozen=True)
class _Planned:
    tensor: Tensor
    dtype: str
    nbytes: int


def quantize(source: str, target: str, type: str, *, force: bool = False, threads: int | None = None,
             allow_requantize: bool = False, progress: Callable[[int, int], None] | None = None) -> Report:
    """Write a model as a GGUF file.

    The file is written under a temporary name beside the target and renamed when it is complete. Memory is bounded by a
    few megabytes per thread.

    Args:
        source: path of a .gguf file, or of a model folder (the architectures of :data:`.exports.EXPORTS`). Its weights
            may be quantised by AWQ, GPTQ or FP8; what that method lost stays lost.
        target: path of the file to write.
        type: one of :data:`mpool.names.QUANTIZED`.
        force: True to replace an existing file.
        threads: threads that convert; None: one per CPU that this process may use.
        allow_requantize: True to convert weights of a GGUF file that are quantised already to another quantised type,
            which loses precision a second time. Types of floats (F16, BF16, F32) lose nothing more, and are allowed.
        progress: function that is called with the bytes of data that were written, and their total.

    Raises:
        InvalidArgument: ``type`` or ``threads`` is invalid, the target is the source, or weights are quantised already
            and ``allow_requantize`` is False.
        FileError: the target exists and ``force`` is False; a file cannot be read or written, or the disk is full.
        FormatError: the model is malformed, or a weight is NaN or infinite.
        Unsupported: mpool cannot convert the model.
    """
    check(source, target, type, force, threads)
    model = read_input(source)
    plan = [_planned(type, model, tensor) for tensor in model.tensors]
    _check_types(source, plan, allow_requantize)
    keys = dict(model.keys) | {"general.quantization_version": value(2),
                               "general.file_type": value(RECIPES[type].number)}
    head = header(keys, [(one.tensor.name, one.dtype, one.tensor.shape, one.nbytes) for one in plan])
    total = sum(one.nbytes + padding(one.nbytes) for one in plan)
    _check_space(target, len(head) + total)
    if os.path.exists(target) and any(os.path.samefile(path, target) for path in model.paths):
        raise InvalidArgument(f"{target} is a file to read; write to another file")
    threads = threads or min(cpus(), _MAX_THREADS)
    with _Threads(threads) as pool:
        _write(target, head, _data(plan, model, pool, 2 * threads), total, force, progress)
    return Report(target, len(head) + total, dict(Counter(one.dtype for one in plan)))


class _Threads:
    """Daemon threads that run calls. The exit of the interpreter does not wait for them."""

    def __init__(self, count: int) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._count = count

    def __enter__(self) -> _Threads:
        try:
            for _ in range(self._count):
                start_thread(self._run, "mpool-quantize")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for _ in range(self._count):
            self._calls.put(None)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run a call on a thread. Returns its future."""
        future: Future[Any] = Future()
        self._calls.put((future, function, args))
        return future

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, args = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args))
                except BaseException as error:  # the caller of result() gets it
                    future.set_exception(error)
            del call, future, args


def check(source: str, target: str, type: str, force: bool, threads: int | None) -> None:
    """Check the arguments of :func:`quantize` that need no model; the source may be a reference.

    Raises:
        InvalidArgument, FileError: as :func:`quantize`.
    """
    if type not in QUANTIZED:
        refuse("type", type, f"one of {', '.join(QUANTIZED)}")
    if threads is not None and not 1 <= threads <= _MAX_THREADS:
        refuse("threads", threads, f"an integer from 1 to {_MAX_THREADS}")
    if not os.path.isdir(os.path.dirname(target) or "."):
        raise FileError(f"{target}: No such file or directory", hint="Create the folder first")
    if os.path.isdir(target):
        raise InvalidArgument(f"{target} is a folder; give the path of the .gguf file to write")
    if os.path.exists(target):
        if os.path.exists(source) and os.path.samefile(source, target):
            raise InvalidArgument(f"{target} is a file to read; write to another file")
        if not force:
            raise _exists(target)


def _exists(target: str) -> FileError:
    return FileError(f"{target} exists", hint="Use --force to replace it (force=True in Python)")


def _check_space(target: str, size: int) -> None:
    """Refuse to begin if the disk cannot hold the file."""
    folder = os.path.dirname(os.path.abspath(target))
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        raise FileError(f"{folder}: {error.strerror}", hint="Create the folder first") from error
    if disk.f_bavail * disk.f_frsize < size:
        raise _full(target, size)


def _full(target: str, size: int) -> FileError:
    return FileError(f"{target}: the disk is full; the file needs {size / 1e6:.1f} MB",
                     hint="Free disk space, or write to another disk")


def _planned(type: str, model: Input, tensor: Tensor) -> _Planned:
    """Choose the type of a tensor, and compute its size."""
    dtype = type_of(type, model.model, tensor.name, tensor.shape)
    if dtype is None:
        dtype = "F32" if tensor.folder or not tensor.parts else tensor.parts[0].dtype
    if len(tensor.parts) == 1 and dtype == tensor.parts[0].dtype and tensor.change is None:
        return _Planned(tensor, dtype, tensor.parts[0].nbytes)
    items = int(np.prod(tensor.shape, dtype=object))
    return _Planned(tensor, dtype, items // BLOCK[dtype] * _BYTES[dtype])


def _check_types(source: str, plan: list[_Planned], allowed: bool) -> None:
    """Refuse to quantise weights a second time, unless that is allowed. Weights that only a quantised folder has are
    converted with a warning: AWQ, GPTQ and FP8 are how their models are published."""
    again = Counter(part.dtype for one in plan for part in one.tensor.parts
                    if one.dtype not in _FLOATS and part.dtype not in _FLOATS and part.dtype != one.dtype)
    if not again:
        return
    types = ", ".join(f"{count} of type {dtype}" for dtype, count in sorted(again.items()))
    if not allowed and not again.keys() <= set(DTYPES):
        raise InvalidArgument(
            f"{source} has weights that are quantised already ({types}): they would lose precision a second time",
            param="source", hint="Use a file with F16, BF16 or F32 weights. To quantise this file nevertheless, use "
                                 "--allow-requantize (allow_requantize=True in Python)")
    log.warning("%s has weights that are quantised already (%s): they lose precision a second time", source, types)


def _data(plan: list[_Planned], model: Input, pool: _Threads, most: int) -> Iterator[bytes]:
    """Yield the data of all tensors in order, converted by threads that are at most ``most`` chunks ahead."""
    ahead: deque[Future[bytes]] = deque()
    files: list[int] = []
    read_part: TensorEntry | None = None
    try:
        for path in model.paths:
            files.append(open_regular(path)[0])
        for one in plan:
            if one.tensor.data:
                ahead.append(pool.submit(bytes, one.tensor.data))
            for part, first, rows, factor in _ranges(one.tensor):
                if part is not read_part:
                    read, read_part = _reader(part, model, files), part
                ahead.append(pool.submit(_convert, one, part, first, rows, factor, read, model.paths[part.file]))
                if len(ahead) > most:
                    yield ahead.popleft().result()
            if padding(one.nbytes):
                ahead.append(pool.submit(bytes, padding(one.nbytes)))
        while ahead:
            yield ahead.popleft().result()
    finally:
        for future in ahead:
            future.cancel()
        for future in ahead:
            if not future.cancelled():
                future.exception()  # waits: the thread reads from the files
        for fd in files:
            close(fd)


def _layout(tensor: Tensor, part: TensorEntry) -> tuple[int, int]:
    """Return the rows and columns of a part. Each value of a vector whose values are reordered is a row."""
    reordered = tensor.heads or tensor.change and tensor.change.ranges
    columns = 1 if reordered and len(part.shape) == 1 else part.shape[-1]
    return int(np.prod(part.shape, dtype=object)) // columns, columns


def _ranges(tensor: Tensor) -> Iterator[tuple[TensorEntry, int, int, float]]:
    """Yield part, first row, number of rows and factor of each chunk, in the order of the file. Rows stay together if
    they are a head whose halves are interleaved, or if they become columns."""
    change = tensor.change or Change()
    for part in tensor.parts:
        rows, columns = _layout(tensor, part)
        ranges = change.ranges or ((0, rows),)
        for i, (start, count) in enumerate(ranges):
            unit = count if change.transposed else rows // tensor.heads if tensor.heads else 1
            step = max(1, _CHUNK // (columns * unit)) * unit
            factor = change.factors[min(i, len(change.factors) - 1)] if change.factors else 1.0
            for first in range(start, start + count, step):
                yield part, first, min(step, start + count - first), factor


def _reader(part: TensorEntry, model: Input, files: list[int]) -> Callable[[int, int, int], tuple[bytes, str]]:
    """Return a function that reads rows of a part and returns their data and its type. Its arguments are the first row,
    the number of rows, and the number of all rows of the part."""
    if part.dtype in DTYPES:
        assert model.scaled is not None
        matrix = _core.Matrix(model.scaled.to_core(), part.name)
        return lambda first, rows, _: (matrix.rows(first, rows).tobytes(), "F32")

    def read(first: int, rows: int, all_rows: int) -> tuple[bytes, str]:
        stride = part.nbytes // all_rows
        return read_exactly(files[part.file], part.offset + first * stride, rows * stride,
                            path=model.paths[part.file]), part.dtype

    return read


def _convert(one: _Planned, part: TensorEntry, first: int, rows: int, factor: float,
             read: Callable[[int, int, int], tuple[bytes, str]], path: str) -> bytes:
    """Read rows of a part of a tensor and convert them."""
    tensor, change = one.tensor, one.tensor.change or Change()
    all_rows, columns = _layout(tensor, part)
    data, dtype = read(first, rows, all_rows)
    if change.transposed:
        data = np.frombuffer(data, f"V{len(data) // (rows * columns)}").reshape(rows, columns).T.tobytes()
    if tensor.heads:
        data = _swapped(data, 2, all_rows // tensor.heads // 2, len(data) // rows)
    if change.tiled:
        data = _swapped(data, *change.tiled, len(data) // (rows * math.prod(change.tiled)))
    if change.values or factor != 1:
        values = np.frombuffer(_core.dequantize(dtype, data, rows * columns), np.float32)
        data, dtype = ((change.values(values) if change.values else values) * np.float32(factor)).tobytes(), "F32"
    if one.dtype == dtype:
        return data
    try:
        return _core.quantize(one.dtype, dtype, data, rows * columns)
    except FormatError as error:
        raise FormatError(file=path, offset=part.offset, field=part.name,
                          got=f"NaN, infinity, or a value outside {one.dtype} in rows {first} to {first + rows - 1}",
                          allowed="finite weights") from error


def _swapped(data: bytes, groups: int, members: int, size: int) -> bytes:
    """Store the first members of all groups, then the second ones. ``size``: bytes of a member."""
    return np.frombuffer(data, np.uint8).reshape(-1, groups, members, size).swapaxes(1, 2).tobytes()


def _rename_new(temporary: str, target: str) -> None:
    """Rename a file to ``target``. Fails with an OSError if ``target`` exists by now."""
    try:
        os.link(temporary, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP):  # a file system without hard links
            raise
        if os.path.exists(target):
            raise FileExistsError(errno.EEXIST, "exists", target) from error
        os.rename(temporary, target)


def _write(target: str, head: bytes, data: Iterator[bytes], total: int, force: bool,
           progress: Callable[[int, int], None] | None) -> None:
    """Write a file under a temporary name, then rename it. Delete it on every failure."""
    temporary = f"{target}.{secrets.token_hex(8)}.part"  # not the process id, which is the same in every container
    written = 0
    try:
        with open(temporary, "xb") as file:
            try:
                file.write(head)
                for part in data:
                    file.write(part)
                    written += len(part)
                    if progress is not None:
                        progress(written, total)
                file.flush()
                os.fsync(file.fileno())
                if force:
                    os.replace(temporary, target)
                else:
                    _rename_new(temporary, target)
            finally:
                data.close()  # type: ignore[attr-defined]
                if os.path.exists(temporary):
                    os.unlink(temporary)
    except FileExistsError as error:
        raise _exists(error.filename2 or error.filename or target) from error
    except OSError as error:
        if isinstance(error, FileError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(target, len(head) + total) from error
        raise FileError(f"{target}: {error.strerror}") from error
