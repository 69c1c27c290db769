"""Numbers of every module: limits, intervals and sizes at file scope, and defaults of parameters and fields.

``constants.json`` has the values. It asks for a second look at every change of a number, as ``public_api.json`` does
for names; tests of each module check what the numbers do. This writes the file again after a number changed on purpose:

    python tests/python/api/test_constants.py
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import mpool

SNAPSHOT = Path(__file__).with_name("constants.json")
ROOT = Path(mpool.__file__).parent
#: Folders whose modules need packages that few installations have, and programs of child processes.
LEFT_OUT = ("integrations/", "demo_models/", "child_main.py", "__main__.py", "_program.py")


def modules() -> dict[str, Path]:
    """Return the modules of the library."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        if not any(place.startswith(part) or place.endswith(part) for part in LEFT_OUT):
            found[".".join(("mpool", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")] = path
    return found


def is_number(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float))


def constants(module: Any, tree: ast.Module) -> dict[str, str]:
    """Return the numbers at file scope whose expressions name nothing but numbers, such as ``1 << 20``."""
    found = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(
            node, ast.AnnAssign) and node.value is not None else []
        value: Any = getattr(node, "value", None)
        if value is None or any(isinstance(part, (ast.Name, ast.Call, ast.Attribute)) for part in ast.walk(value)):
            continue
        for target in [part for one in targets for part in (one.elts if isinstance(one, ast.Tuple) else [one])]:
            if isinstance(target, ast.Name) and target.id.isupper() and any(
                    isinstance(part, ast.Constant) and is_number(part.value) for part in ast.walk(value)):
                found[target.id] = repr(getattr(module, target.id))
    return found


def defaults(module: Any) -> dict[str, str]:
    """Return the numbers among the defaults of functions, classes and methods that a module defines."""
    found = {}
    for name, value in vars(module).items():
        if isinstance(value, enum.EnumMeta):
            continue  # its signature depends on the version of Python
        members = {name: value}
        if inspect.isclass(value):
            members |= {f"{name}.{method}": member for method, member in vars(value).items() if callable(member)
                        and (not method.startswith("__") or method == "__init__")}
        for place, member in members.items():
            if getattr(member, "__module__", None) != module.__name__ or not callable(member):
                continue
            try:
                parameters = inspect.signature(member).parameters.values()
            except (TypeError, ValueError):
                continue
            for parameter in parameters:
                if parameter.default is not parameter.empty and parameter.default is not None \
                        and is_number(parameter.default):
                    found[f"{place}({parameter.name})"] = repr(parameter.default)
    return found


def values(name: str, path: Path) -> dict[str, str]:
    module = importlib.import_module(name)
    return dict(sorted((constants(module, ast.parse(path.read_text("utf-8"))) | defaults(module)).items()))


@pytest.mark.parametrize("name", modules())
def test_numbers_are_the_committed_ones(name: str) -> None:
    if name.startswith("mpool.server"):
        pytest.importorskip("uvicorn")
        pytest.importorskip("msgspec")
    assert values(name, modules()[name]) == json.loads(SNAPSHOT.read_text("utf-8")).get(name, {})


def test_no_other_modules_are_committed() -> None:
    assert set(json.loads(SNAPSHOT.read_text("utf-8"))) <= {*modules()}


if __name__ == "__main__":
    written = {name: found for name, path in modules().items() if (found := values(name, path))}
    SNAPSHOT.write_text(json.dumps(written, indent=0) + "\n", "utf-8")
