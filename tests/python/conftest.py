"""What all Python tests share: the ``slow`` marker, where they run, small models, a pool."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import mpool


def pytest_configure() -> None:
    """Leave the folder with the sources: ``python -c`` in a child imports from its working directory first, and would
    find the package without its compiled core there."""
    for name in ("MPOOL_CACHE", "MPOOL_TEST_BUILD", "MPOOL_TEST_WEIGHTS"):
        if os.environ.get(name):
            os.environ[name] = os.path.abspath(os.path.expanduser(os.environ[name]))
    if os.environ.get("PYTHONPATH"):
        os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, os.environ["PYTHONPATH"].split(os.pathsep)))
    os.chdir(Path(__file__).parent)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slow``."""
    parser.addoption("--slow", action="store_true", default=False, help="run the tests marked slow too")


def slow_wanted(config: pytest.Config) -> bool:
    """Whether tests marked slow run."""
    said = os.environ.get("MPOOL_SLOW", "").strip().lower()
    return config.getoption("--slow") or said not in ("", "0", "no", "false", "off")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked slow unless it was asked for."""
    if slow_wanted(config):
        return
    skip = pytest.mark.skip(reason="slow: run with --slow or MPOOL_SLOW=1")
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small sentence-transformers BERT."""
    return _tiny(tmp_path_factory, "bert")


@pytest.fixture(scope="session")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with prompts, one of them its default, and Matryoshka dimensions."""
    return _tiny(tmp_path_factory, "prompted")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small Llama with a chat template."""
    return _tiny(tmp_path_factory, "llama")


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small Qwen2 that says how it likes to be sampled."""
    return _tiny(tmp_path_factory, "qwen2")


@pytest.fixture(scope="session")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small FLUX.1 pipeline."""
    import pipelinemodels

    folder = tmp_path_factory.mktemp("flux")
    pipelinemodels.flux(folder, layers=1, singles=1)
    return folder


@pytest.fixture(scope="session")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small DINOv2, which takes images of any size."""
    import imagemodels

    return imagemodels.save(imagemodels.randomised("dinov2", 2), "dinov2", tmp_path_factory.mktemp("dino"))


@pytest.fixture(scope="module")
def pool() -> Iterator[mpool.Pool]:
    """A pool of a module's own."""
    import mpool  # not before a test wants it: tests of the C core need no extension

    with mpool.Pool() as made:
        yield made


def _tiny(factory: pytest.TempPathFactory, name: str) -> Path:
    import tinymodels

    return tinymodels.cached(factory, name)
