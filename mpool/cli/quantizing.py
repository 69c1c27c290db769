"""``mpool quantize``."""

from __future__ import annotations

import argparse
import os
import sys

from ..models.describing import resolve
from ..models.quantizing.quantize import check
from ..models.quantizing.quantize import quantize as write
from .common import note, print_json, say


def quantize(arguments: argparse.Namespace) -> int:
    """Run ``mpool quantize``."""
    check(arguments.model, arguments.output, arguments.type, arguments.force, arguments.threads)
    source = arguments.model if os.path.exists(arguments.model) else resolve(
        arguments.model, offline=arguments.offline or None).path
    shown = -1

    def progress(done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // max(total, 1)
        if percent != shown and sys.stderr.isatty():
            print(f"\r{percent} %", end="" if done < total else "\n", file=sys.stderr, flush=True)
        shown = percent

    report = write(source, arguments.output, arguments.type, force=arguments.force, threads=arguments.threads,
                   allow_requantize=arguments.allow_requantize, progress=progress)
    if arguments.json:
        print_json({"path": report.path, "bytes": report.nbytes, "types": report.types})
    else:
        say(f"{report.path}: {report.nbytes / 1e6:.1f} MB, " + ", ".join(
            f"{count} {dtype}" for dtype, count in sorted(report.types.items())))
        if source != arguments.model:
            note(f"from {source}")
    return 0
