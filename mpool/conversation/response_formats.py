"""Reads the caller's ``response_format`` and checks its shape and its limits; :mod:`mpool.conversation.grammar`
compiles it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..checks import refuse, shown
from ..errors import InvalidArgument, LimitError
from ..host.resources import of_caller
from . import schema_references

#: Limits of the caller's format, in characters and nesting levels; llguidance limits the compiled grammar itself.
MAX_CHARS, MAX_DEPTH = 65536, 64
_ALLOWED = ('{"type": "json_object"}, {"type": "json_object", "schema": {...}}, {"type": "json_schema", '
            '"json_schema": {"schema": {...}}}, {"type": "regex", "regex": "..."}, {"type": "grammar", "grammar": '
            '"..."}, a JSON schema, or a pydantic class')
#: Keys of each type of format besides ``type``, and of a JSON schema in OpenAI's format.
_KEYS = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema",), "regex": ("regex",),
         "grammar": ("grammar",)}
_SCHEMA_KEYS = ("schema", "name", "description", "strict")


def check(response_format: Any) -> None:
    """Check the shape and the limits of a ``response_format``. :func:`mpool.conversation.grammar.prepare` checks the
    rest.

    Raises:
        InvalidArgument, LimitError: as :func:`mpool.conversation.grammar.prepare`.
    """
    read(response_format)


def read(response_format: Any) -> tuple[str, str, Any]:
    """Return the kind (``text``, ``schema``, ``lenient``, ``regex`` or ``grammar``), the source, and the pydantic class
    or None. ``lenient``: a schema whose keywords are ignored if a grammar cannot enforce them."""
    if isinstance(response_format, type) and hasattr(response_format, "model_json_schema"):
        with of_caller():
            made = response_format.model_json_schema()
        return "lenient", _schema(made), response_format  # the class checks the completion: see Format.parse
    if not isinstance(response_format, Mapping):
        refuse("response_format", response_format, _ALLOWED)
    kind = response_format.get("type")
    if isinstance(kind, str) and kind in _KEYS:
        _check_keys("response_format", response_format, ("type", *_KEYS[kind]) if kind != "json_schema" or
                    "json_schema" in response_format else ("type", *_SCHEMA_KEYS))
    if kind == "text":
        return "text", "", None
    if kind == "json_object":
        schema = response_format.get("schema")
        if schema is not None and not isinstance(schema, (Mapping, bool)):
            refuse("response_format.schema", schema, "a JSON schema")
        return "schema", '{"type": "object"}' if schema is None else _schema(schema), None
    if kind in ("regex", "grammar"):
        source = response_format.get(kind)
        if not isinstance(source, str) or not source:
            refuse(f"response_format.{kind}", source, "a string that is not empty")
        _check_limits(f"response_format.{kind}", len(source), _bracket_depth(source))
        try:
            source.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(param=f"response_format.{kind}", got="half of a surrogate pair",
                                  allowed="Unicode text") from None
        return kind, source, None
    if kind == "json_schema":
        outer = response_format.get("json_schema")
        if isinstance(outer, Mapping):
            _check_keys("response_format.json_schema", outer, _SCHEMA_KEYS)
        schema = outer.get("schema") if isinstance(outer, Mapping) else response_format.get("schema")
        if not isinstance(schema, (Mapping, bool)):
            refuse("response_format.json_schema.schema", schema, "a JSON schema")
        strict = outer.get("strict") if isinstance(outer, Mapping) else response_format.get("strict")
        if strict is not None and not isinstance(strict, bool):
            refuse("response_format.json_schema.strict", strict, "True or False")
        return "lenient" if strict is False else "schema", _schema(schema), None
    if not response_format or kind is not None and not isinstance(kind, (list, tuple)) and \
            kind not in schema_references.TYPES:
        refuse("response_format.type", kind, "one of the types in " + _ALLOWED)
    return "schema", _schema(response_format), None


def _check_keys(param: str, given: Mapping[Any, Any], known: Sequence[str]) -> None:
    """Raises InvalidArgument if a format has an unknown key, which may be a constraint of another library."""
    for name in given:
        if name not in known:
            named = isinstance(name, str) and name.isidentifier() and len(name) <= 100
            field = f"{param}.{name}" if named else param
            raise InvalidArgument(f"`{field}`: {shown(name)} is not a key of this format, which has the keys "
                                  f"{', '.join(known)}", param=field, got=shown(given[name]),
                                  allowed=", ".join(known), hint="Remove it")


def _schema(schema: Any) -> str:
    check_nesting(schema, "the JSON schema", "response_format")
    try:
        text = json.dumps(schema, allow_nan=False, default=plain_value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(param="response_format", got=f"a schema that is not JSON: {error}",
                              allowed="a JSON schema") from None
    _check_limits("the JSON schema", len(text), 0)
    if '"$ref"' in text:
        schema_references.check(json.loads(text), "response_format")
    return text


def plain_value(value: Any) -> Any:
    """Return a scalar or an array of NumPy as plain data: what ``default`` of :func:`json.dumps` is called for.

    Raises:
        TypeError: the value is another object.
    """
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _check_limits(what: str, chars: int, depth: int) -> None:
    if chars > MAX_CHARS:
        raise LimitError(f"{what} has {chars:,} characters, the limit is {MAX_CHARS:,}", param="response_format",
                         got=f"{chars:,} characters", allowed=f"at most {MAX_CHARS:,} characters")
    if depth > MAX_DEPTH:
        raise _nested_too_deeply(what, "response_format")


def check_nesting(value: Any, what: str, param: str) -> None:
    """Check the nesting depth of a JSON value, and the number of values at each depth.

    Ends also for values that contain themselves.

    Args:
        value: the value.
        what: what the error message calls it.
        param: the caller's parameter.

    Raises:
        LimitError: it exceeds a limit.
    """
    level, depth = [value], 0
    while level:
        level = [inner for outer in level if isinstance(outer, (Mapping, list, tuple))
                 for inner in (outer.values() if isinstance(outer, Mapping) else outer)]
        if len(level) > MAX_CHARS:
            raise LimitError(f"{what} has more than {MAX_CHARS:,} values", param=param,
                             allowed=f"at most {MAX_CHARS:,} values")
        depth += 1
        if depth > MAX_DEPTH:
            raise _nested_too_deeply(what, param)


def _nested_too_deeply(what: str, param: str) -> LimitError:
    return LimitError(f"{what} is nested more than {MAX_DEPTH} levels deep", param=param,
                      allowed=f"at most {MAX_DEPTH} levels of nesting")


def _bracket_depth(text: str) -> int:
    depth = most = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        most = max(most, depth)
    return most


__all__ = ["MAX_CHARS", "MAX_DEPTH", "check", "check_nesting", "plain_value", "read"]
