"""Imports only run from higher to lower tiers: contracts of import-linter, dynamic imports, imports in functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import late_imports
import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "mpool"
#: The module that forwards names of earlier releases. It imports only modules listed in its tables.
FORWARDS = "mpool._renamed"
#: Modules that import by a computed name -> the only prefix allowed for it, their own package.
DYNAMIC = {"mpool": ".", "mpool.models": ".", "mpool.cli.parser": ".", "mpool.integrations.ray": ".",
           "mpool.tasks.output_table": "."}


def modules() -> Iterator[tuple[str, Path]]:
    """Yield the dotted name and file of every module of the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


def in_scope(name: str, parts: tuple[str, ...]) -> bool:
    """Return True if the module is in none of these top-level parts."""
    return (*name.split("."), "")[1] not in parts


def late(name: str, path: Path) -> Counter[str]:
    """Return the absolute names that functions of a module import, with their count."""
    found: Counter[str] = Counter()
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]

    def visit(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if inside and isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif inside and isinstance(child, ast.ImportFrom):
                base = ".".join([*(package[:len(package) - child.level + 1] if child.level else ()),
                                 *([child.module] if child.module else ())])
                found.update([base] if child.module else [f"{base}.{alias.name}" for alias in child.names])
            visit(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def rows() -> dict[tuple[str, str], int]:
    """Return the count of every late import by (module, imported)."""
    return {(name, imported): count for name, path in modules()
            for imported, count in sorted(late(name, path).items())}


def test_imports_run_downwards() -> None:
    run = subprocess.run([sys.executable, "-c", "import sys; from importlinter.cli import lint_imports_command; "
                          "sys.exit(lint_imports_command())", "--no-logo", "--no-cache"], cwd=ROOT,
                         capture_output=True, text=True)
    broken = {line.rstrip(":") for line in run.stdout.splitlines() if " is not allowed to import " in line}
    cycles = [line for line in run.stdout.splitlines() if line.startswith("No cycles are allowed")]
    assert "Contracts: " in run.stdout, run.stdout + run.stderr
    assert run.returncode == 0 and not broken and not cycles, run.stdout


def test_the_contracts_ignore_nothing() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contracts = text[text.index("[tool.importlinter]"):]
    assert "ignore_imports" not in contracts and "exclude_type_checking_imports" not in contracts


def test_no_dynamic_import_evades_a_tier() -> None:
    """``import_module`` and ``__import__`` are called with a literal name of another library, or a name below the
    module's own package."""
    used: set[str] = set()
    for name, path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert called != "__import__", f"{path}:{node.lineno}"
            if called.lstrip("_") != "import_module" or name == FORWARDS:
                continue
            target = node.args[0]
            if isinstance(target, ast.Constant) and not target.value.startswith((".", "mpool")):
                continue
            used.add(name)
            first = target.value if isinstance(target, ast.Constant) else \
                target.values[0].value if isinstance(target, ast.JoinedStr) else ""  # type: ignore[attr-defined]
            assert first.startswith(DYNAMIC.get(name, "nowhere")) and not first.startswith(".."), \
                f"{path}:{node.lineno}: imports a module by name"
            anchor = node.args[1]
            assert isinstance(anchor, ast.Name) and anchor.id in ("__name__", "__package__"), f"{path}:{node.lineno}"
    assert used == set(DYNAMIC)


def test_sys_modules_is_read_only_with_a_literal_of_a_lower_tier() -> None:
    for name, path in modules():
        text = path.read_text(encoding="utf-8")
        assert 'sys.modules["mpool' not in text and "sys.modules['mpool" not in text, name


def test_lower_tiers_import_only_the_core_from_the_package() -> None:
    """The package itself is the top tier, so lower tiers may use ``from mpool import`` only for the compiled core."""
    above = ("", "__main__", "cli", "server", "integrations", "aio", "_calls", "_runtime", "model", "pool")
    for name, path in modules():
        if not in_scope(name, above):
            continue
        depth = len(name.split(".")) - (path.name != "__init__.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == depth and node.module is None:
                taken = {alias.name for alias in node.names}
                missing = {one for one in taken if one != "_core" and not (PACKAGE / f"{one}.py").exists()
                           and not (PACKAGE / one).is_dir()}
                assert not missing, f"{path}:{node.lineno}: {missing}"
            assert not (isinstance(node, ast.Import) and any(alias.name == "mpool" for alias in node.names)), name


def test_late_imports_are_listed_with_a_reason() -> None:
    listed: dict[tuple[str, str], int] = {}
    for row in late_imports.ROWS.split("\n"):
        if row:
            name, imported, count, reason = row.split()
            assert reason in late_imports.REASONS and (name, imported) not in listed, row
            listed[name, imported] = int(count)
    assert listed == rows()


@pytest.mark.parametrize("source, found", [
    ("def f():\n    from ..tasks import options\n", {"mpool.tasks": 1}),
    ("class C:\n    def f(self):\n        from .. import _core, errors\n", {"mpool._core": 1, "mpool.errors": 1}),
    ("from ..tasks import options\nimport os\n", {}),
    ("async def f():\n    import numpy as np\n    return lambda: np\n", {"numpy": 1}),
])
def test_late_imports_are_found(tmp_path: Path, source: str, found: dict[str, int]) -> None:
    path = tmp_path / "module.py"
    path.write_text(source, encoding="utf-8")
    assert dict(late("mpool.runtime.module", path)) == found


if __name__ == "__main__":
    for (module, target), times in rows().items():
        print(f"{module}  {target}  {times}")


def imported_at_start(name: str, path: Path) -> set[str]:
    """Return the modules of the package that a module imports when it is imported itself."""
    known = {one for one, _ in modules()}
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.ImportFrom) and child.level:
                base = ".".join([*package[:len(package) - child.level + 1], *filter(None, [child.module])])
                names = {f"{base}.{alias.name}" for alias in child.names} & known
                found.update(names or {base})
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def test_packages_do_not_import_modules_that_others_import() -> None:
    """A thread that imports ``package.module`` holds the lock of this module while it waits for that of the package.
    If another thread imports the package, which imports this module, each waits for the other, and Python raises
    ``_DeadlockError`` or returns a module half initialised."""
    imports = {name: imported_at_start(name, path) for name, path in modules()}
    packages = [name for name, path in modules() if path.name == "__init__.py" and name != "mpool"]
    imports |= {f"{name} (late)": {one for one in late(name, path)} for name, path in modules()}
    for package in packages:
        if any(one.startswith(f"{package}.") for one in imports[package]):
            others = {name: {one for one in found if one.startswith(f"{package}.")} for name, found in imports.items()
                      if not f"{name} ".startswith((f"{package} ", f"{package}."))}
            assert not any(others.values()), f"{package}: {[row for row in others.items() if row[1]]}"
