"""Bad values at every place of a reader's input, and what the reader makes of each: a table that a test compares with a
committed one. It has the whole text of every error, so it also shows swapped arguments and changed limits."""

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from mpool import errors
from mpool.models.fields import Fields, describe, kind

#: Name in the table -> value. ``...`` removes the key.
VALUES: dict[str, Any] = {"missing": ..., "null": None, "-1": -1, "0": 0, "1": 1, "huge": 1 << 40, "half": 0.5,
                          "true": True, "false": False, "text": "x", "list": [], "list of 1": [7], "object": {}}
_PART = re.compile(r"\[(\d+)\]|([^.\[]+)\.?")
Where = tuple[Any, ...]


def _places(value: Any, where: Where = ()) -> Iterator[Where]:
    """Yield the place of each value inside a value; of a list, the first three."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*where, key)
        yield from _places(one, (*where, key))


def _changed(base: Any, where: Where, value: Any) -> Any:
    """Return a copy with another value at a place, whose sections are made if they are missing; None: not possible."""
    made = copy.deepcopy(base)
    at = made
    for key in where[:-1]:
        if isinstance(at, dict):
            at = at.setdefault(key, {})
        elif isinstance(at, list) and isinstance(key, int) and key < len(at):
            at = at[key]
        else:
            return None
    if not isinstance(at, dict) and not (isinstance(at, list) and isinstance(where[-1], int) and where[-1] < len(at)):
        return None
    if value is not ...:
        at[where[-1]] = value
    elif isinstance(at, list) or where[-1] in at:
        del at[where[-1]]
    return made


def _list_of(where: Where) -> Where:
    """Return the place of the outermost of the lists around a value."""
    while where and isinstance(where[-1], int):
        where = where[:-1]
    return where


def _joined(names: list[str]) -> str:
    """Return names of :data:`VALUES`; if they are more than half of them, the names of the others."""
    absent = [name for name in VALUES if name not in names]
    if len(names) <= len(absent):
        return ", ".join(names)
    return f"all but {', '.join(absent)}" if absent else "all"


def _text(where: Where) -> str:
    """Return the name of a place as errors write it: ``files/0.name``, ``layers[0].size``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in where).lstrip(".")


def outcome(read: Callable[[Any], Any], given: Any, hidden: Mapping[str, str] = {}) -> tuple[str, Any]:
    """Return the error's class and text, or ``""`` and the result.

    Args:
        read: the reader.
        given: its input.
        hidden: texts of this run, such as paths -> their names in the table.
    """
    try:
        return "", read(copy.deepcopy(given))
    except errors.MpoolError as error:
        text = f"{type(error).__name__}: {error}"
        for one, name in hidden.items():
            text = text.replace(one, name)
        return text, None


#: Class and words of an error about a value -> its short form.
_SHORT = {("FormatError", "allowed: "): "= ", ("Unsupported", "mpool supports only "): "= Unsupported: ",
          ("Unsupported", "which mpool does not support"): "= Unsupported"}


def short(text: str, field: str, value: Any) -> str:
    """Return an error without what the table says already.

    An error with the expected field and value is written as ``=`` and its allowed values, with ``Unsupported`` if it
    has this class. Any other text stays whole.
    """
    for got in ("missing",) if value is ... else (describe(value), kind(value)):
        for (error, words), mark in _SHORT.items():
            start = f"{error}: {field} is {got}, {words}"
            if text.startswith(start):
                return mark + text[len(start):]
    return text


def table(read: Callable[[Any], Any], base: Any, *, name: str = "", hidden: Mapping[str, str] = {},
          places: Callable[[Where], bool] = lambda where: True) -> dict[str, dict[str, str]]:
    """Return place -> outcome -> names of :data:`VALUES`.

    The places are the keys that the reader asks for, and the values of their lists. An outcome is ``"used"`` (the
    result differs from that of ``base``), or an error, see :func:`short`.

    Args:
        read: the reader; it must not keep or change its input.
        base: its input, JSON.
        name: name of the file in errors.
        hidden: see :func:`outcome`.
        places: filter of places.
    """
    asked: dict[Where, None] = {}
    whole = {method: getattr(Fields, method) for method in ("_pick", "get", "__contains__")}
    with pytest.MonkeyPatch.context() as patch:
        for method in whole:
            def record(self: Fields, key: Any, *more: Any, _whole: Any = whole[method]) -> Any:
                if (name or "config.json") in self.file:
                    asked[(*(int(n) if n else word for n, word in _PART.findall(self.at)), key)] = None
                return _whole(self, key, *more)
            patch.setattr(Fields, method, record)
        usual = outcome(read, base, hidden)
    usual_text = repr(usual[1])
    found: dict[str, dict[str, str]] = {}
    inside = [where for where in _places(base) if isinstance(where[-1], int) and _list_of(where) in asked]
    for where in sorted({*inside, *asked}, key=_text):
        row: dict[str, list[str]] = {}
        for value_name, value in VALUES.items() if places(where) else ():
            given = _changed(base, where, value)
            if given is None or repr(given) == repr(base):
                continue
            text, result = outcome(read, given, hidden)
            text = short(text, f"{name or 'config.json'}: {_text(where)}", value)
            if not text and repr(result) != usual_text:
                text = "used"
            if text and text != usual[0]:
                row.setdefault(text, []).append(value_name)
        if row:
            found[_text(where)] = {text: _joined(names) for text, names in row.items()}
    return found


def written(tables: Mapping[str, Any]) -> str:
    """Return tables as JSON, one place a line."""
    return "{" + ",\n".join(f"{json.dumps(name)}: {{\n" + ",\n".join(
        f" {json.dumps(place)}: {json.dumps(row, ensure_ascii=False)}" for place, row in rows.items()) + "}"
        for name, rows in tables.items()) + "}\n"


#: Entry of a table with the rows that equal those of other tables: name of a table -> places.
SAME = "same rows"


def shared(tables: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return tables in which each row is written once, by the first table that has it."""
    first: dict[str, str] = {}
    made: dict[str, dict[str, Any]] = {}
    for name, rows in tables.items():
        same: dict[str, list[str]] = {}
        made[name] = {}
        for place, row in rows.items():
            owner = first.setdefault(json.dumps([place, row]), name) if place else name
            if owner == name:
                made[name][place] = row
            else:
                same.setdefault(owner, []).append(place)
        if same:
            made[name][SAME] = same
    return made


def whole(tables: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the tables that :func:`shared` got."""
    def row(name: str, place: str) -> Any:
        own = tables[name]
        return own[place] if place in own else row(next(n for n, p in own[SAME].items() if place in p), place)
    return {name: {place: row(name, place) for place in [*rows, *itertools.chain(*rows.get(SAME, {}).values())]
                   if place != SAME} for name, rows in tables.items()}


def compare(wanted: Mapping[str, Any], found: Mapping[str, Any], script: str) -> None:
    """Compare a table with the committed one, place by place. ``script``: name of the file that writes it again."""
    command = f"PYTHONPATH=tests/python/helpers python tests/python/models/{script}"
    for place in {**wanted, **found}:
        assert found.get(place) == wanted.get(place), f"{place}; if a reader or a text changed on purpose: {command}"
