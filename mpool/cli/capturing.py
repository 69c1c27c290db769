"""``mpool capture`` and ``mpool capture compare``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from ..debug import GRADES, compare_captures
from ..errors import FileError
from ..tasks.captures import Capture
from .chatting import sampling_of
from .common import (
    default_model,
    for_output,
    load,
    make_pool,
    note,
    print_json,
    require_prompt,
    say,
    standard_input,
)
from .layout import table

if TYPE_CHECKING:
    from ..debug import CaptureComparison, CaptureDifference, Grade


def capture(arguments: argparse.Namespace) -> int:
    """Run ``mpool capture``. The default temperature is 0, so that a capture is repeatable."""
    prompt = require_prompt(standard_input() if arguments.prompt == "-" else arguments.prompt,
                            "mpool capture --prompt TEXT --out PATH")
    options = {"temperature": 0, **sampling_of(arguments), "parse_special": arguments.parse_special}
    found = Capture(arguments.out, values=arguments.values, records=arguments.records)
    job = found.job(arguments.job_id)  # checks the id before the model is looked up
    with make_pool(arguments) as pool:
        model = load(pool, "generate", arguments.model or default_model("text_to_text"), {"prompt": prompt, **options},
                     compute=arguments.compute)
        done = model.generate(prompt, capture=job, **options)
        found.flush()
    say(for_output(done.text, sys.stdout))
    if not found.written:
        raise FileError(f"{found.path}: the records could not be written")
    if found.dropped:
        note(f"mpool: {found.dropped} records were dropped; increase --records")
    count = done.usage.completion_tokens
    note(f"mpool: wrote the records of {count} token{'' if count == 1 else 's'} to {found.path}")
    return 0


def compare(arguments: argparse.Namespace) -> int:
    """Run ``mpool capture compare``. The exit code is 1 if the captures differ by more than allowed."""
    found = compare_captures(arguments.first, arguments.second, tokens=arguments.tokens)
    if arguments.json:
        departs = found.departs(arguments.least)
        print_json({"grade": found.grade, "max": found.worst.most, "mean": found.mean,
                    "departs": None if departs is None else asdict(departs),
                    "differences": [{**asdict(row), "grade": row.grade} for row in found.differences]})
    else:
        _print(found)
    return 0 if found.worst.most <= GRADES[arguments.least] else 1


def _job(row: CaptureDifference) -> str:
    return row.job_id if row.call == 1 else f"{row.job_id} (request {row.call})"


def _print(found: CaptureComparison) -> None:
    many = len({(row.job_id, row.call) for row in found.differences}) > 1
    head = ["token", "checkpoint", "max", "mean", "grade"]
    rows = [[str(row.token_idx), row.checkpoint, f"{row.most:.3g}", f"{row.mean:.3g}", row.grade]
            for row in found.differences]
    if many:
        head.insert(0, "job")
        for cells, row in zip(rows, found.differences):
            cells.insert(0, _job(row))
    say(for_output(table(head, rows), sys.stdout))
    say()
    grades: tuple[Grade, ...] = ("exact", "close", "acceptable")
    for grade in grades:
        departs = found.departs(grade)
        if departs is not None:
            say(for_output(f"first difference that is not {grade}: {departs.checkpoint} of token {departs.token_idx}"
                           + (f" of job {_job(departs)}" if many else "") + f", by {departs.most:.3g}", sys.stdout))
    say(f"{found.grade}: max {found.worst.most:.3g}, mean {found.mean:.3g}, {len(found.differences)} records")
