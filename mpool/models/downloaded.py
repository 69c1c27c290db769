"""The list of downloaded models that are not in the catalogue, in mpool's cache folder, for ``mpool list``.

An entry stays when other programs delete the files, so a reader must check that the model is still on this machine.
"""

from __future__ import annotations

import hashlib
import os

from ..errors import FileError
from ..records import logger
from . import store

log = logger("mpool.models")


def _path_of(ref: str) -> str:
    name = hashlib.sha256(ref.encode()).hexdigest()[:32]
    return os.path.join(store.cache_dir(), "downloaded", f"{name}.json")


def add(ref: str) -> None:
    """Add a model. If the cache is not writable, the model is not listed.

    Args:
        ref: reference to the model in canonical form.
    """
    path = _path_of(ref)
    if os.path.exists(path):
        return
    try:
        store.write_json(path, {"ref": ref})
    except (OSError, FileError) as error:
        log.debug("cannot add %s to the list of downloaded models: %s", ref, error)


def discard(ref: str) -> None:
    """Remove a model from the list, if it is there."""
    try:
        os.unlink(_path_of(ref))
    except OSError as error:
        log.debug("cannot remove %s from the list of downloaded models: %s", ref, error)


def references() -> list[str]:
    """Return the references of all models of the list, in alphabetical order."""
    folder = os.path.join(store.cache_dir(), "downloaded")
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    found = {(store.read_json(os.path.join(folder, name)) or {}).get("ref") for name in names if name.endswith(".json")}
    return sorted(ref for ref in found if isinstance(ref, str))


__all__ = ["add", "discard", "references"]
