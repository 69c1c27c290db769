"""What all Python tests share: the ``slow`` marker."""

from __future__ import annotations

import os

import pytest


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
