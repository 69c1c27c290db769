"""Files and folders that are already here."""

from __future__ import annotations

import os
import stat

from ...errors import FileError, FormatError, InvalidArgument
from ..files import PICKLE_SUFFIXES, Folder, file_kind, open_regular, read_exactly, refuse_pickle
from ..layout import gguf_models
from ..references import LocalRef
from . import Resolved


def first_bytes(path: str, count: int = 8) -> bytes:
    """The first bytes of a regular file."""
    fd, size = open_regular(path)
    try:
        return read_exactly(fd, 0, min(count, size), path=path)
    finally:
        os.close(fd)


def kind_of_file(path: str) -> str:
    """``gguf`` if a file is one, by its first bytes whatever its name.

    Raises:
        UnsafeFormat: it is a format that can run code.
        InvalidArgument: it is one file of a model that is a folder.
        FormatError: it is none of these.
    """
    start = first_bytes(path)
    if start[:4] == b"GGUF":
        return "gguf"
    name = os.path.basename(path)
    if name.endswith((".safetensors", ".json")):
        raise InvalidArgument(f"{path} is one file of a model that is a folder", param="ref", got=path,
                              allowed="the folder", hint=f"Give the folder, {os.path.dirname(path)}")
    # a zip archive or the mark of a pickle: what torch.save writes
    if name.endswith(PICKLE_SUFFIXES) or start[:4] == b"PK\x03\x04" or start[:1] == b"\x80":
        refuse_pickle(path, name)
    raise FormatError(file=path, offset=0, field="magic", got=start[:4].hex() or "nothing",
                      allowed="47475546 (GGUF), or a folder with config.json")


def resolve(ref: LocalRef) -> Resolved:
    """A local file or folder as it is. A folder without config.json but with one GGUF model means that model.

    Raises:
        FileError: nothing is there.
        FormatError: a FIFO, device or socket, or a folder that holds no model.
        UnsafeFormat: a pickled file.
    """
    path = os.path.abspath(ref.path)
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: {getattr(error, 'strerror', None) or error}",
                        hint="A name that is not a path is looked up in the catalogue (mpool models) or, as org/name, "
                             "on the hub") from error
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
        raise InvalidArgument(f"{path} holds {len(models)} GGUF models: {', '.join(models[:8])}", param="ref", got=path,
                              allowed="a folder with one GGUF model",
                              hint="Give the path of one of them")
    for name in folder.pickles():
        refuse_pickle(path, name)
    raise FormatError(f"{path}: holds no model: neither config.json, modules.json, model_index.json nor a .gguf file",
                      file=path, field="files",
                      allowed="a folder of transformers, sentence-transformers or diffusers, or one with a GGUF model")
