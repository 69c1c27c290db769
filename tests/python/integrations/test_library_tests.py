"""The tests of sentence-transformers itself, with mpool's classes in place of that library's.

MPOOL_SENTENCE_TRANSFORMERS names a checkout of that library at the tag of library_tests.json. The list there has every
test of its files that used one of the classes: those that must pass, and those that cannot, by reason.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
LIST: dict[str, Any] = json.loads(Path(__file__).with_name("library_tests.json").read_text())


def compare(outcomes: dict[str, str], held: dict[str, Any] = LIST) -> list[str]:
    """Return what is wrong with the outcomes of tests: each must be in the list, and those that must pass must pass."""
    must = {f"{file}::{name}" for file, names in held["pass"].items() for name in names}
    excluded = {name for group in held["excluded"] for name in group["tests"]}
    functions = {name: name.partition("[")[0] for name in outcomes}
    return [*(f"did not pass: {name} ({outcomes.get(name, 'did not run, or did not use mpool')})"
              for name in sorted(must) if outcomes.get(name) != "passed"),
            *(f"not in the list: {name} ({outcome})" for name, outcome in sorted(outcomes.items())
              if name not in must and functions[name] not in excluded),
            *(f"excluded, but never run: {name}" for name in sorted(excluded - set(functions.values())))]


def test_the_list_has_reasons() -> None:
    excluded = [name for group in LIST["excluded"] for name in group["tests"]]
    assert len(set(excluded)) == len(excluded) and all(group["reason"] for group in LIST["excluded"])
    assert {name.partition("::")[0] for name in excluded} | set(LIST["pass"]) == set(LIST["files"])


@pytest.mark.slow
def test_library(tmp_path: Path) -> None:
    checkout = os.environ.get("MPOOL_SENTENCE_TRANSFORMERS")
    if not checkout:
        pytest.skip(f"MPOOL_SENTENCE_TRANSFORMERS names no checkout of sentence-transformers {LIST['tag']}")
    root = Path(checkout).resolve()
    version = (root / "sentence_transformers" / "__init__.py").read_text()
    assert f'__version__ = "{LIST["tag"].removeprefix("v")}"' in version, "the checkout is not at the tag of the list"
    import librarymodels
    import mpool

    (tmp_path / "models.json").write_text(json.dumps(librarymodels.make(tmp_path / "models")))
    roots = [root, HELPERS, Path(mpool.__file__).resolve().parents[1]]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "librarytests", "-p", "no:cacheprovider", "-m",
         "not custom", *LIST["files"]], cwd=root, capture_output=True, text=True, timeout=1800,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots)), "HF_HUB_OFFLINE": "1",
             "MPOOL_LIBRARY_MODELS": str(tmp_path / "models.json"),
             "MPOOL_LIBRARY_OUTCOMES": str(tmp_path / "outcomes.json")})
    assert (tmp_path / "outcomes.json").exists(), (done.stdout[-3000:], done.stderr[-3000:])
    wrong = compare(json.loads((tmp_path / "outcomes.json").read_text()))
    assert wrong == [], "\n".join(wrong) + "\n" + done.stdout[-3000:]
