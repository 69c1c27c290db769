"""Argument checks and the errors that they raise.

All modules of the package use these functions, which gives every invalid argument an error of the same shape:
"`top_k` must be 1 or more, got 0".
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

from .errors import InvalidArgument

F = TypeVar("F", bound=Callable[..., Any])


def shown(value: Any) -> str:
    """Return a value as text for an error message: one line of at most 60 characters, no contents of arrays."""
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"a number of {value.bit_length():,} bits"
    if hasattr(value, "shape") and hasattr(value, "dtype") and value.shape:
        return f"an array of shape {tuple(value.shape)}"
    text = repr(value) if isinstance(value, (str, bytes, int, float, bool, type(None))) or _is_scalar(value) \
        else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def refuse(param: str, value: Any, allowed: str, *, hint: str | None = None, key: str | None = None) -> NoReturn:
    """Raise :class:`~mpool.errors.InvalidArgument` for the value of a parameter.

    Args:
        param: parameter name, as the caller wrote it.
        value: invalid value; :func:`shown` shortens it.
        allowed: allowed values, as a phrase that completes "must be ...".
        hint: suggested fix.
        key: key of the model concerned.

    Raises:
        InvalidArgument: always, with ``param``, ``got``, ``allowed``, ``hint`` and ``key`` set.
    """
    raise InvalidArgument(param=param, got=shown(value), allowed=allowed, hint=hint, key=key)


def one_of(param: str, value: Any, names: Sequence[str], *, hint: str | None = None, key: str | None = None) -> None:
    """Raise :class:`~mpool.errors.InvalidArgument` unless the value is one of ``names``.

    Args:
        param: parameter name, as the caller wrote it.
        value: value to check.
        names: all allowed names.
        hint: suggested fix.
        key: key of the model concerned.

    Raises:
        InvalidArgument: ``value`` is not a string, or is not in ``names``.
    """
    if not isinstance(value, str) or value not in names:
        refuse(param, value, "one of " + ", ".join(names), hint=hint, key=key)


#: Option of another library that mpool does not need -> what to do instead.
_FOREIGN = {
    "batch_size": "mpool chooses its batches itself: leave it out",
    "cache_dir": "set the environment variable HF_HOME or MPOOL_CACHE",
    "cache_folder": "set the environment variable HF_HOME or MPOOL_CACHE",
    "convert_to_numpy": "the result is a numpy array: leave it out",
    "convert_to_tensor": "the result is a numpy array: pass it to torch.from_numpy",
    "device": "mpool computes on the CPU: leave it out",
    "do_sample": "set temperature=0 for greedy decoding",
    "dtype": "set `compute`: auto, float32, bfloat16 or int8",
    "local_files_only": "set PoolConfig(offline=True) or the environment variable MPOOL_OFFLINE=1",
    "lora_path": "load adapters with mpool.load(ref, adapters={name: path}), and choose one with `adapter`",
    "model_kwargs": "pass the options of mpool themselves",
    "n_batch": "mpool chooses its batches itself: leave it out",
    "n_ctx": "the context is the model's own, and only the part in use takes memory: leave it out",
    "n_gpu_layers": "mpool computes on the CPU: leave it out",
    "n_threads": "set PoolConfig(threads=...) or the environment variable MPOOL_THREADS",
    "num_ctx": "only the part of the context in use takes memory; `context_length` of generate and chat limits it",
    "num_threads": "set PoolConfig(threads=...) or the environment variable MPOOL_THREADS",
    "num_thread": "set PoolConfig(threads=...) or the environment variable MPOOL_THREADS",
    "options": "pass each option as an argument of its own",
    "quantization": "set `compute`, or load a quantised file (`mpool quantize` makes one)",
    "threads": "set PoolConfig(threads=...) or the environment variable MPOOL_THREADS",
    "torch_dtype": "set `compute`: auto, float32, bfloat16 or int8",
    "trust_remote_code": "mpool runs no code of model files: leave it out",
    "use_mlock": "mpool locks no memory: leave it out",
    "use_mmap": "set `weights`: auto, mapped or packed",
    "verbose": "set the level of the logger mpool: logging.getLogger('mpool')",
}


def unknown_option(name: str, known: Iterable[str], *, of: str) -> InvalidArgument:
    """Return the error for an unknown option; it suggests the most similar option and lists all of them.

    Args:
        name: option name as passed.
        known: names of all options.
        of: name of the function or command.
    """
    names = list(known)
    listed = ", ".join(names)
    if name in _FOREIGN:
        return InvalidArgument(f"`{name}` is not an option of {of}; {_FOREIGN[name]}", param=name, allowed=listed,
                               hint=f"Options: {listed}")
    near = nearest(name, names, 1)
    return InvalidArgument(f"`{name}` is not an option of {of}" + (f"; did you mean `{near[0]}`?" if near else ""),
                           param=name, allowed=listed, hint=f"Options: {listed}")


def check_keywords(keywords: Iterable[str], known: Iterable[str], *, of: str) -> None:
    """Raise the error of :func:`unknown_option` for the first keyword argument that is not among ``known``."""
    names = list(known)
    for name in keywords:
        if name not in names:
            raise unknown_option(name, names, of=of)


def known_keywords(function: F) -> F:
    """Decorate a method: an unknown keyword argument raises the error of :func:`unknown_option`, not a TypeError."""
    names = [name for name in inspect.signature(function).parameters if name != "self" and not name.startswith("_")]
    of = function.__qualname__.removesuffix(".__init__").removeprefix("Pool.")

    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        check_keywords((name for name in keywords if not name.startswith("_")), names, of=of)
        return function(*args, **keywords)

    return checked  # type: ignore[return-value]


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return at most ``count`` known names that are similar to ``name``, the most similar first, ignoring case."""
    import difflib

    by_lower = {other.lower(): other for other in known}
    wanted = name.lower()[:200]
    close = difflib.get_close_matches(wanted, by_lower, n=count, cutoff=0.5)
    inside = sorted(other for other in by_lower if len(wanted) >= 3 and wanted in other and other not in close)
    return [by_lower[other] for other in (close + inside)[:count]]


def integer(value: Any) -> int | None:
    """Return the value as an integer, or None if it is not one. NumPy integer scalars are integers, bools are not."""
    try:
        return value.__index__() if _is_number(value) and hasattr(value, "__index__") else None
    except (TypeError, ValueError):
        return None


def real(value: Any) -> float | None:
    """Return the value as a float, or None if it is not a number. Numbers too large for a float become infinite."""
    try:
        kind = hasattr(value, "__index__") or hasattr(value, "__float__")
        return float(value) if _is_number(value) and kind else None
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        return None


def _is_number(value: Any) -> bool:
    """Return True for Python numbers and NumPy scalars, False for bools, strings and arrays of any size."""
    return not isinstance(value, (bool, str, bytes)) and type(value).__name__ not in ("bool", "bool_") \
        and not hasattr(type(value), "__len__") and not getattr(value, "shape", ())


def _is_scalar(value: Any) -> bool:
    """Return True for NumPy scalars and zero-dimensional arrays."""
    return hasattr(value, "dtype") and not getattr(value, "shape", ())


__all__ = ["integer", "nearest", "one_of", "real", "refuse", "shown", "unknown_option"]
