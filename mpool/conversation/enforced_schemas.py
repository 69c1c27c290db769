"""Changes JSON schemas so that llguidance enforces them and can always complete a value.

* Keywords that cannot be enforced are left out and named, or are errors (:mod:`mpool.conversation.schema_keywords`,
  :mod:`mpool.conversation.schema_search`).
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
import os
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .. import tenants
from ..host import native_calls
from ..stores import STORES
from . import grammar_trial, refusals, schema_keywords, schema_references, schema_search
from .schema_references import with_parts

#: llguidance's option ``json_allowed_escapes``: characters after a backslash. There is no ``u``.
ESCAPES = 'nrbtf\\"'
#: Characters that only ``\u`` can write, and parts of regular expressions that may match one of them.
_UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
_MAY_NEED = re.compile("[\x00-\x1f\x7f]|\\\\(x[01]|x7[fF]|u00[01]|u007[fF]|x\\{|u\\{|c|v|0)")
#: Parts of regular expressions that may be classes of characters: ``\\p``, other escapes, and brackets.
_CLASS = re.compile(r"\\[pP](?:\{[^{}]*\}|[A-Za-z])|\\.|\[(\^|(?!\^))((?:\\.|[^\]\\\[])+)\]", re.DOTALL)
#: Parts of a class that may match every control character.
_WIDE = re.compile(r"[\x00-\x1f]|\\(?:[SDWPxu0]|p\{?[CA^])")
_CONTROL = "requires a control character other than \\b, \\t, \\n, \\f and \\r"
#: Number of schemas whose enforceable form is cached, and bytes of all of them.
CACHED, CACHED_BYTES = STORES["schemas"].entries or 0, STORES["schemas"].bytes or 0


class Enforced(NamedTuple):
    """A schema that a grammar can enforce.

    Attributes:
        schema: the JSON schema.
        left_out: paths of the keywords that the schema lacks because they cannot be enforced, such as
            ``properties.age.minimum``; "": the whole schema.
    """

    schema: Any
    left_out: tuple[str, ...] = ()


def enforce(source: str, lenient: bool) -> Enforced:
    """Return a schema that a grammar can enforce, or the result of an earlier call.

    Args:
        source: the JSON schema as JSON.
        lenient: keywords that a grammar cannot enforce are left out; False: they are errors.

    Raises:
        ValueError: the schema has a keyword that a grammar cannot enforce. The text is its path and the reason.
        grammar_trial.Refused: the schema is too complex.
        SpawnFailed, ShuttingDown: see :func:`grammar_trial.examine`.
        Timeout, Overloaded: see :meth:`mpool.host.native_calls.ThreadGroup.run`.
    """
    with _lock:
        known = _cache.get((source, lenient))
        if known is not None:
            _cache.move_to_end((source, lenient))
            return Enforced(json.loads(known[0]), known[1])
    found: Enforced = native_calls.GRAMMARS.run(_enforced, source, lenient)
    text = json.dumps(found.schema)
    with _lock:
        _cache[source, lenient] = text, found.left_out, len(source) + len(text)
        while len(_cache) > CACHED or sum(size for _, _, size in _cache.values()) > CACHED_BYTES:
            _cache.popitem(last=False)
    return found


def _enforced(source: str, lenient: bool) -> Enforced:
    left_out: dict[str, None] = {}

    def report(path: str, name: str, why: str) -> None:
        where = schema_keywords.step(path, name) if name else path
        if lenient:
            left_out[where] = None
        elif why:
            raise ValueError(f"{where}: {why}" if where else why)

    schema = schema_keywords.normalise(json.loads(source), report, _unwritable)
    if not isinstance(schema, dict):
        return Enforced(schema)
    text = json.dumps(schema)
    if '"$ref"' in text:
        schema_references.prune(schema)
    if '"patternProperties"' in text:
        schema = _with_names(schema)
    if '"pattern' in text:
        schema = _without_null(schema)
    try:
        refused = fault(schema) is not None
    except grammar_trial.Refused:
        if not lenient or not _drop_patterns(schema, report):
            raise
        refused = fault(schema) is not None
    if refused:
        try:
            schema_search.repair(schema, fault, report)
        except schema_search.TooManyFaults:
            left_out.clear()
            report("", "", "too many of its keywords cannot be enforced")
            schema = {"type": "object"} if schema.get("type") == "object" else {}
    return Enforced(schema, tuple(left_out))


def fault(schema: Any) -> str | None:
    """Compile a schema, and return why it is refused; None: it is not.

    Raises:
        grammar_trial.Refused, SpawnFailed, ShuttingDown: see :func:`grammar_trial.fault`.
    """
    import llguidance

    options = {"x-guidance": {"json_allowed_escapes": ESCAPES}}
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({**options, **schema}))
    except ValueError as error:  # a number or a text that is no JSON for the parser
        return refusals.reason(str(error), "schema")
    why = grammar_trial.fault(grammar)
    return None if why is None else refusals.reason(why, "schema")


def _drop_patterns(part: Any, report: schema_keywords.Report, path: str = "") -> bool:
    """Leave out the regular expressions that exceed a limit, in place. Returns False if there are none."""
    found = False
    for name, value in list(part.items() if isinstance(part, dict) else enumerate(part)):
        if isinstance(value, (dict, list)) and name not in ("const", "enum"):
            where = schema_keywords.step(path, name) if isinstance(name, str) else f"{path}[{name}]"
            found |= _drop_patterns(value, report, where)
        elif name == "pattern" and isinstance(value, str):
            try:
                fault({"type": "string", "pattern": value})
            except grammar_trial.Refused as error:
                report(path, name, str(error))
                del part[name]
                found = True
    return found


def _unwritable(name: str, value: Any) -> str | None:
    """Return why a grammar cannot write the values of ``const``, ``enum`` or ``pattern``, or None."""
    if name != "pattern":
        return _fault(value)
    return _CONTROL if _MAY_NEED.search(value) and _examined((value,), ())[0] is not None else None


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


_lock = threading.Lock()
_cache: tenants.TenantCache[tuple[str, bool], tuple[str, tuple[str, ...], int]] = tenants.TenantCache()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)


@functools.lru_cache(maxsize=256)
def _examined(patterns: tuple[str, ...], names: tuple[str, ...]) -> tuple[tuple[str, ...] | None, ...]:
    """Return for each regular expression the ``names`` in which it is found if it is found in no other text; else
    None."""
    found = grammar_trial.examine({"patterns": patterns, "names": names, "escapes": ESCAPES})
    return tuple(None if at is None else tuple(names[one] for one in at) for at in found)


__all__ = ["ESCAPES", "Enforced", "enforce", "fault"]
