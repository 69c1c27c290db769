"""Changes JSON schemas so that llguidance enforces them and can always complete a value.

* A property name or a string has one spelling in the JSON of a completion: an escape is only allowed for a character
  that JSON cannot write otherwise (:data:`ESCAPES`). Else ``"\\u0061"`` would be a second ``a``, whose value no schema
  checks.
* A regular expression under ``patternProperties`` whose names are all declared properties would allow a further
  property that has no name. Its schema becomes one of these properties.
* Classes of characters in regular expressions lose U+0000, which :data:`ESCAPES` cannot write: llguidance lets a class
  that has every control character match all escapes, ``\\"`` and ``\\\\`` included.
* Integers that llguidance rounds to another value are not listed in ``enum`` and ``const``.
* A part that no finite value matches, because it requires itself, is not allowed where it is optional.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import grammar_trial, schema_references

#: llguidance's option ``json_allowed_escapes``: characters after a backslash. There is no ``u``.
ESCAPES = 'nrbtf\\"'
#: Characters that only ``\u`` can write, and parts of regular expressions that may match one of them.
_UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
_LONG = re.compile("[0-9]{16}")  # may be an integer that float64 cannot hold, or that llguidance cuts to 64 bits
_MAY_NEED = re.compile("[\x00-\x1f\x7f]|\\\\(x[01]|x7[fF]|u00[01]|u007[fF]|x\\{|u\\{|c|v|0)")
#: Parts of regular expressions that may be classes of characters: ``\\p``, other escapes, and brackets.
_CLASS = re.compile(r"\\[pP](?:\{[^{}]*\}|[A-Za-z])|\\.|\[(\^|(?!\^))((?:\\.|[^\]\\\[])+)\]", re.DOTALL)
#: Parts of a class that may match every control character.
_WIDE = re.compile(r"[\x00-\x1f]|\\(?:[SDWPxu0]|p\{?[CA^])")
_CONTROL = "requires a control character other than \\b, \\t, \\n, \\f and \\r"
#: Keywords whose value is a dict, name -> schema; keywords whose value is data and not a schema.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "enum", "default", "examples")


def prepare(schema: Any, lenient: bool) -> Any:
    """Return a schema that a grammar can enforce.

    Args:
        schema: JSON schema; it is not changed.
        lenient: keywords that a grammar cannot enforce are left out; False: they are errors.

    Raises:
        ValueError: the schema has a keyword that a grammar cannot enforce. The text is the reason.
        grammar_trial.Refused: its regular expressions are too complex.
        SpawnFailed, ShuttingDown: see :func:`grammar_trial.examine`.
    """
    text = json.dumps(schema)
    schema = json.loads(text)
    if '"$ref"' in text:
        schema_references.prune(schema)
    if "\\u00" in text or "\x7f" in text or _MAY_NEED.search(text) or _LONG.search(text):
        schema = _writable(schema, lenient)
    if not lenient and '"minProperties"' in text:
        _check_counts(schema)
    if '"patternProperties"' in text:
        schema = _with_names(schema)
    if '"pattern' in text:
        schema = _without_null(schema)
    return schema


def with_parts(schema: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a JSON schema whose parts are changed by a function: the items of a list, the values of keywords
    and the schemas of properties and definitions. Data, such as ``enum``, stay as they are."""
    if isinstance(schema, list):
        return list(map(change, schema))
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, Mapping):
            found[name] = {key: change(one) for key, one in value.items()}
        else:
            found[name] = value if name in _DATA else change(value)
    return found


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the schema and its parts that are objects."""
    found: list[Any] = []

    def visit(part: Any) -> Any:
        found.append(part)
        return with_parts(part, visit)

    visit(schema)
    return (part for part in found if isinstance(part, Mapping))


def _scalars(value: Any) -> Iterator[Any]:
    """Yield the strings, numbers and other parts of a JSON value that have no parts, without names of properties."""
    if isinstance(value, (list, tuple, Mapping)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _scalars(inner)
    else:
        yield value


def _fault(values: Any) -> str | None:
    """Return why a grammar cannot write a value of ``const`` or one of ``enum``; None: it can write all of them."""
    for value in _scalars(values):
        if isinstance(value, str) and _UNWRITABLE.search(value):
            return _CONTROL
        if isinstance(value, int) and (abs(value) >= 1 << 63 or int(float(value)) != value):
            return f"has the integer {value}, which a grammar would round"
    return None


def _writable(schema: Any, lenient: bool) -> Any:
    """Return the schema without lists of values that a grammar cannot write, and without regular expressions that need
    other escapes than :data:`ESCAPES`.

    Raises:
        ValueError: the schema has one, and is not ``lenient``.
    """
    def change(part: Any) -> Any:
        if isinstance(part, Mapping):
            unwritable = {name: why for name in ("const", "enum") if (why := _fault(part.get(name))) is not None}
            pattern = part.get("pattern")
            if isinstance(pattern, str) and _MAY_NEED.search(pattern) and _examined((pattern,), ())[0] is not None:
                unwritable["pattern"] = _CONTROL
            if unwritable and not lenient:
                raise ValueError(" ".join(next(iter(unwritable.items()))))
            part = {name: value for name, value in part.items() if name not in unwritable}
        return with_parts(part, change)

    return change(schema)


def _without_null(schema: Any) -> Any:
    """Return the schema whose classes of characters do not match U+0000."""
    def change(part: Any) -> Any:
        part = with_parts(part, change)
        if not isinstance(part, dict):
            return part
        if isinstance(pattern := part.get("pattern"), str):
            part["pattern"] = _CLASS.sub(_class, pattern)
        if isinstance(named := part.get("patternProperties"), dict):
            part["patternProperties"] = {_CLASS.sub(_class, pattern): one for pattern, one in named.items()}
        return part

    return change(schema)


def _class(found: re.Match[str]) -> str:
    """Return a class of characters without U+0000. One that lacks other control characters anyway stays as it is:
    llguidance takes ten times as long for ``\\p{L}`` in brackets."""
    text, inverse, inside = found[0], found[1], found[2]
    if inverse:
        return "[^\\x00" + "\\" * inside.startswith("-") + inside + "]"
    may_have_all = _WIDE.search(text) if inside is not None or text[1] in "pP" else None
    return text if may_have_all is None else f"[{text}&&[^\\x00]]"


def _check_counts(schema: Any) -> None:
    """Raises ValueError if an object needs several properties that it does not name. A grammar cannot tell whether
    their names differ, and an object has each name once."""
    for part in _parts(schema):
        least, required = part.get("minProperties"), part.get("required")
        named = len({name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
        if isinstance(least, (int, float)) and least > named + 1:
            raise ValueError(f"minProperties {least} is more than one above the number of required properties, which "
                             f"is {named}: a grammar cannot tell whether the names of further properties differ")


def _with_names(schema: Any) -> Any:
    """Return the schema with the regular expressions that match no names but declared ones turned into properties.

    The names are those of the whole schema: ``allOf`` and ``$ref`` join the properties of several parts. Since such a
    regular expression matches exactly the names that it is replaced with, the schema stays equivalent.
    """
    names: dict[str, None] = {}
    patterns: dict[str, None] = {}
    for part in _parts(schema):
        for keyword in ("properties", "required"):
            found = part.get(keyword)
            names.update(dict.fromkeys(name for name in found if isinstance(name, str))
                         if isinstance(found, (Mapping, list)) else {})
        for value in (part.get("const"), part.get("enum")):
            names.update(dict.fromkeys(_keys(value)))
        if isinstance(found := part.get("patternProperties"), Mapping):
            patterns.update(dict.fromkeys(found))
    replaced = {pattern: found for pattern, found in zip(patterns, _examined(tuple(patterns), tuple(names)))
                if found is not None}

    def change(part: Any) -> Any:
        part = with_parts(part, change)
        if not isinstance(part, dict) or not isinstance(part.get("patternProperties"), Mapping) or \
                not isinstance(part.get("properties", {}), Mapping):
            return part
        kept, properties = dict(part["patternProperties"]), dict(part.get("properties", {}))
        for pattern in [pattern for pattern in kept if pattern in replaced]:
            one = kept.pop(pattern)
            for name in replaced[pattern]:
                properties[name] = {"allOf": [properties[name], one]} if name in properties else one
        return {**part, "patternProperties": kept, "properties": properties}

    return change(schema) if replaced else schema


def _keys(value: Any) -> Iterator[str]:
    """Yield the names of all properties of a JSON value."""
    if isinstance(value, Mapping):
        yield from value
    if isinstance(value, (list, tuple, Mapping)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _keys(inner)


@functools.lru_cache(maxsize=256)
def _examined(patterns: tuple[str, ...], names: tuple[str, ...]) -> tuple[tuple[str, ...] | None, ...]:
    """Return for each regular expression the ``names`` in which it is found if it is found in no other text; else
    None."""
    found = grammar_trial.examine({"patterns": patterns, "names": names, "escapes": ESCAPES})
    return tuple(None if at is None else tuple(names[one] for one in at) for at in found)


__all__ = ["ESCAPES", "prepare", "with_parts"]
