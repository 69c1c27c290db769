"""csrc/README.md lists the files that a capability and an output of an encoder are named in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CSRC = ROOT / "csrc"

if not CSRC.is_dir():
    pytest.skip("the C sources are not available", allow_module_level=True)

def _listed(first: str, last: str) -> set[str]:
    """Return the files in the first column of the tables of csrc/README.md between two headings."""
    page = (CSRC / "README.md").read_text().split(f"### {first}\n")[1].split(f"\n{last}\n")[0]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_readme_lists_the_files_of_the_core_that_name_a_capability() -> None:
    """csrc/README.md, "Adding a capability", step 1."""
    listed = {name.replace("<capability>", "image_embedding")
              for name in _listed("1. The request and its row", "### 2. The engine")}
    # does not match the types of the request, which engines use
    named = re.compile(r"image_embedding(_from_python)?\b|IMAGE_EMBEDDING\b|mp_image_embedding_from_python\b")
    found = {path.relative_to(CSRC).as_posix() for path in CSRC.rglob("*") if path.suffix in (".c", ".h", ".def")
             and named.search(path.name + path.read_text(encoding="utf-8"))}
    assert found == listed
    assert len(found) == 11


def test_the_readme_lists_the_files_of_the_package_that_name_a_capability() -> None:
    """csrc/README.md, "Adding a capability", steps 4 and 5: none is missing, and all exist."""
    listed = _listed("4. The Python package", "### 5. Tests and documents")
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mpool").rglob("*")
             if path.suffix in (".py", ".pyi", ".js", ".json") and "image_embedding" in path.read_text("utf-8")}
    assert found <= listed
    listed |= _listed("5. Tests and documents", "## Tests")
    assert [name for name in sorted(listed) if not (ROOT / name).is_file()] == []


def test_the_readme_lists_the_files_of_an_output_of_encoders() -> None:
    """csrc/README.md, "Adding an output of an encoder": the files of sparse vectors are in the lists, and all exist."""
    core = _listed("1. The array of an output", "### 2. The output in Python")
    assert {path.relative_to(CSRC).as_posix() for path in CSRC.rglob("*") if path.suffix in (".c", ".h", ".def")
            and "MP_EMBED_SPARSE" in path.read_text(encoding="utf-8")} <= core
    package = _listed("2. The output in Python", "## Adding a capability")
    layers = {"mpool/models/architectures.py", *(f"mpool/models/families/{name}.py" for name in (
        "deepseek", "nomic", "qwen_moe"))}  # "sparse" is a kind of layer of MoE there
    found = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mpool").rglob("*.py")
             if re.search(r'embed_sparse|"sparse"', path.read_text("utf-8"))}
    assert layers <= found and found - layers <= package
    assert [name for name in sorted(core) if not (CSRC / name).is_file()] == []
    assert [name for name in sorted(package) if not (ROOT / name).is_file()] == []
