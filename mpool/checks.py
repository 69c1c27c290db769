"""Argument checks and the errors that they raise.

All modules of the package use these functions, which gives every invalid argument an error of the same shape:
"`top_k` must be 1 or more, got 0".
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, KeysView, Mapping, Sequence, Set
from typing import Any, NoReturn, TypeVar

from . import foreign_names
from .errors import InvalidArgument
from .foreign_names import ATTRIBUTES

F = TypeVar("F", bound=Callable[..., Any])


def shown(value: Any) -> str:
    """Return a value as text for an error message: one line of at most 60 characters, no contents of arrays."""
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"a number of {value.bit_length():,} bits"
    if hasattr(value, "shape") and hasattr(value, "dtype") and value.shape:
        return f"an array of shape {tuple(value.shape)}"
    if isinstance(value, (str, bytes)):
        value = value[:60]  # the repr of 60 characters is too long already
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


def check_path(param: str, path: str | os.PathLike[str]) -> None:
    """Raise :class:`~mpool.errors.InvalidArgument` for a path that the operating system cannot name.

    Args:
        param: parameter name, as the caller wrote it.
        path: path to check.

    Raises:
        InvalidArgument: the path has a NUL character or an unpaired surrogate.
    """
    try:
        nul = b"\0" in os.fsencode(path)
    except UnicodeEncodeError:
        refuse(param, path, "a path without unpaired surrogates")
    if nul:
        refuse(param, path, "a path without NUL characters")


def surrogate_of(text: str, name: str) -> InvalidArgument | None:
    """Return the error for a str that contains an unpaired surrogate and is not Unicode text; None if it is valid."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return InvalidArgument(param=name, allowed="Unicode text",
                               got=f"half of a surrogate pair (U+{ord(text[error.start]):04X}) at character "
                                   f"{error.start}",
                               hint="text.encode('utf-8', 'replace').decode() makes it valid")
    return None


def is_same(value: Any, constant: Any) -> bool:
    """Return True if a caller's value is this string or this constant (None, True, False). Values of other types are
    not compared: arrays, for example, compare each element."""
    return value is constant or isinstance(value, str) and isinstance(constant, str) and value == constant


class InvalidCall(InvalidArgument, TypeError):
    """A call has an unknown argument, lacks one, or has one twice. Like such errors in Python, it is a TypeError."""


def unknown_option(name: str, known: Iterable[str], *, of: str) -> InvalidArgument:
    """Return the error for an unknown option; it suggests the most similar option and lists all of them.

    Args:
        name: option name as passed.
        known: names of all options.
        of: name of the function or command.
    """
    names = list(known)
    listed = ", ".join(names)
    own = foreign_names.own_name(name, names)
    advice = f"use `{own}`" if own is not None else \
        foreign_names.ADVICE_FOR.get((of, name)) or foreign_names.ADVICE.get(name)
    if advice is not None:
        return InvalidCall(f"`{name}` is not an option of {of}; {advice}",
                           param=name, allowed=listed, hint=f"Options: {listed}")
    near = nearest(name, names, 1, cutoff=0.6)
    return InvalidCall(f"`{name}` is not an option of {of}" + (f"; did you mean `{near[0]}`?" if near else ""),
                       param=name, allowed=listed, hint=f"Options: {listed}")


def invalid_call(function: Callable[..., Any], args: Sequence[Any], keywords: Iterable[str]) -> InvalidArgument | None:
    """Return the error for a call whose arguments do not match a function's signature, or None if they match.

    Args:
        function: the function. Its first parameter is not counted if it is ``self``.
        args: positional arguments.
        keywords: names of the keyword arguments.
    """
    parameters = [one for one in inspect.signature(function).parameters.values() if not one.name.startswith("_")]
    if parameters and parameters[0].name == "self":
        parameters, args = parameters[1:], args[1:]
    of = function.__qualname__.removesuffix(".__init__").removeprefix("Pool.")
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return None
    slots = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    if not any(one.kind is one.VAR_KEYWORD for one in parameters):
        for name in keywords:
            if name not in names and not name.startswith("_"):
                return unknown_option(name, names, of=of)
    required = [one.name for one in parameters if one.default is one.empty and one.name in names]
    return bad_arguments(of, slots, names, required, args, keywords)


def bad_arguments(of: str, slots: Sequence[str], names: Sequence[str], required: Sequence[str], args: Sequence[Any],
                  keywords: Iterable[str]) -> InvalidArgument | None:
    """Return the error for arguments that are too many, given twice or missing, or None.

    Args:
        of: name of the function.
        slots: parameters that may be passed by position.
        names: all parameters.
        required: parameters without a default.
        args: positional arguments.
        keywords: names of the keyword arguments.
    """
    keywords = list(keywords)
    use = f"{of}({', '.join([*slots, *(['...'] if len(names) > len(slots) else [])])})"
    if len(args) > len(slots):
        return InvalidCall(f"{of}() takes {len(slots)} positional argument{'s' * (len(slots) != 1)}, got {len(args)}",
                           hint=f"Call {use}" + (", and pass all options by name" if names else ""))
    twice = next((name for name in slots[:len(args)] if name in keywords), None)
    if twice is not None:
        return InvalidCall(f"{of}() got multiple values for argument {twice!r}", param=twice,
                           hint=f"`{twice}` is argument {list(slots).index(twice) + 1} of {use}")
    missing = next((name for name in required if name not in slots[:len(args)] and name not in keywords), None)
    if missing is not None:
        return InvalidCall(f"{of}() is missing the argument {missing!r}", param=missing, hint=f"Call {use}")
    return None


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


def caller_stacklevel() -> int:
    """Return the ``stacklevel`` with which a warning of the calling function names the first line outside mpool."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] == "mpool":
        frame, level = frame.f_back, level + 1
    return level


def missing_attribute(value: object, name: str) -> object:
    """Raise the error of a missing attribute. It says what to use, if another library has the attribute.

    It is the ``__getattr__`` of the classes of :data:`mpool.foreign_names.ATTRIBUTES`.
    """
    use = ATTRIBUTES.get(type(value).__name__, {}).get(name)
    if use is None:
        return object.__getattribute__(value, name)  # raises the error of Python, or that of a property
    raise AttributeError(f"{type(value).__name__!r} object has no attribute {name!r}; {use}", name=name, obj=value)


def nearest(name: str, known: Iterable[str], count: int = 3, cutoff: float = 0.5) -> list[str]:
    """Return at most ``count`` known names that are similar to ``name``, the most similar first, ignoring case.

    Args:
        name: a name of the caller; only its first 200 characters are compared.
        known: the names to choose from.
        count: maximum number of names.
        cutoff: minimum similarity, from 0 to 1. Names that contain ``name`` count as similar.
    """
    by_lower = {other.lower(): other for other in known}
    wanted = name.lower()[:200]
    close = difflib.get_close_matches(wanted, by_lower, n=count, cutoff=cutoff)
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


def with_plain_bools(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with bools of Python in place of NumPy's, which comparisons of arrays give."""
    if not any(_is_numpy_bool(value) for value in given.values()):
        return given
    return {name: bool(value) if _is_numpy_bool(value) else value for name, value in given.items()}


def is_table(value: Any) -> bool:
    """Return True for tables of pandas, polars, Arrow and datasets. Iterating one gives columns, names or dicts."""
    return (hasattr(value, "columns") or hasattr(value, "column_names")) and not isinstance(value, type)


def hint_for_set(value: Set[Any]) -> str:
    """Return what to do with a set, or with the keys of a dict, which are in order, where a list is needed."""
    return "Pass list(d) for the keys of a dict" if isinstance(value, KeysView) else "A set has no order: pass a list"


def items_of(param: str, value: Any, allowed: str) -> Iterable[Any]:
    """Return an iterable over the items of a container of texts, in the order of its rows.

    Items of Arrow arrays become Python values. The caller checks the items and, if it needs one, ``len()``.

    Args:
        param: parameter name, for errors.
        value: argument of the caller that is not a single text.
        allowed: allowed values, for errors.

    Raises:
        InvalidArgument: the value is not iterable, or its items are certainly no texts in a defined order: a table,
            a mapping, a set, a str, bytes, a tensor, an array of numbers, or an array without exactly one dimension.
    """
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if isinstance(value, str):
        refuse(param, value, allowed, hint="Pass a list with the text")
    if is_table(value):
        raise InvalidArgument(param=param, got=f"a table ({type(value).__name__})", allowed=allowed,
                              hint="Pass one of its columns, such as table['text']")
    if isinstance(value, (bytes, bytearray, memoryview)):
        refuse(param, value, allowed, hint="Decode it first, for example with decode()")
    if isinstance(value, Mapping):
        refuse(param, value, allowed, hint="Pass list(d.values()) for the values of a dict")
    if isinstance(value, Set):
        refuse(param, value, allowed, hint=hint_for_set(value))
    if shape is not None and hasattr(value, "detach"):
        refuse(param, value, allowed, hint="Tensors have no texts")
    if not hasattr(value, "__iter__"):
        refuse(param, value, allowed)
    if getattr(value, "ndim", 1) != 1 or isinstance(shape, tuple) and len(shape) != 1:
        got = f"an array of shape {tuple(shape)}" if isinstance(shape, tuple) and shape else shown(value)
        ids = param == "inputs" and getattr(dtype, "kind", "") in ("i", "u") and getattr(value, "ndim", 0) == 2
        raise InvalidArgument(param=param, got=got, allowed=allowed, hint="Pass token ids as a list with an array for "
                              "each text, without the ids of padding" if ids else "Pass an array of one dimension")
    kind = getattr(dtype, "kind", "")
    if kind in tuple("biucmMSV") and len(value):
        raise InvalidArgument(param=param, got=f"an array of {dtype}", allowed=allowed, hint="Pass token ids as a list "
                              "of lists, one for each text: [[101, 102]]" if param == "inputs" and kind in ("i", "u")
                              else None)
    found: Iterable[Any] = value.to_pylist() if hasattr(value, "to_pylist") else value
    return found


def _is_number(value: Any) -> bool:
    """Return True for Python numbers and NumPy scalars, False for bools, strings and arrays of any size."""
    return not isinstance(value, (bool, str, bytes)) and type(value).__name__ not in ("bool", "bool_") \
        and not hasattr(type(value), "__len__") and not getattr(value, "shape", ())


def _is_numpy_bool(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")


def _is_scalar(value: Any) -> bool:
    """Return True for NumPy scalars and zero-dimensional arrays."""
    return hasattr(value, "dtype") and not getattr(value, "shape", ())


__all__ = ["InvalidCall", "caller_stacklevel", "check_path", "integer", "is_same", "is_table", "items_of",
           "missing_attribute", "nearest", "one_of", "real", "refuse", "shown", "unknown_option", "with_plain_bools"]
