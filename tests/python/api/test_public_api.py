"""Public names: a committed snapshot, and generated stubs."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool.api import stubs as stubs
from mpool.tasks import verbs
from mpool.tasks.options import CallOptions, names_of

SNAPSHOT = Path(__file__).with_name("public_api.json")


def described(value: Any) -> Any:
    """Describe a public object by its kind and signature, and a class also by its public members."""
    if inspect.ismodule(value):
        return {"kind": "module", "names": sorted(getattr(value, "__all__", ()))}
    if inspect.isclass(value):
        inspect.getmembers(value)  # builds the methods that are built on first use
        members = {name: described_member(member) for name, member in inspect.getmembers_static(value)
                   if not name.startswith("_") and not inspect.ismemberdescriptor(member)}
        bases = [base.__name__ for base in value.__mro__[1:-1]]
        return {"kind": "class", "signature": signature(value), "bases": bases, "members": members}
    if callable(value):
        return {"kind": "function", "signature": signature(value)}
    return {"kind": type(value).__name__}


def described_member(member: Any) -> str:
    if isinstance(member, property):
        return "property"
    if isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    return signature(member) if callable(member) else type(member).__name__


def signature(value: Any) -> str:
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return "?"


def current() -> dict[str, Any]:
    found = {name: described(getattr(mpool, name)) for name in sorted(mpool.__all__)}
    found |= {f"aio.{name}": described(getattr(mpool.aio, name)) for name in sorted(mpool.aio.__all__)}
    return json.loads(json.dumps(found))


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="members that Python adds differ between its versions")
def test_public_names_match_the_snapshot() -> None:
    """After an intended change, ``python tests/python/api/test_public_api.py`` updates the snapshot."""
    known, now = json.loads(SNAPSHOT.read_text("utf-8")), current()
    assert sorted(known) == sorted(now)
    assert {name: (known[name], now[name]) for name in known if known[name] != now[name]} == {}


def test_stubs_are_up_to_date() -> None:
    stale = [path.name for path, text in stubs.stubs().items() if path.read_text("utf-8") != text]
    assert not stale, "run python -m mpool.api.stubs"


def test_stubs_take_a_stream_that_is_a_bool() -> None:
    """A caller that passes its own ``stream: bool`` on gets the union of both results."""
    for path, text in stubs.stubs().items():
        found: dict[str, set[str]] = {}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, set()).update(
                    ast.unparse(one.annotation) for one in node.args.kwonlyargs
                    if one.arg == "stream" and one.annotation)
        kinds = [kind for kind in found.values() if kind]
        assert all("bool" in kind for kind in kinds) and (kinds or path.name == "__init__.pyi")


@pytest.mark.parametrize("home", [mpool, mpool.Pool, mpool.Model, mpool.aio], ids=lambda home: home.__name__)
def test_help_shows_the_type_of_each_result(home: Any) -> None:
    functions = [getattr(home, name) for name in getattr(home, "__all__", None) or dir(home) if name[0] != "_"]
    assert not [one.__name__ for one in functions if inspect.isroutine(one)
                and inspect.signature(one).return_annotation in ("Any", inspect.Signature.empty)]


def documented(value: Any) -> list[tuple[Any, str]]:
    """Return a public object and, of a class, its public members with docstrings of their own."""
    members = [member for name, member in inspect.getmembers(value) if not name.startswith("_")] \
        if inspect.isclass(value) else []
    return [(one, inspect.getdoc(one) or "") for one in (value, *members)
            if getattr(one, "__doc__", None) and not isinstance(one, type(None))]


def names(found: Any, path: list[str]) -> bool:
    """Return True if every part of a dotted name is an attribute of the one before, or a field without default."""
    for part in path:
        if part in getattr(found, "__annotations__", ()):
            return True
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@pytest.mark.parametrize("module", ["", "aio", "debug", "results", "search"])
def test_help_refers_to_public_names(module: str) -> None:
    """A role in a docstring names something that the reader can write: a name below mpool, or one beside it."""
    home = getattr(mpool, module) if module else mpool
    lost = []
    for name in home.__all__:
        value = getattr(home, name)
        if inspect.ismodule(value):
            continue
        for _, text in documented(value):
            for role in re.findall(r":(?:func|class|meth|attr|mod|exc|data):`~?([\w.]+)`", text):
                path = role.split(".")
                if not (names(mpool, path[1:]) if path[0] == "mpool" else names(home, path) or names(value, path)):
                    lost.append((name, role))
    assert not lost


def test_every_public_name_is_in_the_reference() -> None:
    pages = (Path(__file__).parents[3] / "docs" / "api").glob("*.md")
    found = {name for page in pages
             for name in re.findall(r"auto(?:function|class):: mpool\.([\w.]+)", page.read_text("utf-8"))}
    known = {name for name in mpool.__all__ if name[0] != "_" and name not in mpool.errors.__all__
             and not inspect.ismodule(getattr(mpool, name))}
    for module in ("debug", "results", "search"):
        known |= {f"{module}.{name}" for name in getattr(mpool, module).__all__ if name not in mpool.__all__}
    known |= {"aio.AsyncStream", "aio.AsyncImageStream"}
    assert known - found - {"results.FinishReason"} == set()


@pytest.mark.parametrize("name", verbs.VERBS)
def test_every_form_of_a_verb_takes_the_same_options(name: str) -> None:
    verb = verbs.VERBS[name]
    forms = [getattr(mpool, name), getattr(mpool.Pool, name), getattr(mpool.aio, name)]
    if not name.startswith("describe"):
        forms.append(getattr(mpool.Model, name))
    for form in forms:
        taken = set(inspect.signature(form).parameters)
        assert set(names_of(verb.options)) <= taken
        assert "options" not in taken and "keywords" not in taken and form.__name__ == name
    text = inspect.getdoc(getattr(mpool, name)) or ""
    assert all(f"{option}:" in text or f"``{option}``" in text for option in names_of(verb.options))
    assert all(f"{found}: " in text for found in inspect.signature(CallOptions).parameters)


@pytest.mark.parametrize("name", verbs.VERBS)
def test_an_unknown_option_has_one_error(name: str) -> None:
    verb = verbs.VERBS[name]
    values = ["x"] * sum(slot.default is verbs.REQUIRED for slot in verb.positional)
    with mpool.Pool() as pool:
        for ask in (lambda: getattr(mpool, name)(*values, tiemout=3), lambda: getattr(pool, name)(*values, tiemout=3),
                    lambda: getattr(mpool.aio, name)(*values, tiemout=3)):
            with pytest.raises(mpool.InvalidArgument, match=rf"`tiemout` is not an option of {name}; did you mean `ti"
                                                            "meout`") as caught:
                ask()
            assert caught.value.param == "tiemout"


@pytest.mark.parametrize("name", ["classify", "classify_tokens"])
def test_help_of_a_verb_for_one_text_or_many_shows_both_types(name: str) -> None:
    for home in (mpool, mpool.aio, mpool.Pool, mpool.Model):
        signature = inspect.signature(getattr(home, name))
        assert signature.parameters["texts"].annotation.startswith("str | list[str] | ")


def test_arguments_by_position() -> None:
    for wrong in (lambda: mpool.embed(), lambda: mpool.embed("a", inputs="b"), lambda: mpool.embed("a", None, 3),
                  lambda: mpool.get("all-MiniLM-L6-v2").embed("a", model="x")):
        with pytest.raises(TypeError):
            wrong()


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(current(), indent=1, sort_keys=True) + "\n", "utf-8")
