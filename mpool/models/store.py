"""Storage of downloads: mpool's cache folder, locks between processes, and stamps of verified files.

Files from the hub stay in the hub's own cache; files from wheels are stored below :func:`cache_dir`. A file is hashed
once, after its download. A stamp then records its digest, size, modification time and inode; later uses compare only
the metadata with the stamp. Files are renamed to their final names when they are complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import FileError, FormatError, IntegrityError, LimitError
from ..records import logger
from . import json_strict
from .files import open_regular, read_small

log = logger("mpool.models")

_CHUNK = 1 << 20
#: Interval in seconds between log messages while a thread waits for a lock.
_WAIT_LOG_SECONDS = 10.0


def cache_dir() -> str:
    """Return the cache folder: ``MPOOL_CACHE``, or the platform's default. It need not exist."""
    own = os.environ.get("MPOOL_CACHE")
    if own:
        return os.path.abspath(os.path.expanduser(own))
    if sys.platform == "darwin":
        return os.path.expanduser("~/Library/Caches/mpool")
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return os.path.join(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "mpool")


def make_folder(path: str) -> str:
    """Create a folder below the cache folder, which only the user may read, and return its path.

    Raises:
        FileError: the folder cannot be created.
    """
    try:
        # makedirs applies the mode only to the last folder
        os.makedirs(cache_dir(), mode=0o700, exist_ok=True)
        os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError as error:
        raise FileError(f"{path}: the cache folder cannot be created: {error.strerror}",
                        hint="Set MPOOL_CACHE to a folder with write permission") from error
    return path


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock ``name``, which excludes all other threads and processes of this machine.

    The lock is released if the process dies.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(os.path.join(make_folder(os.path.join(cache_dir(), "locks")), f"{name}.lock"),
                    thread_local=False)
    while True:
        try:
            lock.acquire(timeout=_WAIT_LOG_SECONDS)
            break
        except Timeout:
            log.info("waiting for another process or thread that downloads %s", name)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def scratch(name: str) -> Iterator[str]:
    """Create a temporary folder on the cache's file system, and remove it at the end of the block.

    The caller must hold the lock ``name``. Folders of earlier holders that were killed are removed first.
    """
    import shutil
    import tempfile

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
    """Raise LimitError if the disk of ``path`` has fewer than ``needed`` bytes of free space."""
    import shutil

    free = shutil.disk_usage(path).free
    if free < needed:
        raise LimitError(f"{path}: the disk has {free / 1e6:.0f} MB of free space, {needed / 1e6:.0f} MB are needed",
                         hint="Free some space, or set MPOOL_CACHE to a folder on another disk")


def sync(path: str) -> None:
    """Flush a file or folder to the disk (fsync)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: str, value: Any) -> None:
    """Write a small JSON file atomically."""
    import tempfile

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
    """Read a small JSON file. Return None if it is missing or malformed, or belongs to neither this user nor root."""
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0):
            return None
        value = json_strict.loads(read_small(path, 1 << 24), file=path)
    except (OSError, FormatError):
        return None
    return value if isinstance(value, dict) else None


def digest_of(path: str, kind: str = "sha256", progress: Callable[[int], None] | None = None) -> str:
    """Hash a regular file, and return the digest in hexadecimal.

    Args:
        path: path of the file.
        kind: ``sha256``, or ``git`` for git's object id, which the hub states for files outside LFS.
        progress: function that is called with the number of bytes of each chunk.
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
    """Record the digest of a file. If the cache is not writable, nothing is recorded and the next use hashes again."""
    try:
        identity = _identity(path)
        known = read_json(_stamp_path(path)) or {}
        if any(known.get(name) != value for name, value in identity.items()):
            known = {}
        write_json(_stamp_path(path), {**known, **identity, kind: digest, "path": os.path.realpath(path),
                                       "at": int(time.time())})
    except OSError as error:
        log.debug("cannot write the stamp of %s: %s", path, error)


def check(path: str, *, size: int | None = None, kind: str = "sha256", digest: str | None = None,
          recheck: bool = False) -> str:
    """Verify the size and digest of a file. The file is hashed unless its stamp is valid and has the expected digest.

    Args:
        path: path of the file.
        size: expected size in bytes, or None.
        kind: type of the digest, ``sha256`` or ``git``.
        digest: expected digest; None: the digest in the stamp, if there is one.
        recheck: True to hash the file even if the stamp is valid.

    Returns:
        digest in hexadecimal.

    Raises:
        IntegrityError: the size or the digest differs.
        FileError: the file cannot be read.
    """
    try:
        found = _identity(path)
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    if size is not None and found["size"] != size:
        raise IntegrityError(f"{path}: the size is {found['size']} bytes, expected {size}")
    known = read_json(_stamp_path(path)) or {}
    stamped = known.get(kind)
    wanted = digest or stamped
    if not recheck and stamped is not None and stamped == wanted and all(known.get(k) == v for k, v in found.items()):
        return stamped
    actual = digest_of(path, kind)
    if wanted is not None and actual != wanted:
        raise IntegrityError(f"{path}: the {kind} digest is {actual}, expected {wanted}")
    stamp(path, kind, actual)
    return actual
