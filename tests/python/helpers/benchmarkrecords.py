"""Checks of records that benchmarks write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def check_record(path: Path, benchmark: str, engines: dict[str, set[str]], measures: set[str],
                 quick: bool = False) -> dict[str, Any]:
    """Check that a file is a record whose turns have these topics, engines and measures. Returns the record."""
    from benchmarks import record as records  # no part of the package: the test has added its folder

    found: dict[str, Any] = json.loads(path.read_text())
    # tests may run outside a clone, which has a commit
    problems = records.problems({**found, "commit": found["commit"] or "0" * 40})
    assert problems == (["--quick measures nothing"] if quick else [])
    assert found["benchmark"] == benchmark and found["failures"] == []
    assert {topic: {turn["engine"] for turn in found["turns"] if turn["topic"] == topic}
            for topic in dict.fromkeys(turn["topic"] for turn in found["turns"])} == engines
    assert all(set(turn["measures"]) == measures and turn["rss MB"] > 0 for turn in found["turns"])
    assert {topic: set(cells) for topic, cells in found["summary"].items()} == {
        topic: {*measures, "memory MB"} for topic in engines}
    assert str(path.parent) not in path.read_text()
    return found
