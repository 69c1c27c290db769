"""The examples of an integration: in the docstrings of its module, and in the guide."""

import doctest
import importlib
from pathlib import Path

import docrunner

from defaultmodels import use_default_models
from realmodels import catalogued_path


def check(name: str, library: str, folder: Path) -> None:
    """Run the examples of ``mpool.integrations.NAME``, and the blocks of the guide that need its library."""
    use_default_models()
    module, said = importlib.import_module(f"mpool.integrations.{name}"), list[str]()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        runner.run(test, out=said.append)
    assert not runner.summarize(verbose=False).failed, "".join(said)
    catalogued_path("minilm")
    docrunner.write_substitutes(folder / "models")
    page = docrunner.ROOT / "docs" / "guides" / "integrations.md"
    blocks = [block for block in docrunner.blocks_of(page) if block.needs == library]
    run = docrunner.PageRun(page, folder)
    try:
        for block in blocks:
            run.run_block(block)
    finally:
        run.close()
    assert blocks and not run.skipped
