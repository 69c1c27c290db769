"""Imports only run from higher to lower tiers: contracts of import-linter, dynamic imports, imports in functions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "mpool"
#: The module that waits for imports that have begun. It imports only names that :data:`sys.modules` has.
WAITS = "mpool.host.forks"
#: Reason of imports in functions -> their number, at most, and an expression for "module imported" that all of them
#: match and no earlier reason does. Lower a number when some of them go; together they stay below 120.
LATE_IMPORTS = {
    "an extra, or a library that takes tens of milliseconds":
        (28, r"\S+ (PIL|llguidance|huggingface_hub|tqdm|tomli|torch|scipy|shtab|filelock|ray)\b"),
    "a module of Python that takes milliseconds, or that some systems lack":
        (13, r"\S+ (asyncio|importlib\.metadata|urllib\.request|resource|statistics|tempfile|shutil|logging)\b"),
    "asyncio, which a program without an event loop does not load":
        (6, r"mpool\.tasks\.\S+ mpool\.(runtime\.watching|tasks\.async_streams)$"),
    "numpy or the core, which `import mpool`, `mpool --help` and `mpool list` do without":
        (8, r"\S+ (numpy|mpool\._core)$"),
    "a command of the command line, which starts without those of the others":
        (20, r"mpool\.cli\b"),
    "a capability, which the first request for another does without":
        (18, r"mpool\.tasks\.(requests|running|text_to_text) "),
    "a file format, which models of other formats do without":
        (10, r"mpool\.(models|tokenizers)\."),
    "the functions of the module, which are methods of a pool that they create":
        (6, r"mpool\.(api\.stubs|model|pool) "),
    "the package, whose import is fast": (6, r"mpool(\.server|\.tokenizers|\.integrations\.ray\.pools)? "),
    "chat templates and images, which most requests do without": (5, r"mpool\.(runtime|images)\."),
}
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


def base_of(name: str, path: Path, node: ast.ImportFrom) -> str:
    """Return the absolute name of the package or module behind ``from`` in a module."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    return ".".join([*(package[:len(package) - node.level + 1] if node.level else ()), *filter(None, [node.module])])


def imports_of(path: Path) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yield the import statements of a file, but for those of type checkers, and whether a function has them."""
    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                yield child, inside
            elif not isinstance(child, ast.If) or ast.unparse(child.test) != "TYPE_CHECKING":
                yield from visit(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef,
                                                                     ast.Lambda)))
            else:
                yield from (found for other in child.orelse for found in visit(other, inside))

    return visit(ast.parse(path.read_text(encoding="utf-8")), False)


def late(name: str, path: Path) -> Counter[str]:
    """Return the absolute names that functions of a module import, with their count."""
    found: Counter[str] = Counter()
    for node, inside in imports_of(path):
        if inside and isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif inside and isinstance(node, ast.ImportFrom):
            base = base_of(name, path, node)
            found.update([base] if node.module else [f"{base}.{alias.name}" for alias in node.names])
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
            if called.lstrip("_") != "import_module" or name == WAITS:
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


def test_only_the_pool_and_its_handle_use_entries() -> None:
    """The server, the integrations and the commands use the methods of :class:`mpool.Model` and :class:`mpool.Pool`."""
    found = {f"{name}:{node.lineno}" for name, path in modules() for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Attribute) and node.attr in ("_entry", "_names")
             and ast.unparse(node.value) != "self"}
    assert {place.partition(":")[0] for place in found} == {"mpool.model", "mpool.pool", "mpool.runtime.swapping",
                                                            "mpool.models.formats.gguf_tables"}


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


def test_late_imports_do_not_increase() -> None:
    """An import in a function needs a reason: an extra, or a module that takes milliseconds and is seldom needed."""
    found: Counter[str] = Counter()
    for (module, imported), count in rows().items():
        reasons = [why for why, (_, pattern) in LATE_IMPORTS.items() if re.match(pattern, f"{module} {imported}")]
        assert reasons, f"{module} imports {imported} in a function: import it at the top of the file"
        found[reasons[0]] += count
    assert {why: count for why, count in found.items() if count > LATE_IMPORTS[why][0]} == {}
    assert sum(count for count, _ in LATE_IMPORTS.values()) <= 120


if __name__ == "__main__":
    for (module, target), times in rows().items():
        print(f"{module}  {target}  {times}")


def own_imports(name: str, path: Path, known: set[str], late_too: bool) -> set[str]:
    """Return the modules of the package that a module imports when it is imported, or with ``late_too`` ever."""
    found: set[str] = set()
    for node, inside in imports_of(path):
        if isinstance(node, ast.ImportFrom) and node.level and (late_too or not inside):
            base = base_of(name, path, node)
            found.update({f"{base}.{alias.name}" for alias in node.names} & known or {base})
    return found


def test_packages_do_not_import_modules_that_others_import() -> None:
    """A thread that imports ``package.module`` holds the lock of this module while it waits for that of the package.
    If another thread imports the package, which imports this module, each waits for the other, and Python raises
    ``_DeadlockError`` or returns a module half initialised."""
    known = {name for name, _ in modules()}
    for package, file in modules():
        below = f"{package}."
        if file.name != "__init__.py" or package == "mpool" or not any(
                one.startswith(below) for one in own_imports(package, file, known, False)):
            continue
        others = {name: found for name, path in modules() if name != package and not name.startswith(below)
                  if (found := {one for one in own_imports(name, path, known, True) if one.startswith(below)})}
        assert not others, package
