"""Models that are bundled with mpool: folders below ``mpool/demo_models`` in the package."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...errors import FileError, IntegrityError
from .. import store
from ..references import BundledRef
from . import FileFact

#: Folder of the bundled models in an installed package.
ROOT = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "demo_models")


def resolve(ref: BundledRef, files: Mapping[str, FileFact]) -> str:
    """Verify the files of a bundled model, and return the absolute path of its folder.

    The files are hashed on every use, because this takes only milliseconds; nothing is written to the cache.

    Args:
        ref: reference to the model.
        files: expected size and SHA-256 of its files, by relative path.

    Raises:
        FileError: a file is missing in the installed package.
        IntegrityError: the hash of a file differs from the recorded one.
    """
    path = os.path.join(ROOT, ref.name)
    for name, fact in files.items():
        file = os.path.join(path, name)
        if not os.path.isfile(file):
            raise FileError(f"{file}: this file of a bundled model is missing",
                            hint="Install mpool again; packages of mpool must include the folder mpool/demo_models")
        actual = store.digest_of(file)
        if actual != fact.sha256:
            raise IntegrityError(f"{file}: the sha256 digest is {actual}, expected {fact.sha256}",
                                 hint="Install mpool again: the file was changed after the installation")
    return path
