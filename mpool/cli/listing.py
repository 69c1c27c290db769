"""``mpool models`` and ``mpool list``."""

from __future__ import annotations

import argparse
import contextlib
import math
from typing import TYPE_CHECKING, Any

from ..errors import MpoolError
from ..models import describing, downloaded
from ..models.catalogue import load as load_catalogue
from ..models.describing import resolve
from ..names import TASKS
from .common import make_pool, note, print_json, say, size_of
from .layout import screen_width, table
from .models import facts_of_model, facts_of_row, megabytes

if TYPE_CHECKING:
    from ..models import Resolved


def models(arguments: argparse.Namespace) -> int:
    """Run ``mpool models`` or ``mpool list``."""
    catalogue = load_catalogue()
    listed = []
    for key in catalogue.keys(arguments.capability):
        row, here = catalogue.require(key), _local(key)
        if here is not None or not arguments.local:
            listed.append(facts_of_row(row, here, key in catalogue.defaults.values()))
    if arguments.local:
        listed += [fact for fact in _facts_of_others() if arguments.capability in (None, fact["capability"])]
    if arguments.task:
        also = {"chat": "vision"}.get(arguments.task, arguments.task)  # models that see also chat
        listed = [fact for fact in listed if fact["task"] in (arguments.task, also)]
    if arguments.fits:
        limit = _memory_limit()
        listed = [fact for fact in listed if (fact["est_memory_allocation_mb"] or math.inf) * 1e6 <= limit]
    if arguments.json:
        print_json(listed)
        return 0
    if not listed:
        note("mpool: no such model" + (" on this machine; mpool models lists those that can be downloaded"
                                       if arguments.local else ""))
    elif arguments.wide:
        _print_all(listed)
    else:
        say(table(("NAME", "TASK", "SIZE", "LOCAL"),
                  [(fact["key"] + catalogue.default_note(fact["key"]), fact["task"] or "-", _size(fact), _place(fact))
                   for fact in listed], screen_width()))
    if arguments.wide and not arguments.local:
        from ..models import verified

        say("\nArchitectures, and the implementations whose results are compared with mpool's on the same weights:\n")
        say(table(("ARCHITECTURE", "CAPABILITY", "EXAMPLES", "SAFETENSORS TESTED WITH", "GGUF TESTED WITH"),
                  [tuple(cell or "-" for cell in row) for row in verified.table()
                   if arguments.capability in (None, row[1])]))
    return 0


def _print_all(listed: list[dict[str, Any]]) -> None:
    """Print the columns of ``--wide``."""
    catalogue = load_catalogue()
    say(table(("NAME", "TASK", "SIZE", "LOCAL", "MEMORY", "PARAMETERS", "LICENCE", "HASHES", "DEFAULT OPTIONS",
               "ALIASES"),
              [(fact["key"] + catalogue.default_note(fact["key"]), fact["task"] or "-", _size(fact), _place(fact),
                "-" if fact["est_memory_allocation_mb"] is None else f"{fact['est_memory_allocation_mb']:,} MB",
                _count(fact["parameters"]), fact["license"] or "-", "unpinned" if fact["unpinned"] else "pinned",
                ", ".join(f"{name}={value:g}" for name, value in fact["options"].items()) or "-",
                ", ".join(fact["aliases"]) or "-") for fact in listed]))


def _size(fact: dict[str, Any]) -> str:
    """Return the size of the files on this machine, or else of the download."""
    size = fact["bytes"] if fact["path"] else fact["download_bytes"]
    return "-" if not size else megabytes(size) if size < 1e9 else f"{size / 1e9:.1f} GB"


def _place(fact: dict[str, Any]) -> str:
    return "no" if not fact["path"] else "bundled" if not fact["download_bytes"] and not fact["unpinned"] else "yes"


def _memory_limit() -> int:
    """Return the bytes that the models of a pool may use together."""
    with make_pool(argparse.Namespace(threads=1, offline=True, weights="auto")) as pool:
        return pool.health().memory.limit


def _local(key: str) -> Resolved | None:
    try:
        return resolve(key, offline=True, progress=False)
    except MpoolError:
        return None


def _task(facts: dict[str, Any]) -> str | None:
    """Return the task of a model from the facts of its files; None: the files are invalid."""
    if "labels" in facts:
        return "rerank" if facts["labels"] == 1 else "classify"
    return TASKS[facts["capability"]][0] if facts else None


def _facts_of_others() -> list[dict[str, Any]]:
    """Return the facts of the downloaded models that are not in the catalogue, under the names of their pulls."""
    found: list[dict[str, Any]] = []
    for ref in downloaded.references():
        here = _local(ref)
        if here is None or here.key is not None:  # another program deleted it, or the catalogue has it now
            continue
        facts: dict[str, Any] = {}
        with contextlib.suppress(MpoolError):  # list it, so that it can be deleted; `mpool show` says what is wrong
            facts = facts_of_model(describing.describe_resolved(here))
        found.append({"key": ref, "aliases": [], "capability": facts.get("capability"), "task": _task(facts),
                      "default": False, "refs": [ref], "origin": None, "license": facts.get("license"),
                      "parameters": facts.get("parameters"), "download_bytes": None, "unpinned": True, "source": None,
                      "options": {}, "est_memory_allocation_mb": facts.get("est_memory_allocation_mb"),
                      "path": here.path, "bytes": size_of(here)})
    return found


def _count(number: int | None) -> str:
    if number is None:
        return "-"
    return f"{number / 1e9:.2f} B" if number >= 999.5e6 else f"{number / 1e6:.0f} M"  # never 1000 M
