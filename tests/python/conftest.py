"""What all Python tests share: the ``slow`` marker, and where they run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


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
