"""Every third-party module that the package imports, at any depth, is a dependency of the project."""

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[3]
MODULES = sorted((ROOT / "mpool").rglob("*.py"))
#: Module -> its distribution, if the names differ.
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "grpc": "grpcio", "llama_index": "llama-index-core",
                 "haystack": "haystack-ai"}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _names(requirements: list[str]) -> set[str]:
    return {_normal(re.split(r"[^\w.-]", requirement, maxsplit=1)[0]) for requirement in requirements}


def _extra(project: dict, name: str) -> set[str]:
    """Return the distributions of an extra, including those of other extras that it refers to."""
    requirements = project["optional-dependencies"].get(_normal(name), [])
    others = [found[1] for found in (re.match(r"mpool\[(\w+)\]", requirement) for requirement in requirements) if found]
    return _names(requirements).union(*(_extra(project, other) for other in others))


def _checks_types(node: ast.AST) -> bool:
    """Return True for ``if TYPE_CHECKING:``, whose body is never executed."""
    return isinstance(node, ast.If) and isinstance(node.test, (ast.Name, ast.Attribute)) and (
        getattr(node.test, "id", "") == "TYPE_CHECKING" or getattr(node.test, "attr", "") == "TYPE_CHECKING")


def _imports(node: ast.AST) -> set[str]:
    """Return the top-level names of third-party modules that a tree imports at run time, also inside functions."""
    found: set[str] = set()
    for child in node.orelse if _checks_types(node) else ast.iter_child_nodes(node):
        found |= _imports(child)
    if isinstance(node, ast.Import):
        found |= {alias.name.partition(".")[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
        found.add(node.module.partition(".")[0])
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
        found.add(str(node.args[0].value).partition(".")[0])
    return {name for name in found if name and name != "mpool" and name not in sys.stdlib_module_names}


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_old_versions_of_pip_find_each_extra(project: dict) -> None:
    """pip 23 ignores an extra whose name differs from that of the metadata, which has the normal form (PEP 685)."""
    extras = project["optional-dependencies"]
    assert [name for name in extras if name != _normal(name)] == []
    named = {name for requirements in extras.values() for line in requirements if line.startswith("mpool[")
             for name in re.split(r"[\[\],]", line)[1:-1]}
    assert named <= set(extras)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imported_modules_are_dependencies(path: Path, project: dict) -> None:
    allowed = _names(project["dependencies"])
    for part in path.relative_to(ROOT / "mpool").with_suffix("").parts:
        # A module with the name of an extra may use its dependencies.
        allowed |= _extra(project, {"completing": "completion", "embedding_results": "scipy",
                                     "enforced_schemas": "grammar", "grammar_trial_program": "grammar",
                                     "_tensors": "sentence-transformers"}.get(part, part))
    imported = {_normal(DISTRIBUTIONS.get(name, name)) for name in _imports(ast.parse(path.read_text("utf-8")))}
    assert imported <= allowed, f"not among the dependencies: {', '.join(sorted(imported - allowed))}"
