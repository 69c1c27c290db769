"""Reading a model's files: regular files only, inside the folder that was given, never more than asked for.

A folder may hold symbolic links; they may lead anywhere inside the folder itself and, because the snapshots of the
hub's cache are made of links, from a snapshot into its own repository's ``blobs`` and the cache's shared blobs
(https://github.com/huggingface/huggingface_hub/blob/main/docs/source/en/guides/manage-cache.md). Nothing else.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..errors import FileError, FormatError, UnsafeFormat
from . import json_strict
from .fields import Fields
from .json_strict import shorten

#: Largest JSON or template file that is read into memory, in bytes.
MAX_SMALL_FILE = 64 << 20

#: Formats that run code when they are loaded.
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz")
SAFE_FORMATS = "model.safetensors (or model.safetensors.index.json with its shards) or a .gguf file"

_SNAPSHOT = re.compile(r"(?P<cache>.*)/models--[^/]+/snapshots/[0-9a-f]{40}(?:/.*)?")
_SHARED_BLOB = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}")


def check_relative(name: str, *, file: str, field: str, allow_empty: bool = False) -> str:
    """A path from a file's own text, if it is plain and relative; raises FormatError otherwise."""
    allowed = "a relative path inside the folder"
    if not isinstance(name, str) or len(name) > 1024 or any(ord(c) < 32 for c in name):
        raise FormatError(file=file, field=field, got=shorten(name), allowed=allowed)
    if not name and allow_empty:
        return name
    # a drive letter is absolute elsewhere; the same files are refused everywhere
    if not name or name.startswith("/") or "\\" in name or name[1:2] == ":" or ".." in name.split("/"):
        raise FormatError(file=file, field=field, got=shorten(repr(name)), allowed=allowed)
    return name


def file_kind(mode: int) -> str:
    """Kind of a file, in words, from its ``st_mode``."""
    for test, word in ((stat.S_ISREG, "a regular file"), (stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a FIFO"),
                       (stat.S_ISCHR, "a character device"), (stat.S_ISBLK, "a block device"),
                       (stat.S_ISSOCK, "a socket"), (stat.S_ISLNK, "a symbolic link")):
        if test(mode):
            return word
    return "a special file"


#: The identity of a file's content, taken without reading it; None: the file does not exist.
Stamp = tuple[int, ...] | None

_noted: ContextVar[dict[str, Stamp] | None] = ContextVar("mpool_noted", default=None)


def _stamp_of(found: os.stat_result) -> Stamp:
    if not stat.S_ISREG(found.st_mode):  # for a folder, its entries
        return found.st_dev, found.st_ino, found.st_mtime_ns
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_mode,
            found.st_nlink, found.st_uid, found.st_gid)


def stamp(path: str) -> Stamp:
    """The identity of a file's content, or of a folder's names, taken without reading it."""
    try:
        return _stamp_of(os.stat(path))
    except (OSError, ValueError):
        return None


def same_stamp(a: Stamp, b: Stamp) -> bool:
    """Two stamps belong to the same content. Writing changes ctime, which no program can set back; so do other
    modes, owners and links, and those are told apart from it (as ``mp_file_id_same`` of the core does)."""
    if a is None or b is None or len(a) < 9 or len(b) < 9:
        return a == b
    return a[:4] == b[:4] and (a[4] == b[4] or a[5:] != b[5:])


def changed(stamps: Mapping[str, Stamp], folders: bool = False) -> str | None:
    """The first file (or folder) that differs from its stamp; None: all are."""
    for path, was in stamps.items():
        if (folders or was is None or len(was) > 3) and not same_stamp(was, stamp(path)):
            return path
    return None


@contextmanager
def noted() -> Iterator[dict[str, Stamp]]:
    """Collects the stamps of all files and folders that this thread reads meanwhile, as they were before."""
    seen: dict[str, Stamp] = {}
    token = _noted.set(seen)
    try:
        yield seen
    finally:
        _noted.reset(token)


def note(path: str) -> None:
    """Notes a file that is about to be read by other means than :func:`open_regular`, if anybody collects."""
    seen = _noted.get()
    if seen is not None and path not in seen:
        seen[path] = stamp(path)


def open_regular(path: str) -> tuple[int, int]:
    """Opens a regular file for reading.

    Returns:
        (descriptor, size in bytes); the caller closes the descriptor.

    Raises:
        FormatError: it is a directory, a FIFO, a device or a socket (none of which is opened).
        FileError: it does not exist or cannot be read.
    """
    note(path)
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            # O_NONBLOCK: if the file became a FIFO since, opening it must not wait for a writer
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                status = os.fstat(fd)
                mode = status.st_mode
                if stat.S_ISREG(mode):
                    return fd, status.st_size
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
    except (OSError, ValueError) as error:
        raise FileError(f"{shorten(path, 400)}: {getattr(error, 'strerror', None) or error}") from error
    raise FormatError(file=path, field="file type", got=file_kind(mode), allowed="a regular file")


def read_exactly(fd: int, offset: int, size: int, *, path: str) -> bytes:
    """``size`` bytes of a file from ``offset``. Raises FileError if the file has become shorter."""
    chunks: list[bytes] = []
    while size:
        chunk = os.pread(fd, min(size, 1 << 24), offset)
        if not chunk:
            raise FileError(f"{path}: ended at byte {offset} while it was being read")
        chunks.append(chunk)
        offset += len(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def read_small(path: str, limit: int = MAX_SMALL_FILE) -> bytes:
    """A whole regular file of at most ``limit`` bytes."""
    fd, size = open_regular(path)
    try:
        if size > limit:
            raise FormatError(file=path, field="size", got=f"{size} bytes", allowed=f"at most {limit}")
        return read_exactly(fd, 0, size, path=path)
    finally:
        os.close(fd)


class Folder:
    """A folder that a model is read from, and the fence around it.

    ``sub`` gives a folder inside, behind the same fence. Paths that leave here are absolute and keep the names that
    the folder uses (a snapshot's, not a blob's), so that messages and split files stay readable.
    """

    def __init__(self, path: str, *, _fence: tuple[str, ...] | None = None) -> None:
        self.path = os.path.abspath(path)
        note(self.path)
        self.real = os.path.realpath(self.path)
        if _fence is None:
            try:
                mode = os.stat(self.path).st_mode
            except OSError as error:
                raise FileError(f"{self.path}: {error.strerror}") from error
            if not stat.S_ISDIR(mode):
                raise FormatError(file=self.path, field="file type", got=file_kind(mode), allowed="a directory")
            _fence = (self.real, *_hub_blobs(self.real))
        self._fence = _fence

    def __repr__(self) -> str:
        return f"Folder({self.path!r})"

    def inside(self, real: str) -> bool:
        """A path without links stays inside the allowed folder."""
        root, *blobs = self._fence
        if real == root or real.startswith(root.rstrip("/") + "/"):
            return True
        if blobs and real.startswith(blobs[0] + "/"):
            return True
        return len(blobs) > 1 and real.startswith(blobs[1] + "/") \
            and _SHARED_BLOB.fullmatch(real[len(blobs[1]) + 1:]) is not None

    def sub(self, name: str, *, declared_in: str, field: str) -> Folder:
        """A folder inside this one; it need not exist."""
        check_relative(name, file=declared_in, field=field, allow_empty=True)
        path = os.path.join(self.path, name) if name else self.path
        real = os.path.realpath(path)
        if not self.inside(real):
            raise FormatError(file=declared_in, field=field, got=f"{shorten(name)} (a link to {shorten(real, 200)})",
                              allowed="a path inside the folder")
        return Folder(path, _fence=self._fence)

    def path_of(self, name: str, *, declared_in: str | None = None, field: str | None = None) -> str:
        """Absolute path of a file in this folder, checked to stay behind the fence; it need not exist."""
        where, what = declared_in or self.path, field or "file name"
        check_relative(name, file=where, field=what)
        path = os.path.join(self.path, name)
        real = os.path.realpath(path)
        if not self.inside(real):
            raise FormatError(file=where, field=what, got=f"{shorten(name)} (a link to {shorten(real, 200)})",
                              allowed="a regular file inside the folder")
        return path

    def has(self, name: str) -> bool:
        """An entry of that name exists; reading it may still be refused."""
        return os.path.lexists(os.path.join(self.path, name))

    def names(self) -> list[str]:
        """Names directly inside, sorted."""
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise FileError(f"{self.path}: {error.strerror}") from error

    def read(self, name: str, limit: int = MAX_SMALL_FILE) -> bytes:
        """Contents of a file of at most ``limit`` bytes."""
        return read_small(self.path_of(name), limit)

    def text(self, name: str, limit: int = MAX_SMALL_FILE) -> str:
        """Contents of a UTF-8 text file of at most ``limit`` bytes."""
        path = self.path_of(name)
        return json_strict.decode_utf8(read_small(path, limit), file=path, field="text")

    def json(self, name: str, **limits: Any) -> json_strict.Json:
        """Contents of a JSON file, read strictly."""
        path = self.path_of(name)
        return json_strict.loads(read_small(path), file=path, **limits)

    def fields(self, name: str, *, missing_ok: bool = False, **limits: Any) -> Fields:
        """A JSON file that must hold an object; without the file an empty one if ``missing_ok``."""
        path = os.path.join(self.path, name)
        if missing_ok and not self.has(name):
            return Fields({}, file=path)
        return Fields.of(self.json(name, **limits), file=path)

    def pickles(self) -> Iterator[str]:
        """Names of files directly inside that only a loader which runs their code could read."""
        for name in self.names():
            if name.endswith(PICKLE_SUFFIXES) or name.endswith(".bin.index.json"):
                yield name


def _hub_blobs(real: str) -> list[str]:
    """Folders that a snapshot of the hub's cache may link into: its repository's blobs, and the cache's shared ones."""
    match = _SNAPSHOT.fullmatch(real)
    if match is None:
        return []
    repository = real[:real.index("/snapshots/", match.end("cache"))]
    return [os.path.join(repository, "blobs"), os.path.join(match.group("cache"), "blobs")]


def refuse_pickle(path: str, name: str | None = None) -> None:
    """Raises UnsafeFormat for a file whose format can run code."""
    raise UnsafeFormat(f"{path}: {name or os.path.basename(path)} is a format that can run code when it is loaded",
                       hint=f"Use {SAFE_FORMATS}; save_pretrained(..., safe_serialization=True) or "
                            "https://huggingface.co/spaces/safetensors/convert makes one from it")
