"""Finds JSON schemas that no finite value matches because they refer to themselves.

llguidance reports such a schema with the name of an internal state, or accepts it and then never lets a completion end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidArgument


def check(schema: Any, param: str) -> None:
    """Check that a schema has a finite value as far as its references are concerned.

    Only references within the document (``#``, ``#/...``) are followed; llguidance reports all others.

    Args:
        schema: the schema, which is JSON and not nested too deeply.
        param: the caller's parameter, for the error message.

    Raises:
        InvalidArgument: the schema, or a part that every value must contain, requires itself.
    """
    needs = _requirements(schema)
    finite: set[str] = set()
    changed = True
    while changed:  # the targets of a reference usually come after it, so the reversed order needs few rounds
        changed = False
        for pointer in reversed(needs):
            if pointer not in finite and all(any(target in finite for target in targets)
                                             for _, targets in needs[pointer]):
                finite.add(pointer)
                changed = True
    if "#" not in finite:
        keyword, path = _cycle(needs, finite)
        raise InvalidArgument(f"`{param}`: {keyword} of the JSON schema refers to itself ({' -> '.join(path)}), so no "
                              "finite value matches", param=param,
                              hint="End the recursion: make the property optional, or add an alternative with anyOf")


def _requirements(schema: Any) -> dict[str, list[tuple[str, list[str]]]]:
    """Return, for the schema and every part that a value may have to match, what a value of it requires.

    Returns:
        JSON pointer of a part -> list of keyword and the pointers of parts of which one must have a finite value.
    """
    found: dict[str, list[tuple[str, list[str]]]] = {}
    waiting: list[tuple[str, Any]] = [("#", schema)]
    while waiting:
        at, part = waiting.pop()
        if at not in found:
            needed = _needed(schema, at, part) if isinstance(part, Mapping) else []
            found[at] = [(keyword, [pointer for pointer, _ in targets]) for keyword, targets in needed]
            waiting += [target for _, targets in needed for target in targets]
    return found


def _needed(schema: Any, at: str, part: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return the requirements of a part: keyword, and pointer and content of the parts of which a value matches one."""
    needed: list[tuple[str, list[tuple[str, Any]]]] = []
    reference = part.get("$ref")
    if isinstance(reference, str) and (target := _target(schema, reference)) is not None:
        needed.append(("$ref", [target]))
    for keyword in ("allOf", "anyOf", "oneOf"):
        options = part.get(keyword)
        if isinstance(options, list) and options:
            members = [(f"{at}/{keyword}/{index}", option) for index, option in enumerate(options)]
            needed += [(keyword, [member]) for member in members] if keyword == "allOf" else [(keyword, members)]
    kind = part.get("type")
    properties, required = part.get("properties"), part.get("required")
    if kind in ("object", ["object"]) and isinstance(properties, Mapping) and isinstance(required, list):
        needed += [("properties", [(f"{at}/properties/{_escaped(name)}", properties[name])]) for name in required
                   if isinstance(name, str) and name in properties]
    least = part.get("minItems")
    if kind in ("array", ["array"]) and isinstance(least, int) and least > 0:
        given = part.get("prefixItems")
        heads = given[:least] if isinstance(given, list) else []
        needed += [("prefixItems", [(f"{at}/prefixItems/{index}", item)]) for index, item in enumerate(heads)]
        if len(heads) < least and "items" in part:
            needed.append(("items", [(f"{at}/items", part["items"])]))
    return needed


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _target(schema: Any, reference: str) -> tuple[str, Any] | None:
    """Return the normalised pointer and the part that ``reference`` names; None: not in this document."""
    if reference in ("#", "#/"):
        return "#", schema
    if not reference.startswith("#/"):
        return None
    part, at = schema, "#"
    for step in reference[2:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping) and name in part:
            part = part[name]
        elif isinstance(part, list) and name.isdecimal() and len(name) < 10 and int(name) < len(part):
            part = part[int(name)]
        else:
            return None
        at += "/" + _escaped(name)
    return at, part


def _cycle(needs: Mapping[str, list[tuple[str, list[str]]]], finite: set[str]) -> tuple[str, list[str]]:
    """Return the keyword and the pointers of a cycle of unmet requirements that starts at the schema."""
    path, keywords, at = ["#"], [], "#"
    while True:
        keyword, targets = next(need for need in needs[at] if not any(target in finite for target in need[1]))
        at = targets[0]
        keywords.append(keyword)
        if at in path:
            start = path.index(at)
            path, keywords = path[start:] + [at], keywords[start:]
            shown = path if len(path) <= 6 else [*path[:3], "...", *path[-2:]]
            return "$ref" if "$ref" in keywords else keywords[0], [text[:60] for text in shown]
        path.append(at)


__all__ = ["check"]
