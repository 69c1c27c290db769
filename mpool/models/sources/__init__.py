"""Sources of models: this machine, the hub, wheels, mpool itself. Each turns its kind of reference into a
:class:`Resolved`."""

from __future__ import annotations

from dataclasses import dataclass

from ..references import PipRef


@dataclass(frozen=True)
class FileFact:
    """The expected size in bytes and SHA-256 of a file, each None if unknown."""

    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Part:
    """A part of a file that is split over wheels: its reference, its size and hash, and the size of its wheel in
    bytes."""

    ref: PipRef
    fact: FileFact
    download_bytes: int | None = None


@dataclass(frozen=True)
class Resolved:
    """A reference resolved to files on this machine.

    Attributes:
        ref: the reference, in canonical form.
        kind: ``folder`` (transformers or sentence-transformers) or ``gguf``.
        path: absolute path of the folder, or of the (first) GGUF file.
        source: ``local``, ``hub``, ``pip`` or ``bundled``.
        files: absolute paths of the files that were checked, unless the model is local.
        revision: the hub's commit, or the package and version; for what comes with mpool, mpool and its version.
        key: the catalogue's key, or None.
    """

    ref: str
    kind: str
    path: str
    source: str
    files: tuple[str, ...] = ()
    revision: str | None = None
    key: str | None = None
