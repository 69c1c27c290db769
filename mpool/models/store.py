"""Download storage: a folder, locks between processes, and records of the hashed files.

Files from the hub stay in the hub's own cache; what comes out of wheels lives below :func:`cache_dir`. A file is hashed
once, when it arrives; a stamp then remembers its digest together with its size and time of change, and a later use
compares those two alone. Everything appears under its final name complete or not at all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import FileError, FormatError, IntegrityError, LimitError
from . import json_strict
from .files import open_regular, read_small

log = logging.getLogger("mpool.models")

_CHUNK = 1 << 20
#: Interval of log messages while waiting for another process's download, in seconds.
_WAIT_NOTE_SECONDS = 10.0


def cache_dir() -> str:
    """Folder for downloads: ``MPOOL_CACHE``, else the platform's place for caches. It need not exist."""
    own = os.environ.get("MPOOL_CACHE")
    if own:
        return os.path.abspath(os.path.expanduser(own))
    if sys.platform == "darwin":
        return os.path.expanduser("~/Library/Caches/mpool")
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return os.path.join(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "mpool")


def make_folder(path: str) -> str:
    """Creates a folder of the cache and returns it; the cache itself is private to the user."""
    try:
        # makedirs gives its mode to the last folder alone
        os.makedirs(cache_dir(), mode=0o700, exist_ok=True)
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}",
                        hint="Set MPOOL_CACHE to a folder that can be written") from error
    return path


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Holds the lock ``name``: one process (and thread) at a time, on this machine, freed if its holder dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(os.path.join(make_folder(os.path.join(cache_dir(), "locks")), f"{name}.lock"),
                    thread_local=False)
    while True:
        try:
            lock.acquire(timeout=_WAIT_NOTE_SECONDS)
            break
        except Timeout:
            log.info("waiting for another process that fetches %s", name)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def scratch(name: str) -> Iterator[str]:
    """A fresh folder on the cache's file system, removed at the end. What died with earlier holders of the lock
    ``name``, which the caller must hold, is removed first."""
    parent = make_folder(os.path.join(cache_dir(), "tmp"))
    for entry in os.listdir(parent):
        if entry.rpartition(".")[0] == name:
            shutil.rmtree(os.path.join(parent, entry), ignore_errors=True)
    path = tempfile.mkdtemp(prefix=f"{name}.", dir=parent)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def require_space(path: str, needed: int) -> None:
    """Raises LimitError if the disk of ``path`` has less than ``needed`` bytes free."""
    free = shutil.disk_usage(path).free
    if free < needed:
        raise LimitError(f"{path}: {needed / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free",
                         hint="Free some space, or set MPOOL_CACHE to a folder on another disk")


def sync(path: str) -> None:
    """Makes a file's or folder's contents durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: str, value: Any) -> None:
    """Writes a small JSON file atomically."""
    folder = make_folder(os.path.dirname(path))
    fd, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, sort_keys=True)
        os.replace(temporary, path)
    except BaseException:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        raise


def read_json(path: str) -> dict[str, Any] | None:
    """A small JSON file that this user (or root) wrote; None if there is none or it cannot be trusted or read."""
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
            return None
        value = json_strict.loads(read_small(path, 1 << 24), file=path)
    except (OSError, FormatError):
        return None
    return value if isinstance(value, dict) else None


def digest_of(path: str, kind: str = "sha256", progress: Callable[[int], None] | None = None) -> str:
    """Digest of a regular file, in hexadecimal.

    Args:
        path: the file.
        kind: ``sha256``, or ``git``, the object id that git (and so the hub) gives to a file outside LFS.
        progress: called with the count of bytes after each piece.
    """
    fd, size = open_regular(path)
    with os.fdopen(fd, "rb", buffering=0) as file:
        hasher = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        buffer = memoryview(bytearray(_CHUNK))
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
            if progress is not None:
                progress(count)
    return hasher.hexdigest()


def _stamp_path(path: str) -> str:
    name = hashlib.sha256(os.path.realpath(path).encode("utf-8", "surrogateescape")).hexdigest()
    return os.path.join(cache_dir(), "verified", name[:2], f"{name[2:34]}.json")


def _identity(path: str) -> dict[str, int]:
    status = os.stat(path)
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}


def stamp(path: str, kind: str, digest: str) -> None:
    """Remembers that a file has a digest. A cache that cannot be written costs only the next use a hash."""
    try:
        identity = _identity(path)
        known = read_json(_stamp_path(path)) or {}
        if any(known.get(name) != value for name, value in identity.items()):
            known = {}
        write_json(_stamp_path(path), {**known, **identity, kind: digest, "path": os.path.realpath(path),
                                       "at": int(time.time())})
    except OSError as error:
        log.debug("no stamp for %s: %s", path, error)


def check(path: str, *, size: int | None = None, kind: str = "sha256", digest: str | None = None,
          recheck: bool = False) -> str:
    """Checks a file against its record: its size always, its digest unless a stamp vouches for it.

    Args:
        path: the file.
        size, digest: what it must have; without ``digest``, the hash in its stamp.
        kind: of the digest: ``sha256`` or ``git``.
        recheck: hash it whatever the stamp says.

    Returns:
        its digest, in hexadecimal.

    Raises:
        IntegrityError: size or digest differ.
        FileError: it cannot be read.
    """
    try:
        found = _identity(path)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    if size is not None and found["size"] != size:
        raise IntegrityError(f"{path}: {found['size']} bytes, {size} expected")
    known = read_json(_stamp_path(path)) or {}
    stamped = known.get(kind)
    wanted = digest or stamped
    if not recheck and stamped is not None and stamped == wanted and all(known.get(k) == v for k, v in found.items()):
        return stamped
    actual = digest_of(path, kind)
    if wanted is not None and actual != wanted:
        raise IntegrityError(f"{path}: {kind} is {actual}, {wanted} expected")
    stamp(path, kind, actual)
    return actual
