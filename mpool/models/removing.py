"""Deletes the downloaded files of a model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import FileError, InvalidArgument, OfflineError
from . import downloaded, store
from .describing import resolve
from .sources import Resolved


@dataclass(frozen=True)
class Removed:
    """The result of :func:`remove`.

    Attributes:
        files: paths of the model's files.
        freed: freed disk space in bytes. A file that another revision in the hub's cache shares frees nothing.
    """

    files: tuple[str, ...]
    freed: int


def remove(ref: str, dry_run: bool = False) -> Removed:
    """Delete the downloaded files of a model: from the hub's cache, or from mpool's cache.

    A process that uses the model keeps it: the system frees a deleted file when the last process closes it. Files of
    the same repository that do not belong to the model, such as another quantisation, are kept.

    Args:
        ref: reference to the model, as for :func:`mpool.models.resolve`.
        dry_run: True to delete nothing.

    Raises:
        OfflineError: the model is not on this machine.
        InvalidArgument: the model was not downloaded by mpool: it is a local path, is bundled with mpool, or belongs to
            an installed package.
        FileError: a file cannot be deleted.
    """
    try:
        found = resolve(ref, offline=True, progress=False)
    except OfflineError as error:  # its hint is about a download
        raise OfflineError(error.missing, hint=f"To delete it, complete the download first: mpool pull {ref}"
                           if "incomplete" in error.missing else "`mpool list` lists the downloaded models") from error
    if found.source == "hub":
        freed = _remove_from_hub(found, dry_run)
    else:
        freed = _remove_from_cache(ref, found, dry_run)
    if not dry_run:
        downloaded.discard(found.ref)
    return Removed(found.files, freed)


def _refused(ref: str, what: str, hint: str) -> InvalidArgument:
    return InvalidArgument(f"{ref} {what}", param="model", got=repr(ref), allowed="a downloaded model", hint=hint)


def _remove_from_cache(ref: str, found: Resolved, dry_run: bool) -> int:
    """Delete the folder of a wheel's files in mpool's cache."""
    if found.source == "bundled":
        raise _refused(ref, "is bundled with mpool", "It is deleted with mpool: pip uninstall mpool")
    cache = os.path.realpath(store.cache_dir())
    inside = os.path.relpath(os.path.realpath(found.path), cache).split(os.sep)
    if found.source == "local":
        raise _refused(ref, "is a local path", "Delete the files yourself")
    if inside[0] != "pip":
        package = (found.revision or "").partition("==")[0]
        raise _refused(ref, "belongs to an installed package", f"Run: python -m pip uninstall {package}")
    target = os.path.join(cache, *inside[:3])  # see sources/pip.py, folder_of
    freed = sum(os.path.getsize(path) for path in _files_below(target))
    if not dry_run:
        try:
            shutil.rmtree(target)
            if not os.listdir(os.path.dirname(target)):
                os.rmdir(os.path.dirname(target))
        except OSError as error:
            raise FileError(f"{target}: cannot be deleted: {error.strerror}") from error
    return freed


def _files_below(folder: str) -> Iterable[str]:
    return (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)


def _remove_from_hub(found: Resolved, dry_run: bool) -> int:
    """Delete files of one snapshot in the hub's cache, and the blobs that no other snapshot uses."""
    snapshots = _snapshots_of(found)
    blobs = {path: os.path.realpath(path) for path in found.files}
    gone = set(found.files)
    others = {os.path.realpath(path) for path in _files_below(snapshots) if path not in gone}
    freed = sum(os.path.getsize(blob) for blob in set(blobs.values()) - others)
    if dry_run:
        return freed
    try:
        for path, blob in blobs.items():
            os.unlink(path)
            if blob != path and blob not in others and os.path.exists(blob):
                os.unlink(blob)
        for parent, _, _ in os.walk(snapshots, topdown=False):
            if not os.listdir(parent):
                os.rmdir(parent)
    except OSError as error:
        raise FileError(f"{error.filename}: cannot be deleted: {error.strerror}") from error
    repository = os.path.dirname(snapshots)
    if not os.path.exists(snapshots) and not os.listdir(os.path.join(repository, "blobs")):
        shutil.rmtree(repository, ignore_errors=True)  # only names of branches are left
    return freed


def _snapshots_of(found: Resolved) -> str:
    """Return the folder of the repository's snapshots: ``REPOSITORY/snapshots/COMMIT/FILE`` in the hub's cache."""
    assert found.revision is not None
    head, separator, _ = found.path.rpartition(os.sep + found.revision)
    if not separator:
        head, separator, _ = (found.path + os.sep).rpartition(os.sep + found.revision + os.sep)
    assert separator and os.path.basename(head) == "snapshots", found.path
    return head
