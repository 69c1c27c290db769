"""Models that come with mpool: folders of the package, below ``mpool/demo_models``."""

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
    """Absolute path of a model's folder, its files checked against the catalogue: each time, which takes
    milliseconds, and leaves nothing in the cache.

    Raises:
        FileError: the package was installed without it.
        IntegrityError: a file's size or hash is not the recorded one.
    """
    path = os.path.join(ROOT, ref.name)
    for name, fact in files.items():
        file = os.path.join(path, name)
        if not os.path.isfile(file):
            raise FileError(f"{file}: not there, though it comes with mpool",
                            hint="Install mpool again; packagers: mpool/demo_models is part of it")
        actual = store.digest_of(file)
        if actual != fact.sha256:
            raise IntegrityError(f"{file}: sha256 is {actual}, {fact.sha256} expected",
                                 hint="Install mpool again: the file is not the one that came with it")
    return path
