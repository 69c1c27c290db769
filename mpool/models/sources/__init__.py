"""Model sources: local files, the hub, wheels, and models bundled with mpool.

Each submodule resolves one type of reference to verified files on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """

    ref: str
    kind: str
    path: str
    source: str
    files: tuple[str, ...] = ()
    revision: str | None = None
    key: str | None = None
