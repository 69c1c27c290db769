"""Models in local files and folders."""

from __future__ import annotations

import os
import re
import stat

from ...errors import FileError, FormatError, InvalidArgument
from ..files import (
    PICKLE_SUFFIXES,
    Folder,
    close,
    file_kind,
    missing_model_hint,
    open_regular,
    read_exactly,
    refuse_pickle,
    unread_hint,
)
from ..json_strict import shorten
from ..layout import gguf_models
from ..references import LocalRef
from . import Resolved


def first_bytes(path: str, count: int = 8) -> bytes:
    """Return the first ``count`` bytes of a regular file, or all if it is shorter."""
    fd, size = open_regular(path)
    try:
        return read_exactly(fd, 0, min(count, size), path=path)
    finally:
        close(fd)


def kind_of_file(path: str) -> str:
    """Return ``"gguf"`` if a file is a GGUF file. Its first bytes decide, not its name.

    Raises:
        UnsafeFormat: the file is in a format that can run code.
        InvalidArgument: the file is one file of a model that consists of a folder.
        FormatError: the file has an unknown format.
    """
    start = first_bytes(path)
    if start[:4] == b"GGUF":
        return "gguf"
    name = os.path.basename(path)
    if name.endswith((".safetensors", ".json")):
        raise InvalidArgument(f"{path} is a single file of a model that consists of a folder", param="model", got=path,
                              allowed="the path of the folder", hint=f"Pass the folder: {os.path.dirname(path)}")
    # torch.save writes zip archives, or pickles, which begin with 0x80
    if name.endswith(PICKLE_SUFFIXES) or start[:4] == b"PK\x03\x04" or start[:1] == b"\x80":
        refuse_pickle(path, name)
    raise FormatError(f"{path}: unknown file format: the magic number is {start[:4].hex() or 'missing'}, expected "
                      "47475546 (GGUF)", file=path, offset=0, field="magic", got=start[:4].hex() or "nothing",
                      allowed="47475546 (GGUF)",
                      hint=unread_hint([name]) or "Pass a .gguf file, or a folder with config.json")


def _hint_without_model(folder: Folder) -> str:
    """Return what to pass in place of a folder without a model."""
    names = folder.names()
    cached = re.fullmatch("models--(.+?)--(.+)", os.path.basename(folder.path))
    if cached and "snapshots" in names:
        return f"This folder is a part of the hub's cache: pass {cached[1]}/{cached[2]}"
    inside = [name for name in names if os.path.isfile(os.path.join(folder.path, name, "config.json"))]
    if inside:
        return f"These folders inside have config.json, pass one of them: {', '.join(map(shorten, inside[:8]))}"
    return missing_model_hint(names)


def resolve(ref: LocalRef) -> Resolved:
    """Resolve a local file or folder. A folder stands for its only GGUF model, unless it has a ``config.json``,
    ``modules.json`` or ``model_index.json``.

    Raises:
        FileError: the path does not exist or cannot be read.
        FormatError: the path is a FIFO, device or socket, or a folder that holds no model.
        InvalidArgument: the folder holds several GGUF models, or the path is a single file of a model folder.
        UnsafeFormat: the model exists only in a pickle format.
    """
    path = os.path.abspath(ref.path)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise FileError(f"{path}: no such file or folder, and the hub was not asked: the reference is a path",
                        hint="To load a model of the catalogue, pass its key (run `mpool models` to list all); for the "
                             "hub, pass org/name") from None
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if stat.S_ISREG(mode):
        return Resolved(ref=path, kind=kind_of_file(path), path=path, source="local")
    if not stat.S_ISDIR(mode):
        raise FormatError(file=path, field="file type", got=file_kind(mode), allowed="a regular file or a directory")
    folder = Folder(path)
    if folder.has("config.json") or folder.has("modules.json") or folder.has("model_index.json"):
        return Resolved(ref=path, kind="folder", path=path, source="local")
    models = gguf_models(folder.names())
    if len(models) == 1:
        return Resolved(ref=path, kind="gguf", path=folder.path_of(models[0]), source="local")
    if models:
        raise InvalidArgument(f"{path} holds {len(models)} GGUF models: {', '.join(models[:8])}", param="model",
                              got=path, allowed="a folder with one GGUF model",
                              hint="Pass the path of one of these files")
    for name in folder.pickles():
        refuse_pickle(path, name)
    raise FormatError(f"{path}: the folder holds no model: it has neither config.json, modules.json, model_index.json "
                      "nor a .gguf file", file=path, field="files", hint=_hint_without_model(folder),
                      allowed="a folder of transformers, sentence-transformers or diffusers, or one with a GGUF model")
