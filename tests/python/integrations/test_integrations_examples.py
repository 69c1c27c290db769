"""The examples of adapters whose libraries the other tests do not have: in docstrings, and in the guide."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import docrunner
import pytest

from clientpackages import package
from defaultmodels import use_default_models
from realmodels import catalogued_path

LIBRARIES = {"llama_index": "llama_index.core", "haystack": "haystack", "chroma": "chromadb", "lancedb": "lancedb"}


@pytest.mark.parametrize("name", LIBRARIES)
def test_docstrings(name: str) -> None:
    package(LIBRARIES[name])
    use_default_models()
    module = importlib.import_module(f"mpool.integrations.{name}")
    found = [test for test in doctest.DocTestFinder(exclude_empty=True).find(module) if test.examples]
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in found:
        runner.run(test, out=said.append)
    assert len(found) >= 1 and not runner.summarize(verbose=False).failed, "".join(said)


def test_the_guide(tmp_path: Path) -> None:
    """The blocks of the page that need these libraries run; test_docs.py runs the others."""
    for library in LIBRARIES.values():
        package(library)
    catalogued_path("minilm")
    docrunner.write_substitutes(tmp_path / "models")
    page = docrunner.ROOT / "docs" / "guides" / "integrations.md"
    blocks = [block for block in docrunner.blocks_of(page) if block.needs is not None]
    assert {block.needs for block in blocks} == {library.partition(".")[0] for library in LIBRARIES.values()}
    run = docrunner.PageRun(page, tmp_path)
    try:
        for block in blocks:
            run.run_block(block)
    finally:
        run.close()
    assert not run.skipped and run.checked >= 7
