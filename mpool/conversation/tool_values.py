"""Values of arguments that are written between tags, and not as JSON: the JSON schema of an argument decides whether
its text is a string or JSON. The schema may be behind references and combined schemas (``$ref``, ``allOf``, ``anyOf``,
``oneOf``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from . import python_calls
from .schema_references import TYPES, target_of

_KINDS = frozenset(TYPES)
#: Maximum number of schemas within each other that are read, references included. Deeper ones allow every value.
_MAX_DEPTH = 100
#: Maximum number of comparisons of :func:`disjoint`, and of references that lead to a list of values.
_MAX_COMPARED, _MAX_LINKS = 100, 8


class Values(NamedTuple):
    """Values that a schema allows.

    Attributes:
        kinds: JSON types of the values; ``"number"`` comes with ``"integer"``.
        listed: values that ``enum`` and ``const`` list.
    """

    kinds: frozenset[str] = _KINDS
    listed: tuple[Any, ...] = ()

    @property
    def is_text(self) -> bool:
        """True if all values are strings, or null. They are written verbatim; others are written as JSON."""
        return self.kinds - {"null"} == {"string"}


def values_of(schema: Any, root: Any) -> Values:
    """Return the values that a schema allows.

    Args:
        schema: the schema.
        root: the document that its references point into.
    """
    found = _Reader(root).read(schema, 0)
    return found if found.kinds else Values()


class _Reader:
    """Reads schemas of one document, each once: many references may lead to the same one."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._read: dict[int, Values] = {}  # key: id() of a schema of the document

    def read(self, schema: Any, depth: int) -> Values:
        if not isinstance(schema, Mapping):
            return Values(frozenset()) if schema is False else Values()
        if depth > _MAX_DEPTH:
            return Values()
        known = self._read.get(id(schema))
        if known is None:
            self._read[id(schema)] = Values(frozenset())  # for a schema that contains itself
            known = self._read[id(schema)] = self._values(schema, depth + 1)
        return known

    def _values(self, schema: Mapping[str, Any], depth: int) -> Values:
        kinds, listed = kinds_of(schema.get("type")), list[Any]()
        own = listed_values(schema)
        if own is not None:
            listed += own
            kinds &= frozenset[str]().union(*map(_kinds_of_value, own))
        parts = [self.read(part, depth) for part in required_parts(schema, self._root)]
        if options := options_of(schema):
            read = [self.read(option, depth) for option in options]
            parts.append(Values(frozenset[str]().union(*(one.kinds for one in read)),
                                tuple(value for one in read for value in one.listed)))
        for part in parts:
            kinds &= part.kinds
            listed += part.listed
        return Values(kinds | {"null"} if schema.get("nullable") is True else kinds, tuple(listed))


def kinds_of(given: Any) -> frozenset[str]:
    """Return the JSON types that a value of ``type`` names; all of them if it names none."""
    kinds = frozenset(one for one in ([given] if isinstance(given, str) else given if isinstance(given, list) else ())
                      if isinstance(one, str)) & _KINDS
    return (kinds | {"integer"} if "number" in kinds else kinds) or _KINDS


def _kinds_of_value(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or isinstance(value, float) and value.is_integer():
        return {"integer", "number"}
    for kind, name in ((float, "number"), (str, "string"), (list, "array"), (Mapping, "object")):
        if isinstance(value, kind):
            return {name}
    return {"null"}


def listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that ``enum`` or ``const`` of a schema list; None if it has neither."""
    found = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return found if isinstance(found, list) else None


def options_of(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas of ``anyOf`` or ``oneOf``."""
    found = schema.get("anyOf") or schema.get("oneOf")
    return found if isinstance(found, list) else []


def required_parts(schema: Mapping[str, Any], root: Any) -> list[Any]:
    """Return the schemas that a value must match in addition: the target of ``$ref``, and those of ``allOf``."""
    found, reference = schema.get("allOf"), schema.get("$ref")
    parts = list(found) if isinstance(found, list) else []
    target = target_of(root, reference) if isinstance(reference, str) else None
    return parts if target is None else [target[1], *parts]


class Properties(NamedTuple):
    """Properties of an object.

    Attributes:
        schemas: name -> the schemas that its value must match.
        required: names of the properties that every object has.
        others: schema of the properties with other names, or None.
    """

    schemas: dict[str, list[Any]]
    required: set[str]
    others: Any = None

    def schema(self, name: str) -> Any:
        """Return the schema of one property."""
        found = self.schemas.get(name, [] if self.others is None else [self.others])
        return found[0] if len(found) == 1 else {"allOf": found}


def properties_of(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Properties:
    """Return the properties of the objects that a schema allows, in the order of the schema. ``root``: the document
    that its references point into; None: the schema."""
    return _properties(schema, schema if root is None else root, 0, {})


def _properties(schema: Any, root: Any, depth: int, known: dict[int, Properties]) -> Properties:
    """Return the properties of a schema. ``known``: those of schemas that were read, by their id(): many references may
    lead to the same one, and a schema may contain itself."""
    found = Properties({}, set())
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return found
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = found
    own, others = schema.get("properties"), schema.get("additionalProperties")
    required = required_names(schema.get("required"))
    if isinstance(own, Mapping):
        found = Properties({name: [value] for name, value in own.items()}, required,
                           others if isinstance(others, Mapping) else None)
    found.required.update(required)
    for part in required_parts(schema, root):
        inner = _properties(part, root, depth + 1, known)
        for name, schemas in inner.schemas.items():
            given = found.schemas.setdefault(name, [])
            same = set(map(id, given))
            given += [one for one in schemas if id(one) not in same]
        found.required.update(inner.required)
    read = [_properties(option, root, depth + 1, known) for option in options_of(schema)]
    for name in dict.fromkeys(name for one in read for name in one.schemas):
        found.schemas.setdefault(name, []).append({"anyOf": [one.schema(name) for one in read if name in one.schemas]})
    if read:
        found.required.update(set.intersection(*(one.required for one in read)))
    known[id(schema)] = found
    return found


def required_names(required: Any) -> set[str]:
    """Return the names in ``required`` of a schema as a set: ``required`` and ``properties`` may both be long, so that
    searching a list would take quadratic time."""
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def disjoint(one: Any, other: Any, root: Any) -> bool:
    """Return True if certainly no value matches both schemas: their types differ, or the values that they list, or
    those of a property that one of them requires. ``root``: the document that their references point into."""
    return _disjoint(one, other, root, [_MAX_COMPARED])


def _disjoint(one: Any, other: Any, root: Any, left: list[int]) -> bool:
    """As :func:`disjoint`. ``left``: number of comparisons that may follow."""
    if one is False or other is False:
        return True
    left[0] -= 1
    if left[0] < 0:
        return False
    kinds = values_of(one, root).kinds & values_of(other, root).kinds
    if not kinds:
        return True
    first, second = _finite(one, root), _finite(other, root)
    if first is not None and second is not None:
        return not first & second
    if kinds != {"object"}:
        return False
    pair = [_properties(schema, root, 0, {}) for schema in (one, other)]
    for properties, others, schema in ((*pair, other), (*reversed(pair), one)):
        for name in properties.required:
            if name not in others.schemas:
                if _is_closed(schema, root):
                    return True
            elif name in properties.schemas and _disjoint(properties.schema(name), others.schema(name), root, left):
                return True
    return False


def _finite(schema: Any, root: Any) -> set[str] | None:
    """Return the JSON texts of the values that ``enum`` or ``const`` list, also behind references; else None."""
    for _ in range(_MAX_LINKS):
        if not isinstance(schema, Mapping):
            return None
        listed = listed_values(schema)
        if listed is not None:
            return {json.dumps(_exact(value), sort_keys=True) for value in listed}
        parts = required_parts(schema, root)
        if len(parts) != 1:
            return None
        schema = parts[0]
    return None


def _exact(value: Any) -> Any:
    """Return a JSON value with integers in place of floats without a fraction: for JSON Schema, 1.0 is 1."""
    if isinstance(value, dict):
        return {name: _exact(one) for name, one in value.items()}
    if isinstance(value, list):
        return list(map(_exact, value))
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_closed(schema: Any, root: Any) -> bool:
    """Return True if objects that match a schema have only the properties that it declares itself."""
    if not isinstance(schema, Mapping) or "patternProperties" in schema:
        return False
    if schema.get("additionalProperties") is False:
        return True
    target = target_of(root, schema["$ref"]) if isinstance(schema.get("$ref"), str) else None
    return target is not None and isinstance(target[1], Mapping) and \
        target[1].get("additionalProperties") is False and "patternProperties" not in target[1]


def value_of(text: str, schema: Any, root: Any, loads: Callable[[str], Any], constrained: bool) -> Any:
    """Return the value of an argument that was written between tags.

    Args:
        text: the text between the tags.
        schema: the argument's schema.
        root: the document that its references point into.
        loads: parses JSON; raises ValueError or RecursionError.
        constrained: True if a grammar constrained the text, so that every value that is not a string verbatim is JSON.
    """
    allowed = values_of(schema, root)
    if allowed.is_text:
        return None if text == "null" and "null" in allowed.kinds and "null" not in allowed.listed else text
    try:
        value = loads(text)
    except (ValueError, RecursionError):
        word = text.strip()
        if "string" in allowed.kinds and not (word.lower() in ("true", "false") and allowed.kinds != _KINDS):
            return text
        try:  # templates write earlier values as Python does
            value = python_calls.parse(f"value={word.capitalize() if word.isalpha() else word})")["value"]
        except ValueError:
            return text
        return value if _kinds_of_value(value) & allowed.kinds else text
    if constrained or "string" not in allowed.kinds or isinstance(value, str):
        return value
    if any(type(one) is type(value) and one == value for one in allowed.listed):
        return value
    return value if text not in allowed.listed and _kinds_of_value(value) & allowed.kinds else text


__all__ = ["Properties", "Values", "disjoint", "properties_of", "value_of", "values_of"]
