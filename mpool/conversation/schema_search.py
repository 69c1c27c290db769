"""Finds the keywords of a JSON schema that the compiler of grammars refuses, by compiling the parts of the schema.

Its errors name no place: "not disjoint", "unsatisfiable". A part that is refused, although each part within it can be
compiled, has the keyword without which it can be compiled, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

from .schema_keywords import Report, step
from .schema_references import moved, target_of

#: Keywords in the order in which they are tried. The first ones are those that grammars support in part.
_ORDER = ("oneOf", "pattern", "patternProperties", "minProperties", "maxProperties", "multipleOf", "exclusiveMinimum",
          "exclusiveMaximum", "minimum", "maximum", "format", "minLength", "maxLength", "minItems", "maxItems", "enum",
          "const", "$ref", "allOf", "anyOf", "prefixItems", "items", "additionalItems", "required",
          "additionalProperties", "properties", "type")
#: Maximum number of compilations of one search. Each usually takes 1 to 5 ms.
_MAX_TRIALS = 256

#: Position of a part: keywords, names and indices from the root on.
_Steps = tuple[Any, ...]


class TooManyFaults(Exception):
    """The search ended before it had found all keywords."""


def repair(schema: dict[str, Any], fault: Callable[[Any], str | None], report: Report) -> None:
    """Leave out the keywords that are refused, in place.

    Args:
        schema: a JSON schema that is refused.
        fault: compiles a schema, and returns why it is refused, or None.
        report: receives what is left out.

    Raises:
        TooManyFaults: not all keywords were found.
        ValueError: ``report`` raised it.
    """
    _Search(schema, fault, report).repair((), "")


class _Search:
    """One search; see :func:`repair`."""

    def __init__(self, schema: dict[str, Any], fault: Callable[[Any], str | None], report: Report) -> None:
        self._schema, self._compile, self._report = schema, fault, report
        self._trials, self._seen = 0, set[_Steps]()

    def _fault(self, steps: _Steps) -> str | None:
        self._trials += 1
        if self._trials > _MAX_TRIALS:
            raise TooManyFaults
        if not steps:
            return self._compile(self._schema)
        pointer = "".join("/" + quote(str(one).replace("~", "~0").replace("/", "~1"), safe="~") for one in steps)
        why = self._compile({"$defs": {"root": moved(self._schema, "#/$defs/root")}, "$ref": f"#/$defs/root{pointer}"})
        return None if why is None else why.replace("/$defs/root", "")

    def repair(self, steps: _Steps, path: str) -> None:
        """Leave out the keywords of the part at ``steps``, and of the parts within it, that are refused."""
        part = self._schema
        for one in steps:
            part = part[one]
        self._seen.add(steps)
        why = self._fault(steps)
        while why is not None:
            found = next((inner for inner in _children(self._schema, part, steps) if self._is_refused(inner)), None)
            if found is None:
                return self._leave_out(steps, part, path, why)
            self.repair(found, _path(found))
            why = self._fault(steps)
        return None

    def _is_refused(self, steps: _Steps) -> bool:
        """Return True if a part is refused that was not looked at yet."""
        if steps in self._seen:
            return False
        self._seen.add(steps)
        return self._fault(steps) is not None

    def _leave_out(self, steps: _Steps, part: dict[str, Any], path: str, why: str) -> None:
        for name in _ORDER:
            if name not in part:
                continue
            kept = dict(part)
            del part[name]
            if name == "oneOf":
                part["allOf"] = [*kept.get("allOf", ()), {"anyOf": kept[name]}]
            if name in ("properties", "patternProperties"):
                part.pop("additionalProperties", None)
            if self._fault(steps) is None:
                return self._report(path, name, why)
            part.clear()
            part.update(kept)
        self._report(path, "", why)
        definitions: dict[str, Any] = {name: part[name] for name in ("$defs", "definitions") if name in part and steps}
        part.clear()
        part.update(definitions)
        return None


def _children(root: Any, part: Any, steps: _Steps) -> Iterator[_Steps]:
    """Yield the positions of the schemas within a part, and that of its reference, except those that match nothing."""
    reference = part.get("$ref")
    target = target_of(root, reference) if isinstance(reference, str) else None
    if target is not None and isinstance(target[1], dict) and reference != "#":
        names = reference[2:].split("/")
        found: Any = root
        place: list[Any] = []
        for name in names:
            name = name.replace("~1", "/").replace("~0", "~")
            place.append(int(name) if isinstance(found, list) else name)
            found = found[place[-1]]
        yield tuple(place)
    for name in ("properties", "patternProperties", "anyOf", "oneOf", "allOf", "prefixItems", "items",
                 "additionalProperties", "additionalItems"):
        value, inner = part.get(name), list[tuple[_Steps, Any]]()
        if isinstance(value, list):
            inner = [((name, at), one) for at, one in enumerate(value)]
        elif name in ("items", "additionalProperties", "additionalItems"):
            inner = [((name,), value)]
        elif isinstance(value, dict):
            inner = [((name, key), one) for key, one in value.items()]
        for more, one in inner:
            if isinstance(one, dict) and one != {"anyOf": []}:
                yield (*steps, *more)


def _path(steps: _Steps) -> str:
    path = ""
    for one in steps:
        path = f"{path}[{one}]" if isinstance(one, int) else step(path, one)
    return path


__all__ = ["TooManyFaults", "repair"]
