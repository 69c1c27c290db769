"""Typed and validated access to JSON objects and other tables of named values.

Each getter returns a value of its type within the given range, or raises :class:`~mpool.errors.FormatError`, which
names the file, the field, the value found and the allowed values.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ..errors import FormatError
from .json_strict import shorten

#: Default of a getter whose field must be present.
REQUIRED: Any = object()
#: Range of the integers of a :class:`~mpool.models.spec.ModelSpec`, which the C core stores.
_LOW, _HIGH = -(1 << 63), (1 << 63) - 1


class Fields:
    """A mapping of named values, with its location for error messages.

    If a getter has a default, ``null`` counts as absent, as in transformers and sentence-transformers.

    Attributes:
        values: the mapping.
        file: path of the file that contains it.
        at: path of the mapping inside the file (``"models[0].files"``), empty for the root.
        own: function that returns the file's own name of a field, if the mapping has other names; None: it has the
            file's.
    """

    def __init__(self, values: Mapping[str, Any], *, file: str, at: str = "",
                 own: Callable[[str], str] | None = None) -> None:
        self.values, self.file, self.at, self.own = values, file, at, own

    @classmethod
    def of(cls, value: Any, *, file: str, at: str = "") -> Fields:
        """Wrap a JSON value. Raises FormatError if it is not an object."""
        if not isinstance(value, dict):
            raise FormatError(file=file, offset=None, field=at or "JSON", got=kind(value), allowed="an object")
        return cls(value, file=file, at=at)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def __iter__(self) -> Iterator[str]:
        return iter(self.values)

    def name(self, key: str) -> str:
        """Return the full name of a field, for messages: ``"models[0].key"``."""
        if self.own is not None:
            return self.own(key)
        return f"{self.at}.{key}" if self.at else key

    def fail(self, key: str, got: object, allowed: object, hint: str | None = None) -> NoReturn:
        """Raise the :class:`~mpool.errors.FormatError` of a field."""
        raise FormatError(file=self.file, field=shorten(self.name(key), 200),
                          got=shorten(got, 200) if isinstance(got, str) else got,
                          allowed=shorten(allowed, 600) if isinstance(allowed, str) else allowed, hint=hint)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value without validating it, or ``default`` if it is absent."""
        return self.values.get(key, default)

    def _pick(self, key: str, default: Any, allowed: str) -> tuple[Any, bool]:
        value = self.values.get(key)
        if value is None:
            if default is REQUIRED:
                self.fail(key, "null" if key in self.values else "missing", allowed)
            return default, True
        return value, False

    def int(self, key: builtins.str, default: Any = REQUIRED, *, low: builtins.int = _LOW,
            high: builtins.int = _HIGH) -> Any:
        """Return an integer from ``low`` to ``high``, or ``default``. Booleans and ``1.0`` are refused."""
        allowed = f"an integer from {low} to {high}"
        value, absent = self._pick(key, default, allowed)
        if absent:
            return value
        if type(value) is not int or not low <= value <= high:
            self.fail(key, describe(value), allowed)
        return value

    def number(self, key: builtins.str, default: Any = REQUIRED, *, above: float | None = None,
               most: float | None = None) -> Any:
        """Return a finite number greater than ``above`` and at most ``most`` as a float, or ``default``."""
        allowed = "a finite number" + ("" if above is None else f" above {above:g}") \
            + ("" if most is None else f"{'' if above is None else ','} at most {most:g}")
        value, absent = self._pick(key, default, allowed)
        if absent:
            return value
        if type(value) not in (int, float) or not math.isfinite(value) or (above is not None and not value > above) \
                or (most is not None and value > most):
            self.fail(key, describe(value), allowed)
        return float(value)

    def bool(self, key: builtins.str, default: Any = REQUIRED) -> Any:
        """Return a boolean, or ``default``."""
        value, absent = self._pick(key, default, "true or false")
        if not absent and type(value) is not bool:
            self.fail(key, describe(value), "true or false")
        return value

    def str(self, key: builtins.str, default: Any = REQUIRED, *, choices: Sequence[builtins.str] | None = None,
            limit: builtins.int = 4096) -> Any:
        """Return text of at most ``limit`` characters (one of ``choices`` if given), or ``default``."""
        allowed = "text" if choices is None else "one of " + ", ".join(choices)
        value, absent = self._pick(key, default, allowed)
        if absent:
            return value
        if type(value) is not str or (choices is not None and value not in choices):
            self.fail(key, describe(value), allowed)
        if len(value) > limit:
            self.fail(key, f"{len(value)} characters", f"at most {limit} characters")
        return value

    def list(self, key: builtins.str, default: Any = REQUIRED, *, of: type | None = None,
             limit: builtins.int = 1 << 20) -> Any:
        """Return a list of at most ``limit`` values (all of type ``of`` if given), or ``default``. Integers beyond 64
        bits with a sign are refused, as in :meth:`int`."""
        value, absent = self._pick(key, default, "a list")
        if absent:
            return value
        if type(value) is not list:
            self.fail(key, describe(value), "a list")
        if len(value) > limit:
            self.fail(key, f"{len(value)} values", f"at most {limit} values")
        if of is not None and set(map(type, value)) - {of}:
            for i, item in enumerate(value):
                if type(item) is not of:
                    self.fail(f"{key}[{i}]", describe(item), _NAMES.get(of, of.__name__))
        if of is int and value and (min(value) < _LOW or max(value) > _HIGH):
            at = next(i for i, item in enumerate(value) if not _LOW <= item <= _HIGH)
            self.fail(f"{key}[{at}]", describe(value[at]), f"an integer from {_LOW} to {_HIGH}")
        return value

    def section(self, key: builtins.str, default: Any = REQUIRED) -> Any:
        """Return a nested object as :class:`Fields`, or ``default``."""
        value, absent = self._pick(key, default, "an object")
        if absent:
            return value
        return Fields.of(value, file=self.file, at=self.name(key))

    def only(self, allowed: Sequence[builtins.str] | set[builtins.str] | frozenset[builtins.str]) -> None:
        """Raise FormatError if there is a key that is not in ``allowed``."""
        for key in self.values:
            if key not in allowed:
                self.fail(shorten(key), describe(self.values[key]),
                          "only the keys " + ", ".join(sorted(allowed)))


_NAMES: dict[type, str] = {str: "text", int: "an integer", float: "a number", bool: "true or false",
                           dict: "an object", list: "a list"}


def kind(value: Any) -> str:
    """Return the type of a JSON value in words, for error messages."""
    return "null" if value is None else _NAMES.get(type(value), type(value).__name__)


def describe(value: Any) -> str:
    """Return a value for an error message: the value of a scalar, the type of a container."""
    if value is None or isinstance(value, (dict, list, bytes)):
        return kind(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return shorten(repr(value))
