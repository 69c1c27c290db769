"""pytest plugin: notes each test's outcome and seconds, and tells coverage.py which test runs.

``MPOOL_MUTATION_REPORT`` names the file for the outcomes. If ``MPOOL_MUTATION_TRACE`` is set (trace.c), the blocks of
the core that each test runs are written beside it. Child processes find the running test's name in
``MPOOL_MUTATION_TEST``; their lines are counted for it. Those that outlive this test, such as the server of a module's
fixture, are noted: later tests make them run lines, too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import process


class _Recorder:
    def __init__(self, path: str) -> None:
        self.path = path
        self.outcomes: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.outliving: set[int] = set()
        trace = os.environ.get("MPOOL_MUTATION_TRACE")
        self.trace = Path(trace) if trace else None
        self.ran: dict[str, Any] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        try:
            import coverage

            measuring = coverage.Coverage.current()
        except ImportError:
            measuring = None
        if measuring is not None:
            measuring.switch_context(item.nodeid)
        os.environ["MPOOL_MUTATION_TEST"] = item.nodeid
        begun = time.monotonic()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.monotonic() - begun
            self.outliving.update(process.descendants(os.getpid()))
            if self.trace is not None:
                import numpy as np

                blocks = np.memmap(self.trace, np.uint8, "r+")
                # Threads and processes that still run set blocks meanwhile: np.nonzero then refuses the array itself.
                self.ran[str(len(self.ran))] = ran = np.flatnonzero(np.array(blocks))
                blocks[ran] = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome != "passed" or report.nodeid not in self.outcomes:
            worse = {"failed": 2, "skipped": 1, "passed": 0}
            before = self.outcomes.get(report.nodeid, "passed")
            self.outcomes[report.nodeid] = max(before, report.outcome, key=worse.__getitem__)

    def pytest_sessionfinish(self) -> None:
        if self.trace is not None:
            import numpy as np

            np.savez(self.path + ".npz", **self.ran)
        with open(self.path, "w", encoding="utf-8") as file:
            json.dump({"outcomes": self.outcomes, "seconds": self.seconds, "outliving": sorted(self.outliving)}, file)


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder if a report is wanted."""
    path = os.environ.get("MPOOL_MUTATION_REPORT")
    if path:
        config.pluginmanager.register(_Recorder(path), "mpool-mutation")
