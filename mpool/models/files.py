"""Reading of model files: regular files only, inside the model's folder, and up to a size limit.

A symbolic link may lead to any place inside the folder, to the folders that ``MPOOL_MODEL_FOLDERS`` and
``PoolConfig.model_folders`` name, and to the files of repositories in the hub's cache. The snapshots of that cache
consist of links, each to the ``blobs`` of its own repository or to the cache's shared blobs
(https://github.com/huggingface/huggingface_hub/blob/main/docs/source/en/guides/manage-cache.md): a link from a snapshot
to another repository is refused. Links to any other place are refused.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NoReturn

from ..errors import FileError, FormatError, IntegrityError, MpoolError, UnsafeFormat
from . import json_strict
from .fields import Fields
from .json_strict import shorten

#: Largest JSON or template file that is read into memory, in bytes.
MAX_SMALL_FILE = 64 << 20

#: Most values in a JSON file. Classifiers with 30,000 labels have 60,000 values.
MAX_JSON_VALUES = 200_000
#: Most values in files with up to 65,000 added tokens, and in those with the tensors of all shards (Kimi K2: 208,000).
MAX_LONG_JSON_VALUES = 600_000
_LONG = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

#: Formats that run code when they are loaded.
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz")
#: Weights of other engines: suffixes of files, and folders in which repositories keep them.
_UNREAD_SUFFIXES = (".onnx", ".tflite", ".h5", ".msgpack", ".mlmodel", ".mlpackage")
_UNREAD_FOLDERS = ("onnx", "openvino", "coreml")
SAFE_FORMATS = "model.safetensors (or model.safetensors.index.json with its shards) or a .gguf file"

#: Folder of a snapshot. A copy of the cache may have names of its own instead of commits.
_SNAPSHOT = re.compile(r"(?P<cache>.*)/models--[^/]+/snapshots/[^/]+(?:/.*)?")
#: File of a repository, relative to the hub's cache.
_IN_CACHE = re.compile(r"models--[^/]+/(?:blobs|snapshots)/.+")
#: Hint of errors about links.
_LINKS = "Links may lead into the folder itself, the hub's cache, and the folders that MPOOL_MODEL_FOLDERS or " \
         "PoolConfig(model_folders=[...]) name"
_SHARED_BLOB = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}")


@contextmanager
def model_folders(folders: Iterable[str | os.PathLike[str]]) -> Iterator[None]:
    """Allow links to these folders while this thread reads files in the block."""
    token = _model_folders.set(tuple(os.fspath(one) for one in folders))
    try:
        yield
    finally:
        _model_folders.reset(token)


def hub_cache() -> str:
    """Return the folder of the hub's cache, computed as ``huggingface_hub`` does."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return os.path.expandvars(os.path.expanduser(cache))


def _is_below(real: str, folder: str) -> bool:
    """Return True if a path without symbolic links is a folder or inside it."""
    return real == folder or real.startswith(folder.rstrip("/") + "/")


def _may_link_to(real: str) -> bool:
    """Return True for a real path in a folder that a setting names, and for that of a file of the hub's cache."""
    named = (*_model_folders.get(), *filter(None, os.environ.get("MPOOL_MODEL_FOLDERS", "").split(os.pathsep)))
    if any(_is_below(real, os.path.realpath(os.path.expanduser(folder))) for folder in named):
        return True
    cache = os.path.realpath(hub_cache())
    inside = os.path.relpath(real, cache) if _is_below(real, cache) else ""
    return _IN_CACHE.fullmatch(inside) is not None or inside.startswith("blobs/") \
        and _SHARED_BLOB.fullmatch(inside[len("blobs/"):]) is not None


def check_relative(name: str, *, file: str, field: str, allow_empty: bool = False) -> str:
    """Check a path that a file contains, and return it. Raises FormatError unless it is relative and without ``..``.

    Args:
        name: path to check.
        file: file that contains the path, for errors.
        field: field of that file, for errors.
        allow_empty: True if the path may be empty.
    """
    allowed = "a relative path inside the folder"
    if not isinstance(name, str) or len(name) > 1024 or any(ord(c) < 32 for c in name):
        raise FormatError(file=file, field=field, got=shorten(name), allowed=allowed)
    if not name and allow_empty:
        return name
    # drive letters and backslashes are refused on every platform, so that a model loads on all of them or on none
    if not name or name.startswith("/") or "\\" in name or name[1:2] == ":" or ".." in name.split("/"):
        raise FormatError(file=file, field=field, got=shorten(repr(name)), allowed=allowed)
    return name


def file_kind(mode: int) -> str:
    """Return the type of a file in words, from its ``st_mode``."""
    for test, word in ((stat.S_ISREG, "a regular file"), (stat.S_ISDIR, "a directory"), (stat.S_ISFIFO, "a FIFO"),
                       (stat.S_ISCHR, "a character device"), (stat.S_ISBLK, "a block device"),
                       (stat.S_ISSOCK, "a socket"), (stat.S_ISLNK, "a symbolic link")):
        if test(mode):
            return word
    return "a special file"


#: Identity of a file's content, from its metadata; None: the file does not exist. A folder's has three numbers. That
#: of a pointer has one (:func:`note_pointer`).
Stamp = tuple[int, ...] | None
#: Numbers in the stamp of a file.
_FILE = 4

#: Folders that ``PoolConfig.model_folders`` of the pool names whose model is read.
_model_folders: ContextVar[tuple[str, ...]] = ContextVar("mpool_model_folders", default=())
_stamps: ContextVar[dict[str, Stamp] | None] = ContextVar("mpool_stamps", default=None)
#: Files that :meth:`Folder.path_of` has checked, each with the folder whose roots it may not leave.
_checked: ContextVar[dict[str, Folder] | None] = ContextVar("mpool_checked", default=None)
#: Stamps of files that were read before.
_expected: ContextVar[Mapping[str, Stamp] | None] = ContextVar("mpool_expected", default=None)


def _stamp_of(found: os.stat_result) -> Stamp:
    if not stat.S_ISREG(found.st_mode):  # a folder: its mtime changes when entries are added or removed
        return found.st_dev, found.st_ino, found.st_mtime_ns
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def stamp(path: str) -> Stamp:
    """Return the identity of a file's content or of a folder's entries, from its metadata; None if it is missing.

    Mode, owner, links and change time do not count, as in ``mp_file_id_same`` of the C core: they change without the
    content. A file that was rewritten with the same size, and whose modification time was set back, seems unchanged.

    Raises:
        FileError: the system cannot read the metadata.
    """
    try:
        return _stamp_of(os.stat(path))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise unreadable(path, error) from error


def _pointer(path: str) -> Stamp:
    try:
        with open(path, "rb") as stream:
            return (int.from_bytes(stream.read(MAX_SMALL_FILE), "big"),)
    except OSError:
        return None


def changed(stamps: Mapping[str, Stamp], folders: bool = False) -> str | None:
    """Return the first file that differs from its stamp, or None.

    Args:
        stamps: stamps by path.
        folders: True to compare folders and pointers too.
    """
    from .. import _core

    current = _core.are_current(stamps)  # one call for all files and folders: each lookup of a name asks
    for path, was in stamps.items():
        if was is None or len(was) == _FILE:
            if not current and stamp(path) != was:
                return path
        elif folders and (len(was) == 1 or not current):
            if (_pointer(path) if len(was) == 1 else stamp(path)) != was:
                return path
    return None


def of_files(stamps: Mapping[str, Stamp]) -> dict[str, Stamp]:
    """Return the stamps without those of folders and pointers. Reading equal files gives an equal description."""
    return {path: was for path, was in stamps.items() if was is None or len(was) == _FILE}


@contextmanager
def collect_stamps() -> Iterator[dict[str, Stamp]]:
    """Collect the stamps of all files and folders that this thread reads in the block, each taken before the read."""
    stamps: dict[str, Stamp] = {}
    token = _stamps.set(stamps)
    try:
        yield stamps
    finally:
        _stamps.reset(token)


@contextmanager
def check_links() -> Iterator[None]:
    """Check each file of a folder again once this thread has opened it in the block: a link may have been switched
    since :meth:`Folder.path_of` checked the path."""
    token = _checked.set({} if _checked.get() is None else _checked.get())
    try:
        yield
    finally:
        _checked.reset(token)


@contextmanager
def expect(stamps: Mapping[str, Stamp]) -> Iterator[None]:
    """Refuse files that this thread opens in the block and that have other stamps than these."""
    token = _expected.set(stamps)
    try:
        yield
    finally:
        _expected.reset(token)


def check_open(fd: int, path: str) -> None:
    """Check an open file of a folder: it must be inside the folder's roots, and the file that the path named before.

    Raises:
        IntegrityError: it is another file than before.
        FileError: it is outside.
    """
    expected, folder = (_expected.get() or {}).get(path), (_checked.get() or {}).get(path)
    if expected is not None and _stamp_of(os.fstat(fd)) != expected:
        raise rewritten(path)
    if folder is not None and not folder.holds(fd, path):
        raise replaced(path)


def check_stamps(stamps: Mapping[str, Stamp]) -> None:
    """Check that the stamps of the files of folders are those of files inside the folders' roots.

    Whatever the paths name later: a file with such a stamp is one that a link may lead to.

    Raises:
        IntegrityError, FileError: a path named another file when its stamp was taken.
    """
    for path in _checked.get() or {}:
        was = stamps.get(path)
        if was is not None and len(was) == _FILE:
            with expect(stamps):
                close(open_regular(path)[0])


def rewritten(path: str) -> IntegrityError:
    """Return the error for a file that another program changed meanwhile."""
    return IntegrityError(f"{path}: the file changed while the model's files were read",
                          hint="Try again when no other program writes to the file")


def replaced(path: str) -> FileError:
    """Return the error for a link that another program switched meanwhile."""
    return FileError(f"{shorten(path, 400)}: the file was replaced while it was read",
                     hint="Try again when no other program writes to the folder")


def check_siblings(path: str, parts: Iterable[str]) -> None:
    """Check the files beside a file of a folder that the file itself names: as :meth:`Folder.path_of` does."""
    folder = (_checked.get() or {}).get(path)
    for part in parts:
        if folder is not None and part != path:
            Folder(os.path.dirname(part), _allowed=folder._allowed).path_of(os.path.basename(part))


def check_read(path: str, read: Stamp) -> None:
    """Check that the stamp of the file that was read is that of the path, as :func:`note` recorded it.

    Raises:
        IntegrityError: the path named another file when it was opened.
    """
    stamps = _stamps.get()
    if stamps is not None and stamps.get(path) not in (None, read):
        raise rewritten(path)


def note(path: str) -> None:
    """Record the stamp of a file in the enclosing :func:`collect_stamps` block, if any.

    Call this before reading a file by other means than :func:`open_regular`.
    """
    stamps = _stamps.get()
    if stamps is not None and path not in stamps:
        stamps[path] = stamp(path)


def note_pointer(path: str) -> None:
    """Record the content of a small file that only names the files of a model: other programs may rewrite it without a
    change. As for :func:`note`."""
    stamps = _stamps.get()
    found = _pointer(path)
    if stamps is not None and found is not None:
        stamps[path] = found


def unreadable(path: str, error: Exception) -> FileError:
    """Return the error for a file that the operating system does not read; ``error`` is the system's."""
    return FileError(f"{shorten(path, 400)}: {getattr(error, 'strerror', None) or error}")


def close(fd: int) -> None:
    """Close a file that was only read. Ignores errors of the system: they do not affect the data that was read."""
    with suppress(OSError):
        os.close(fd)


def _path_of_open(fd: int) -> str | None:
    """Return the path of an open file, without symbolic links; None where the system does not say."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
    except OSError:
        return None


def open_regular(path: str) -> tuple[int, int]:
    """Open a regular file for reading.

    Returns:
        file descriptor, which the caller closes with :func:`close`, and size in bytes.

    Raises:
        IntegrityError: see :func:`check_open`.
        FormatError: the path is a directory, a FIFO, a device or a socket; none of these is opened.
        FileError: the file does not exist or cannot be read.
    """
    note(path)
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            # O_NONBLOCK: if the file was replaced by a FIFO after the stat, open() must not wait for a writer
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                status = os.fstat(fd)
                mode = status.st_mode
                if stat.S_ISREG(mode):
                    check_open(fd, path)
                    return fd, status.st_size
            except BaseException:
                close(fd)
                raise
            close(fd)
    except MpoolError:
        raise
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    raise FormatError(file=path, field="file type", got=file_kind(mode), allowed="a regular file")


def read_exactly(fd: int, offset: int, size: int, *, path: str) -> bytes:
    """Read ``size`` bytes of a file from ``offset``. Raises FileError if the file ends earlier or cannot be read."""
    chunks: list[bytes] = []
    while size:
        try:
            chunk = os.pread(fd, min(size, 1 << 24), offset)
        except OSError as error:
            raise unreadable(path, error) from error
        if not chunk:
            raise FileError(f"{path}: the file ended at byte {offset} while it was read",
                            hint="Try again when no other program writes to the file")
        chunks.append(chunk)
        offset += len(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def read_small(path: str, limit: int = MAX_SMALL_FILE) -> bytes:
    """Read a whole regular file. Raises FormatError if it has more than ``limit`` bytes."""
    fd, size = open_regular(path)
    try:
        return _content(fd, size, path, limit)
    finally:
        close(fd)


def _content(fd: int, size: int, path: str, limit: int) -> bytes:
    if size > limit:
        raise FormatError(file=path, field="size", got=f"{size} bytes", allowed=f"at most {limit} bytes")
    return read_exactly(fd, 0, size, path=path)


def _most_values(name: str) -> int:
    """Return the most values that a JSON file may have."""
    if os.path.basename(name) == "tokenizer.json":
        return json_strict.MAX_VALUES
    is_long = os.path.basename(name) in _LONG or name.endswith(".index.json")
    return MAX_LONG_JSON_VALUES if is_long else MAX_JSON_VALUES


class Folder:
    """A folder that a model is read from. Paths that lead outside its allowed roots are refused.

    ``sub`` returns a folder inside it, with the same allowed roots. Returned paths are absolute and not resolved: they
    keep the file names of a snapshot (not those of the blobs), which messages and split GGUF files need.
    """

    def __init__(self, path: str, *, _allowed: tuple[str, ...] | None = None) -> None:
        self.path = os.path.abspath(path)
        note(self.path)
        self.real = os.path.realpath(self.path)
        if _allowed is None:
            try:
                mode = os.stat(self.path).st_mode
            except OSError as error:
                raise FileError(f"{self.path}: {error.strerror}") from error
            if not stat.S_ISDIR(mode):
                raise FormatError(file=self.path, field="file type", got=file_kind(mode), allowed="a directory")
            _allowed = (self.real, *_hub_blobs(self.real))
        self._allowed = _allowed

    def __repr__(self) -> str:
        return f"Folder({self.path!r})"

    def shown(self, name: str) -> str:
        """Return the path of a file in this folder, as errors show it. It need not exist."""
        return os.path.join(self.path, name)

    def inside(self, real: str) -> bool:
        """Return True if a path without symbolic links is inside an allowed root."""
        root, *blobs = self._allowed
        if _is_below(real, root):
            return True
        if not blobs:
            return _may_link_to(real)
        return real.startswith(blobs[0] + "/") or real.startswith(blobs[1] + "/") \
            and _SHARED_BLOB.fullmatch(real[len(blobs[1]) + 1:]) is not None

    def sub(self, name: str, *, declared_in: str, field: str) -> Folder:
        """Return a folder inside this one. It need not exist.

        Args:
            name: relative path; empty for this folder.
            declared_in: file that names the folder, for errors.
            field: field of that file, for errors.

        Raises:
            FormatError: the path leads outside the folder.
        """
        check_relative(name, file=declared_in, field=field, allow_empty=True)
        path = os.path.join(self.path, name) if name else self.path
        real = os.path.realpath(path)
        if not self.inside(real):
            raise FormatError(file=declared_in, field=field, got=f"{shorten(name)} (a link to {shorten(real, 200)})",
                              allowed="a path inside the folder", hint=_LINKS)
        return Folder(path, _allowed=self._allowed)

    def path_of(self, name: str, *, declared_in: str | None = None, field: str | None = None) -> str:
        """Return the absolute path of a file in this folder. It need not exist.

        Args:
            name: relative path.
            declared_in: file that names the path, for errors.
            field: field of that file, for errors.

        Raises:
            FormatError: the path leads outside the folder.
        """
        file, field = declared_in or self.path, field or "file name"
        check_relative(name, file=file, field=field)
        path = os.path.join(self.path, name)
        real = os.path.realpath(path)
        if not self.inside(real):
            raise FormatError(file=file, field=field, got=f"{shorten(name)} (a link to {shorten(real, 200)})",
                              allowed="a regular file inside the folder", hint=_LINKS)
        checked = _checked.get()
        if checked is not None:
            checked[path] = self
        return path

    def holds(self, fd: int, path: str) -> bool:
        """Return True if the open file ``fd``, which ``path`` named, is inside an allowed root."""
        real = _path_of_open(fd)
        if real is not None:
            return self.inside(real)
        real = os.path.realpath(path)  # a system without /proc: a race of two switches stays
        with suppress(OSError):
            return self.inside(real) and os.path.samestat(os.fstat(fd), os.stat(real))
        return False

    def has(self, name: str) -> bool:
        """Return True if an entry of this name exists. Reading it may still be refused."""
        return os.path.lexists(os.path.join(self.path, name))

    def names(self) -> list[str]:
        """Return the sorted names of the entries; an empty list if the folder does not exist."""
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise FileError(f"{self.path}: {error.strerror}") from error

    def read(self, name: str, limit: int = MAX_SMALL_FILE) -> bytes:
        """Read a file. Raises FormatError if it has more than ``limit`` bytes."""
        path = self.path_of(name)
        fd, size = open_regular(path)
        try:
            if not self.holds(fd, path):  # a link may have changed since it was checked
                raise replaced(path)
            return _content(fd, size, path, limit)
        finally:
            close(fd)

    def text(self, name: str, limit: int = MAX_SMALL_FILE) -> str:
        """Read a UTF-8 text file. Raises FormatError if it has more than ``limit`` bytes."""
        return json_strict.decode_utf8(self.read(name, limit), file=os.path.join(self.path, name), field="text")

    def json(self, name: str, **limits: Any) -> json_strict.Json:
        """Read a JSON file strictly (:func:`mpool.models.json_strict.loads`), up to a number of values."""
        return json_strict.loads(self.read(name), file=os.path.join(self.path, name),
                                 **{"max_values": _most_values(name),
                                    "infinite": os.path.basename(name) == "config.json", **limits})

    def fields(self, name: str, *, missing_ok: bool = False, **limits: Any) -> Fields:
        """Read a JSON file that must hold an object. If ``missing_ok``, a missing file counts as an empty object."""
        path = os.path.join(self.path, name)
        if missing_ok and not self.has(name):
            return Fields({}, file=path)
        return Fields.of(self.json(name, **limits), file=path)

    def pickles(self) -> Iterator[str]:
        """Yield the names of entries in pickle formats, whose loaders run code from the file."""
        for name in self.names():
            if name.endswith(PICKLE_SUFFIXES) or name.endswith(".bin.index.json"):
                yield name


class Overlay(Folder):
    """A folder with JSON files that replace those on the disk, or are not on the disk.

    Args:
        folder: the folder.
        values: values of the files by relative path.
        source: path that errors about these files name; None: the path that each would have.
    """

    def __init__(self, folder: Folder, values: Mapping[str, json_strict.Json], source: str | None = None) -> None:
        super().__init__(folder.path, _allowed=folder._allowed)
        self._values, self._source = values, source

    def shown(self, name: str) -> str:
        return self._source if self._source is not None and name in self._values else super().shown(name)

    def sub(self, name: str, *, declared_in: str, field: str) -> Folder:
        found = super().sub(name, declared_in=declared_in, field=field)
        inside = name.rstrip("/") + "/" if name else ""
        values = {path[len(inside):]: value for path, value in self._values.items() if path.startswith(inside)}
        return Overlay(found, values, self._source) if values else found

    def has(self, name: str) -> bool:
        return name in self._values or super().has(name)

    def json(self, name: str, **limits: Any) -> json_strict.Json:
        return self._values[name] if name in self._values else super().json(name, **limits)


def _hub_blobs(real: str) -> list[str]:
    """Return the folders that a snapshot of the hub's cache may link to: the blobs of its repository, and the cache's
    shared blobs. The list is empty for any other folder."""
    match = _SNAPSHOT.fullmatch(real)
    if match is None:
        return []
    repository = real[:real.index("/snapshots/", match.end("cache"))]
    return [os.path.join(repository, "blobs"), os.path.join(match.group("cache"), "blobs")]


def refuse_pickle(path: str, name: str | None = None) -> None:
    """Raise UnsafeFormat for a file whose format can run code."""
    name = name or os.path.basename(path)
    raise UnsafeFormat(f"{path}: {name} is in a format that can run code when it is loaded",
                       hint=f"Use {SAFE_FORMATS}. {conversion_hint(adapter=name.startswith('adapter_model'))}")


def unread_hint(names: Iterable[str]) -> str | None:
    """Return what to use instead of weights for another engine (ONNX, OpenVINO, ...); None: the names include none."""
    for name in names:
        if name.partition("/")[0] in _UNREAD_FOLDERS or name.endswith(_UNREAD_SUFFIXES):
            return f"mpool does not read {shorten(name)}. Use {SAFE_FORMATS}"
    return None


def missing_model_hint(names: Iterable[str]) -> str:
    """Return what to use in place of a folder or repository with these entries, which holds no model."""
    return unread_hint(names) or f"mpool needs config.json with {SAFE_FORMATS}"


def refuse_missing_weights(folder: Folder, allowed: str, *, field: str = "weights",
                           hint: str | None = None) -> NoReturn:
    """Raise UnsafeFormat if the folder has pickled weights, else FormatError for weights that are missing.

    Args:
        folder: the folder, which has none of the ``allowed`` files.
        allowed: names of the files that mpool reads.
        field: what is missing, for the error.
        hint: what to do if the folder has no weights in another format either.
    """
    for name in folder.pickles():
        refuse_pickle(folder.path, name)
    hint = unread_hint(folder.names()) or hint
    raise FormatError(file=folder.path, field=field, got="missing", allowed=allowed, hint=hint)


#: Converts all pickled weights of the present folder. ``weights_only`` makes torch refuse code. The tensors are cloned
#: because safetensors refuses tensors that share memory.
_CONVERT = ("python -c \"import glob, torch, safetensors.torch as s; w = {{}}; [w.update(torch.load(f, 'cpu', "
            "weights_only=True)) for f in sorted(glob.glob('{pickles}')) or exit('no {pickles}')]; s.save_file({{k: "
            "v.contiguous().clone() for k, v in w.items()}}, '{target}', {{'format': 'pt'}})\"")


def conversion_hint(repository: str | None = None, adapter: bool = False, file: str | None = None) -> str:
    """Return how to convert pickled weights: one command, to run in the folder (of a repository: after a download).

    Args:
        repository: the weights are in this repository, ``org/name`` or ``org/name@revision``; None: in a local folder.
        adapter: True for the weights of an adapter.
        file: path of the pickled file in the repository; None: every ``pytorch_model*.bin`` in the folder.
    """
    inside, _, pickles = (file or "").rpartition("/")
    command = _CONVERT.format(pickles=pickles or ("adapter_model.bin" if adapter else "pytorch_model*.bin"),
                              target="adapter_model.safetensors" if adapter else "model.safetensors")
    what = "adapter" if adapter else "model"
    where = f"in the {what}'s folder" if repository is None \
        else f"in {f'{inside} of ' if inside else ''}the folder that `hf download " \
             f"{repository.replace('@', ' --revision ')} --local-dir .` filled"
    return f"To convert the {what}, run this {where}, where torch and safetensors are installed: {command}"
