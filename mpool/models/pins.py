"""Pins: the commit and hashes of the first download of an unpinned row of the catalogue (trust on first use).

A pin is a file in mpool's cache. Later downloads of the row use the recorded commit and must have the recorded hashes.
``mpool pull --update NAME`` replaces the pin by the present commit of the hub.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..records import logger
from . import store
from .catalogue import Row
from .references import HubRef
from .sources import FileFact, Resolved

log = logger("mpool.models")
_SHA256, _COMMIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Pin:
    """The record of a row's first download.

    Attributes:
        commit: commit of the repository.
        files: size and SHA-256 of each file, by path in the repository.
    """

    commit: str
    files: Mapping[str, FileFact]


def path_of(row: Row) -> str:
    """Return the path of the pin of a row. It need not exist."""
    return os.path.join(store.cache_dir(), "pins", re.sub(r"[^A-Za-z0-9._-]", "-", row.key) + ".json")


def read(row: Row, reference: HubRef) -> Pin | None:
    """Return the pin of a row; None if there is none, if it is malformed, or if it was made for another reference."""
    found = store.read_json(path_of(row)) or {}
    commit, files = found.get("commit"), found.get("files")
    if found.get("ref") != str(reference) or not isinstance(files, dict) or not files \
            or not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        return None
    facts = {}
    for name, entry in files.items():
        size, sha256 = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if not isinstance(size, int) or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            return None
        facts[str(name)] = FileFact(size, sha256)
    if reference.projector is not None and reference.projector not in facts:  # an older pin, of the text part only
        return None
    return Pin(commit, facts)


def record(row: Row, reference: HubRef, found: Resolved) -> None:
    """Record the commit and hashes of downloaded files. If the cache is not writable, nothing is recorded.

    Args:
        row: the row.
        reference: reference of the row that was downloaded.
        found: downloaded files, in the folder of their commit in the hub's cache.
    """
    folder = found.files[0].partition(f"{os.sep}{found.revision}{os.sep}")[0] + f"{os.sep}{found.revision}"
    files = {os.path.relpath(path, folder): {"size": os.stat(path).st_size, "sha256": store.check(path)}
             for path in found.files}
    try:
        store.write_json(path_of(row), {"ref": str(reference), "commit": found.revision, "files": files})
    except OSError as error:
        log.debug("cannot write the pin of %s: %s", row.key, error)
        return
    log.info("%s: later downloads must be commit %s of %s, the first that was downloaded", row.key, found.revision,
             reference)
