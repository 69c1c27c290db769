"""Reads the keywords of a JSON schema, and leaves out those that a grammar cannot enforce.

Some values would be enforced wrongly without an error (an integer bound beyond 2**53, two bounds that float64 rounds),
others are no JSON Schema at all (``"type": "any"``, ``"enum": []``), and some keywords (``not``, ``contains``) have no
grammar. :mod:`mpool.conversation.schema_search` finds what the compiler of grammars refuses in addition.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Any
from urllib.parse import unquote

from ..checks import shown
from .schema_references import TYPES, target_of, with_parts
from .text_formats import FREE, PATTERNS
from .tool_values import disjoint

#: Reports a keyword that is left out: path of the schema, keyword or "", reason. Raises ValueError if the schema is
#: strict, unless the reason is "": the keyword has no effect.
Report = Callable[[str, str, str], None]

#: Keyword -> the JSON types that it concerns; it has no effect on others.
_CONCERNS = {name: frozenset(kinds) for kinds, names in {
    ("number", "integer"): ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    ("string",): ("minLength", "maxLength", "pattern", "format"),
    ("array",): ("items", "additionalItems", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains",
                 "minContains", "maxContains", "unevaluatedItems"),
    ("object",): ("properties", "patternProperties", "additionalProperties", "required", "minProperties",
                  "maxProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies",
                  "unevaluatedProperties"),
}.items() for name in names}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MAPS, _LISTS = ("properties", "patternProperties", "$defs", "definitions"), ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS = ("additionalProperties", "items", "additionalItems")
#: Keywords that no grammar enforces.
_UNENFORCEABLE = ("not", "if", "contains", "uniqueItems", "propertyNames", "dependentRequired", "dependentSchemas",
                  "dependencies", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef")
#: Keywords without an effect of their own: names of parts, and parts of other keywords.
_TEXTS = ("$schema", "$id", "id", "$anchor")
_KEPT = frozenset((*_CONCERNS, *_MAPS, *_LISTS, *_UNENFORCEABLE, *_TEXTS, "type", "enum", "const", "$ref", "nullable",
                   "then", "else"))
_DRAFT = re.compile(r"https?://json-schema\.org/")
#: Keywords that describe other properties or items of the same value, which ``unevaluated`` keywords take into account.
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies", "contains")
#: Bounds of numbers that llguidance turns into regular expressions; no completion has as many characters or parts as
#: ``_BEYOND``.
_LARGE, _SMALL, _BEYOND = 10**18, 1e-100, 1 << 32
#: Distance from an exclusive bound to the next number, unless float64 has none so near.
_NEXT = 1e-9
#: Maximum number of multiples that are compared with each other, of multiples in a list, and of characters of a path.
_COMPARED, _LISTED, _MAX_PATH = 32, 100, 100


def normalise(schema: Any, report: Report, unwritable: Callable[[str, Any], str | None]) -> Any:
    """Return a schema whose keywords a grammar can enforce, as far as each keyword alone decides that.

    Args:
        schema: a JSON schema, which is changed.
        report: receives what is left out.
        unwritable: returns why a grammar cannot write the values of ``enum``, ``const`` or ``pattern``, or None.

    Raises:
        ValueError: ``report`` raised it, or the schema is ``false``.
    """
    if isinstance(schema, bool):
        if not schema:
            raise ValueError("no value matches the schema false")
        return {}
    reader = _Reader(schema, report, unwritable)
    return reader.read_all()


def _dicts(schema: Any) -> list[dict[str, Any]]:
    """Return the schema and its parts that are dicts, without data such as ``const``."""
    found: list[dict[str, Any]] = []

    def visit(part: Any) -> Any:
        if isinstance(part, dict):
            found.append(part)
        return with_parts(part, visit)

    visit(schema)
    return found


def step(path: str, name: str) -> str:
    """Return the path of a part of a schema, such as ``properties.age.minimum``. A long one lacks its middle."""
    name = name if re.fullmatch(r"[\w$.-]{1,60}", name) else json.dumps(name)[:60]
    if len(path) + len(name) >= _MAX_PATH:
        return f"{path[:_MAX_PATH - len(name) - 4]}...{name}"
    return f"{path}.{name}" if path else name


class _Reader:
    """Changes a schema in place."""

    def __init__(self, root: Any, report: Report, unwritable: Callable[[str, Any], str | None]) -> None:
        self._root, self._report, self._unwritable = root, report, unwritable
        self._seen: set[int] = set()  # id() of parts of the root
        self._references: dict[str, None] = {}
        self._steps: set[str] = set()  # keywords and names that references contain
        self._multiples: set[Decimal] = set()
        self._names: set[str] = set()  # identifiers and anchors

    def read_all(self) -> Any:
        self._root.pop("x-guidance", None)  # options of the compiler of grammars
        for part in _dicts(self._root):
            if isinstance(reference := part.get("$ref"), str):
                self._references[reference] = None
            self._names.update(name for key in ("$id", "id", "$anchor") if isinstance(name := part.get(key), str))
        self._steps = {name for reference in self._references for name in reference.split("/")}
        if not _DRAFT.match(str(self._root.get("$schema"))):
            self._root.pop("$schema", None)
        self._read(self._root, "")
        for reference in self._references:  # targets under keywords that are no keywords of JSON Schema
            found = target_of(self._root, reference)
            if found is not None and isinstance(found[1], dict):
                self._read(found[1], found[0][2:].replace("/", "."))
        for part in _dicts(self._root):  # the compiler follows references also where no value needs them
            if isinstance(reference := part.get("$ref"), str) and not self._is_found(reference):
                del part["$ref"]
        return self._root

    def _is_found(self, reference: str) -> bool:
        """Return True if a reference has a target in this document."""
        if reference == "#" or reference.startswith("#/"):
            return target_of(self._root, reference) is not None or target_of(self._root, unquote(reference)) is not None
        address, _, fragment = reference.partition("#")
        return (not address or any(name.endswith(address) for name in self._names)) and (
            not fragment or fragment[0] == "/" or fragment in self._names)

    def _drop(self, part: dict[str, Any], path: str, name: str, why: str) -> None:
        self._report(path, name, why)
        del part[name]
        if name in ("properties", "patternProperties"):  # the others are other ones now
            part.pop("additionalProperties", None)

    def _read(self, part: dict[str, Any], path: str) -> None:
        if id(part) in self._seen:
            return
        self._seen.add(id(part))
        for name in [name for name, value in part.items() if value is None and name not in ("const", "default")]:
            del part[name]  # as if it were absent: serialisers write null for what is not set
            if name in _KEPT:
                self._report(path, name, "")
        self._type(part, path)
        kinds = part.get("type")
        given = set(TYPES) if kinds is None else {kinds} if isinstance(kinds, str) else set(kinds)
        for name in list(part):
            if name not in _KEPT and name not in self._steps or \
                    name in _CONCERNS and not _CONCERNS[name] & given or \
                    name in _TEXTS and not self._is_kept(part, name):
                del part[name]
        self._rewrite(part)
        if isinstance(part.get("pattern"), str):
            part["pattern"] = _short_ends(_plain_classes(part["pattern"]))
        if isinstance(part.get("patternProperties"), dict):
            found: dict[str, Any] = {}
            for pattern, inner in part["patternProperties"].items():
                short = _short_ends(_plain_classes(pattern))
                found[short] = {"allOf": [found[short], inner]} if short in found else inner
            part["patternProperties"] = found
        for name in list(part):
            if name in part and (why := self._fault(part, name)) is not None:
                self._drop(part, path, name, why)
        if "format" in part:
            patterns = [{"pattern": pattern} for pattern in PATTERNS[part.pop("format")]]
            part["allOf"] = [*part.get("allOf", ()), *patterns]
        _near_bounds(part)
        _few_multiples(part)
        self._required(part, path)
        self._least(part, path)
        self._parts(part, path)
        if "oneOf" in part and _exclusive(part["oneOf"], self._root):
            options = part.pop("oneOf")
            part["allOf" if "anyOf" in part else "anyOf"] = \
                [*part.get("allOf", ()), {"anyOf": options}] if "anyOf" in part else options

    def _is_kept(self, part: dict[str, Any], name: str) -> bool:
        """Return True for a version, an identifier or an anchor that has an effect. With an identifier, references
        cannot be moved to another document, and one that is no URI is an error."""
        if name == "$schema":
            return part is self._root
        if name == "$anchor":
            return isinstance(part[name], str)
        return isinstance(part[name], str) and any(reference != "#" and not reference.startswith("#/")
                                                   for reference in self._references)

    def _type(self, part: dict[str, Any], path: str) -> None:
        if "type" not in part:
            return
        kinds = [part["type"]] if isinstance(part["type"], str) else part["type"]
        if not isinstance(kinds, list) or not kinds or not all(isinstance(one, str) and one in TYPES
                                                               for one in kinds):
            self._drop(part, path, "type", f"must be {', '.join(TYPES)}, or a list of these, got "
                                           f"{shown(part['type'])}")

    def _rewrite(self, part: dict[str, Any]) -> None:
        """Write keywords without a grammar with others of the same meaning, and drop those that allow everything."""
        names = part.get("propertyNames")
        if isinstance(names, dict) and "patternProperties" not in part and not part.get("properties"):
            found, others = _names(names, self._root), part.get("additionalProperties", True)
            if isinstance(found, str):
                part |= {"patternProperties": {found: others}, "additionalProperties": False, "propertyNames": True}
            elif found is not None:
                part |= {"properties": dict.fromkeys(found, others), "additionalProperties": False,
                         "propertyNames": True}
        tail = "additionalItems" if isinstance(part.get("items"), list) else "items"
        for name, other in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", tail)):
            if name in part and not any(one in part for one in _COMBINED):
                part.setdefault(other, part.pop(name))
        void = [name for name in ("unevaluatedProperties", "unevaluatedItems", "propertyNames")
                if part.get(name) is True or part.get(name) == {}]
        void += [name for name in ("dependentRequired", "dependentSchemas", "dependencies")
                 if isinstance(part.get(name), dict) and not any(part[name].values())]
        void += [name for name in ("uniqueItems", "not") if part.get(name) is False]
        void += ["uniqueItems"] * (part.get("maxItems") in (0, 1))
        void += ["if"] * ("then" not in part and "else" not in part)
        void += ["contains"] * (part.get("minContains") == 0 and "maxContains" not in part)
        for name in (*void, "then", "else", "minContains", "maxContains"):
            part.pop(name, None)
        if isinstance(part.get("format"), str) and part["format"] in FREE:
            del part["format"]
        for name in ("exclusiveMinimum", "exclusiveMaximum"):  # draft 4
            if isinstance(part.get(name), bool):
                bound = part.get(name[9:].lower())
                if part.pop(name) and isinstance(bound, (int, float)):
                    part[name] = bound

    def _fault(self, part: dict[str, Any], name: str) -> str | None:
        """Return why the value of a keyword cannot be enforced; None: it can be; "": it need not be, because it has no
        effect. Counts become integers."""
        value = part[name]
        if name in _UNENFORCEABLE:
            return "has no grammar"
        if name in _BOUNDS:
            return _bound_fault(value, name)
        if name == "multipleOf":
            return _multiple_fault(value) or self._product_fault(value)
        if name in _COUNTS:
            if isinstance(value, float) and value.is_integer():
                part[name] = value = int(value)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                return f"must be an integer of 0 or more, got {shown(value)}"
            if value >= _BEYOND and name.startswith("max"):
                return ""  # no completion reaches it
            return None if value < _BEYOND else f"must be less than {_BEYOND:,}, got {value:,}"
        if name in ("pattern", "format", "$ref") and not isinstance(value, str):
            return f"must be a string, got {shown(value)}"
        if name == "format" and value not in PATTERNS:
            return f"must be one of {', '.join(PATTERNS)}, got {shown(value)}"
        if name == "enum" and (not isinstance(value, list) or not value):
            return f"must be a list of at least one value, got {shown(value)}"
        if name == "$ref" and not self._is_found(value):
            return f"must name a part of this schema, such as #/$defs/name, got {shown(value)}"
        if name in ("enum", "const", "pattern"):
            return self._unwritable(name, value)
        if name in _MAPS and not isinstance(value, dict):
            return f"must be a dict, name -> JSON schema, got {shown(value)}"
        if name in _LISTS and (not isinstance(value, list) or not value and name in ("anyOf", "oneOf")):
            return f"must be a list of at least one JSON schema, got {shown(value)}"
        if name in _SCHEMAS and not isinstance(value, (dict, bool)) and not (name == "items" and isinstance(
                value, list)):
            return f"must be a JSON schema, got {shown(value)}"
        return None

    def _product_fault(self, multiple: float) -> str | None:
        """Return why a multiple cannot be combined with those of other parts: llguidance computes with 32 bits."""
        exact = Decimal(repr(multiple))
        for other in self._multiples - {exact}:
            unit = Decimal(10) ** min(int(exact.as_tuple().exponent), int(other.as_tuple().exponent), 0)
            if exact / unit * (other / unit) >= 1 << 32:
                return f"must have fewer digits beside the multipleOf {other} of another part, got {multiple}"
        if len(self._multiples) < _COMPARED:
            self._multiples.add(exact)
        return None

    def _required(self, part: dict[str, Any], path: str) -> None:
        required, properties = part.get("required"), part.get("properties", {})
        if "required" not in part:
            return
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            self._drop(part, path, "required", f"must be a list of names, got {shown(required)}")
        elif part.get("additionalProperties") is False and "patternProperties" not in part:
            lacking = [name for name in required if name not in properties]
            if lacking:
                self._report(path, "required", f"names {shown(lacking[0])}, which is not among the properties")
                part["required"] = [name for name in required if name in properties]

    def _least(self, part: dict[str, Any], path: str) -> None:
        """Lower ``minProperties`` to what a grammar can count: it cannot tell whether the names of further properties
        differ, and an object has each name once."""
        least, named = part.get("minProperties", 0), len(set(part.get("required", ())))
        if least > named + 1:
            self._report(path, "minProperties", f"{least} is more than one above the number of required properties, "
                                                f"which is {named}: a grammar cannot tell whether the names of "
                                                "further properties differ")
            part["minProperties"] = named + 1

    def _parts(self, part: dict[str, Any], path: str) -> None:
        """Read the schemas within a schema."""
        for name, value in part.items():
            if name in _MAPS or isinstance(value, list) and (name in _LISTS or name == "items"):
                inner = step(path, name)
                for key, child in list(value.items()) if isinstance(value, dict) else enumerate(value):
                    where = step(inner, key) if isinstance(key, str) else f"{inner}[{key}]"
                    value[key] = self._child(child, where)
            elif name in _SCHEMAS:
                part[name] = self._child(value, step(path, name))

    def _child(self, child: Any, path: str) -> Any:
        if isinstance(child, dict):
            self._read(child, path)
        elif not isinstance(child, bool):
            self._report(path, "", f"must be a JSON schema, got {shown(child)}")
            return {}
        return child


def _plain_classes(pattern: str) -> str:
    """Return a regular expression in whose classes ``[``, ``&&``, ``~~`` and ``--`` have the meaning of ECMAScript and
    Python: in the regular expressions of llguidance, they nest, intersect and subtract classes."""
    def escaped(found: re.Match[str]) -> str:
        inside = re.sub(r"\\.|\[|&(?=&)|~(?=~)|--", lambda one: {"--": r"-\-"}.get(
            one[0], one[0] if one[0][0] == "\\" else "\\" + one[0]), found[2] or "", flags=re.DOTALL)
        return f"[{found[1]}{inside}]" if found[3] == "]" else found[0]

    # a class without an end reaches to the end of the text: if it were none, many of them would take quadratic time
    return re.sub(r"\\.|\[(\^?)((?:\\.|[^\]\\])*)(\]|\\?\Z)", escaped, pattern, flags=re.DOTALL)


#: A character or a class, and how often it is repeated.
_REPEATED = r"(\\[dDwWsS.\-/]|\[(?:\\.|[^\]\\])*\]|[\w-])(?:\{([0-9]+),[0-9]*\}|[+*])"
_LAST, _FIRST = re.compile(rf"(?<!\\){_REPEATED}\??\Z", re.ASCII), re.compile(_REPEATED, re.ASCII)


def _short_ends(pattern: str) -> str:
    """Return a regular expression that is found in the same texts, without needless repetitions at its ends: where
    ``[a-z]{1,255}`` is found, ``[a-z]`` is. llguidance needs memory for each possible start of each repetition."""
    def least(found: re.Match[str]) -> str:
        times = int(found[2]) if found[2] else int(found[0].rstrip("?")[-1] == "+")
        if not times and len(found[1]) == 1 and "\\" in pattern:  # the character may end an escape, as in \\x41
            return found[0]
        return found[1] if times == 1 else f"{found[1]}{{{times}}}" if times else ""

    if "|" not in pattern and not pattern.endswith("$"):
        pattern = _LAST.sub(least, pattern)
    first = None if "|" in pattern else _FIRST.match(pattern)
    return pattern if first is None else least(first) + pattern[first.end():]


def _bound_fault(value: Any, name: str) -> str | None:
    """Return why llguidance would not enforce a bound: it computes with float64 and 64-bit integers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return f"must be a number, got {shown(value)}"
    if abs(value) >= _LARGE:
        return f"must be between -{_LARGE:.0e} and {_LARGE:.0e}, got {shown(value)}"
    if 0 < abs(value) < _SMALL:
        return f"must be 0, or at least {_SMALL:g} away from 0, got {value}"
    if int(float(value)) != int(value) or name.startswith("exclusive") and abs(value) >= 1 << 53:
        return f"must be a number that float64 can hold, got {value}"
    return None


def _near_bounds(part: dict[str, Any]) -> None:
    """Replace an integer that is an exclusive bound with the next number, if the other bound is within 1 of it:
    llguidance would allow the integer. Bounds of integers become integers that are allowed."""
    if part.get("type") == "integer":
        for name, excluding, way in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
            found = [way * math.ceil(way * part[name])] if name in part else []
            if excluding in part:
                found.append(way * (math.floor(way * part.pop(excluding)) + 1))
            if found:
                part[name] = max(found, key=lambda value: way * value)
        return
    for name, excluding, others, way in (("minimum", "exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
                                         ("maximum", "exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1)):
        bound, nearest = part.get(excluding), [part[one] for one in others if one in part]
        if bound is not None and bound == int(bound) and any(abs(other - bound) <= 1 for other in nearest):
            following = bound + way * max(_NEXT, math.ulp(bound))
            part[name] = max((following, part.get(name, following)), key=lambda value: way * value)
            del part[excluding]


def _few_multiples(part: dict[str, Any]) -> None:
    """Replace ``multipleOf`` between two bounds with the list of the multiples, if they are few: where the bounds have
    more digits than the multiples, llguidance may begin numbers that nothing completes."""
    lows, highs = ([Decimal(repr(part[name])) for name in names if name in part]
                   for names in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")))
    if part.get("type") not in ("number", "integer") or "multipleOf" not in part or not lows or not highs \
            or "enum" in part or "const" in part:
        return
    multiple, low, high = Decimal(repr(part["multipleOf"])), max(lows), min(highs)
    if (high - low) / multiple > _LISTED:
        return
    first = int((low / multiple).to_integral_value(ROUND_CEILING))
    found = [multiple * at for at in range(first, first + _LISTED + 2)]
    excluded = [Decimal(repr(part[name])) for name in ("exclusiveMinimum", "exclusiveMaximum") if name in part]
    found = [one for one in found if one <= high and one not in excluded and (
        part["type"] == "number" or one == one.to_integral_value())]
    if found:
        for name in ("multipleOf", *_BOUNDS):
            part.pop(name, None)
        part["enum"] = [int(one) if one == one.to_integral_value() else float(one) for one in found]


def _multiple_fault(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e300:
        return f"must be a number above 0, got {shown(value)}"
    exact = Decimal(repr(value))
    scaled, digits = float(value), 0
    while not scaled.is_integer():  # as llguidance does; most fractions are not exact in binary
        scaled, digits = scaled * 10.0, digits + 1
    if scaled >= 1 << 32 or exact.scaleb(digits) != int(scaled):
        return f"must have few digits, got {value}"
    return None


def _names(schema: dict[str, Any], root: Any) -> str | list[str] | None:
    """Return the regular expression or the list of names that ``propertyNames`` allows; None: another rule."""
    target = target_of(root, schema["$ref"]) if isinstance(schema.get("$ref"), str) else None
    if target is not None and isinstance(target[1], Mapping):
        schema = {**target[1], **{name: value for name, value in schema.items() if name != "$ref"}}
    rules = {name: value for name, value in schema.items() if name in _KEPT and name != "type"}
    if len(rules) != 1 or schema.get("type", "string") != "string":
        return None
    listed = rules.get("enum", [rules["const"]] if "const" in rules else None)
    if isinstance(listed, list) and listed and all(isinstance(name, str) for name in listed):
        return listed
    return rules["pattern"] if isinstance(rules.get("pattern"), str) else None


def _exclusive(options: Any, root: Any) -> bool:
    """Return True if no value can match two of the alternatives, so that ``oneOf`` means the same as ``anyOf``."""
    return len(options) <= 64 and all(disjoint(one, other, root) for at, one in enumerate(options)
                                      for other in options[at + 1:])


__all__ = ["Report", "normalise", "step"]
