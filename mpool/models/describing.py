"""``resolve`` turns a model reference into verified files; ``describe`` reads these files into a model description."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

from .._version import __version__
from ..errors import DownloadError, FormatError, IntegrityError, MpoolError, OfflineError, Unsupported
from ..records import logger
from . import catalogue, downloaded, files, pins, store
from .catalogue import Row
from .files import Folder
from .references import BundledRef, HubRef, KeyRef, LocalRef, PipRef, Reference, parse
from .sources import Resolved, bundled, hub, local, offline_variables, probe
from .sources.progress import Progress
from .spec import ModelDescription

log = logger("mpool.models")


def is_offline(offline: bool | None) -> bool:
    """Return True if downloads are disabled.

    Args:
        offline: decides if it is not None; otherwise ``MPOOL_OFFLINE`` and ``HF_HUB_OFFLINE`` decide.

    Raises:
        InvalidArgument: ``MPOOL_OFFLINE`` has an unknown value, also if ``offline`` decides.
    """
    names = offline_variables()
    return bool(names) if offline is None else offline


def resolve(ref: str | os.PathLike[str], offline: bool | None = None, progress: Progress = None, *,
            update: bool = False, listed: bool = True) -> Resolved:
    """Resolve a reference to files on this machine, and download missing files.

    Args:
        ref: a path, ``org/name``, ``org/name:Q4_K_M``, ``org/name@revision``, ``hf://org/name@revision/file``,
            ``pip:package==version/path``, ``mpool:digits-clip``, or a key or alias of the catalogue.
        offline: True: never download. False: download if needed. None: ``MPOOL_OFFLINE`` and ``HF_HUB_OFFLINE``
            decide.
        progress: True or False: show or hide the progress bar. None: show it if standard error is a terminal.
        update: True: replace the pin of an unpinned model of the catalogue by the hub's present commit and hashes.
        listed: False: leave the files out of the list of downloaded models, as for adapters.

    Returns:
        location of the files. Their contents were hashed but not parsed, apart from indexes that list other files.

    Raises:
        InvalidArgument: the reference has none of these forms, or the repository has no such quantisation.
        UnknownModel: the catalogue has no such key or alias; the message names the closest.
        OfflineError: the files are not on this machine and downloads are disabled; the hint says how to download them.
        DownloadError: the download failed.
        IntegrityError: a size or hash differs from the recorded one, or the hub no longer has the recorded commit.
        UnsafeFormat: the model exists only in a format that can run code (pickle).
        FileError: a local file or folder does not exist or cannot be read.
        FormatError: a local folder holds no model, or a file is malformed.
        LimitError: the disk has too little free space.
    """
    reference = parse(ref)
    row = None
    if isinstance(reference, KeyRef):
        row = catalogue.load().require(reference.key)
    elif not isinstance(reference, LocalRef):
        row = catalogue.load().find(reference)
    if row is None:
        try:
            found = _resolve_one(reference, None, is_offline(offline), progress)
        except (OfflineError, DownloadError) as error:
            if isinstance(reference, HubRef) and not reference.file and not os.path.exists(str(reference)):
                # a misspelt folder looks like the name of a repository
                error.addition = f"there is no file or folder {reference} in {os.getcwd()} either"
            raise
        if listed and found.source in ("hub", "pip"):
            downloaded.add(found.ref)
        return found
    try:
        return _resolve_row(row, is_offline(offline), progress, update)
    except MpoolError as error:
        error.key = error.key or row.key
        raise


def _resolve_row(row: Row, offline: bool, progress: Progress, update: bool = False) -> Resolved:
    """Resolve the first reference whose files are on this machine, or else the first that can be downloaded."""
    failure: MpoolError | None = None
    for reference in row.refs if not update or offline else ():
        try:
            return _resolve_one(reference, row, True, progress)
        except (OfflineError, IntegrityError) as error:
            failure = failure or error
    if isinstance(failure, OfflineError):
        failure.hint = row.fetch_hint()
    for i, reference in enumerate(row.refs if not offline else ()):
        try:
            return _resolve_one(reference, row, False, progress, update)
        except (DownloadError, IntegrityError) as error:
            if i + 1 < len(row.refs):
                message = f"{row.key}: {error.message}; trying {row.refs[i + 1]}"
                log.log(logging.WARNING if isinstance(error, IntegrityError) else logging.INFO, "%s", message)
                _warn_without_hub(error, row.key)
            if "mpool pull" in (error.hint or "") and isinstance(error, DownloadError):
                error.hint = row.fetch_hint()
            failure = error if i == 0 else failure
    assert failure is not None
    raise failure


def _warn_without_hub(error: MpoolError, key: str) -> None:
    """Warn if the hub gave no answer: the user may wait for a proxy or a firewall. The log has the reason."""
    if isinstance(error, DownloadError) and error._reason in (hub.UNREACHABLE, hub.SILENT):
        probe.warn_once(f"{key} comes from a mirror: the hub cannot be reached")


def _resolve_one(reference: Reference, row: Row | None, offline: bool, progress: Progress,
                 update: bool = False) -> Resolved:
    key = row.key if row is not None else None
    if isinstance(reference, LocalRef):
        return local.resolve(reference)
    if isinstance(reference, HubRef):
        return _resolve_hub(reference, row, offline, progress, update)
    if isinstance(reference, BundledRef):
        return _resolve_bundled(reference, row or catalogue.load().require(reference.name))
    assert isinstance(reference, PipRef)
    from .sources import pip  # takes longer to import than the other sources

    path = pip.resolve(reference, row.files if row is not None else None, offline=offline, progress=progress,
                       download_bytes=row.mirror_bytes if row is not None else None,
                       hint=row.fetch_hint() if row is not None else None)
    found = local.resolve(LocalRef(path))
    names = row.files if row is not None and row.files else pip.files_below(path)
    files = tuple(os.path.join(path, name) if name else path for name in names)
    return Resolved(ref=str(reference), kind=found.kind, path=found.path, source="pip", files=files,
                    revision=reference.requirement, key=key)


def _resolve_hub(reference: HubRef, row: Row | None, offline: bool, progress: Progress, update: bool) -> Resolved:
    """Resolve a reference to the hub.

    Files of a pinned row must have the hashes of the catalogue; those of an unpinned row, the hashes of its pin.
    """
    if row is None:
        return hub.resolve(reference, offline=offline, progress=progress)
    if row.files is not None:
        place = reference.file or ""
        expected = hub.Expected({name if name == reference.projector else os.path.join(place, name).rstrip("/"): fact
                                 for name, fact in row.files.items()},
                                f"The catalogue states these hashes, see {row.source}; to accept other files, name a "
                                f"revision: {reference.repo}@revision")
        return replace(hub.resolve(reference, offline=offline, progress=progress, expected=expected), key=row.key,
                       pointers=())
    if not row.unpinned:
        return replace(hub.resolve(reference, offline=offline, progress=progress), key=row.key)

    pin = None if update else pins.read(row, reference)
    if pin is None:
        found = hub.resolve(reference, offline=offline, progress=progress)
        pins.record(row, reference, found)
        return replace(found, key=row.key, pointers=(pins.path_of(row),))
    expected = hub.Expected(pin.files, "mpool accepts only the files of the first download. To accept the hub's "
                            f"present files, run: mpool pull --update {row.key}, or name a revision: "
                            f"{reference.repo}@revision")
    found = hub.resolve(replace(reference, revision=pin.commit), offline=offline, progress=progress, expected=expected)
    return replace(found, key=row.key, ref=str(reference), pointers=(pins.path_of(row),))


def _resolve_bundled(reference: BundledRef, row: Row) -> Resolved:
    if reference not in row.refs:
        raise catalogue.unknown(reference.name, {key: key for key, other in catalogue.load().rows.items()
                                                 if isinstance(next(iter(other.refs), None), BundledRef)})
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
            hub.verify(path)
        else:
            store.check(path, digest=_recorded(found, path), recheck=True)


def _recorded(found: Resolved, path: str) -> str | None:
    """Return the SHA-256 that the catalogue records for a file; None if only the file's stamp records one."""
    row = catalogue.load().get(found.key) if found.key else None
    if row is None:
        return None
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
    with files.check_links():
        return describe_resolved(resolve(ref_or_path, offline, progress), key)


def describe_resolved(found: Resolved, key: str | None = None) -> ModelDescription:
    """Describe a model whose files are already resolved. See :func:`describe`."""
    row = catalogue.load().get(found.key) if found.key else None
    name = key or found.key or found.ref
    try:
        with files.check_links(), files.collect_stamps() as stamps:
            for path in found.pointers:
                files.note_pointer(path)
            if found.kind == "gguf":
                described = _describe_gguf(found, name)
            else:
                from .formats.hf_folder import describe_folder

                described = describe_folder(found.path, key=name, ref=found.ref, repository=_repository(found, row))
            changed = files.changed(stamps)
            if changed is not None:
                raise files.rewritten(changed)
            files.check_stamps(stamps)
    except MpoolError as error:
        error.key = error.key or (name if key or found.key else None)
        raise
    if row is not None:
        described = _apply_row(described, row)
    return replace(described, revision=found.revision, stamps=stamps,
                   networks=tuple(replace(network, stamps=stamps) for network in described.networks))


def _repository(found: Resolved, row: Row | None) -> str:
    """Return the repository of a model's files, ``org/name``; "" if they are of another source."""
    try:
        reference = row.refs[0] if row is not None else parse(found.ref)
    except MpoolError:
        return ""
    return reference.repo if isinstance(reference, HubRef) else ""


#: Keys whose estimate was compared with their files in this process.
_compared: set[str] = set()


def _apply_row(described: ModelDescription, row: Row) -> ModelDescription:
    """Return the description with the licence, estimate and default options of the row.

    Compares the row's estimate with the formula's for the files, once per process, and logs a difference of more than
    10 %.
    """
    actual = catalogue.estimate(described)
    stated = row.est_memory_allocation_mb
    if row.key not in _compared and abs(stated - actual) > 0.1 * actual:
        log.warning("%s: the catalogue estimates %d MB of memory, its files give %d MB", row.key, stated, actual)
    _compared.add(row.key)
    pipeline = described.pipeline
    if pipeline is not None and row.options:
        pipeline = replace(pipeline, steps=int(row.options["num_inference_steps"]),
                           guidance_scale=row.options["guidance_scale"])
    return replace(described, license=row.license, est_memory_allocation_mb=stated, pipeline=pipeline)


def _describe_gguf(found: Resolved, name: str) -> ModelDescription:
    """Describe a GGUF model. It is a vision model if a projector file is in its folder or was downloaded with it, or if
    it has an image encoder that mpool reads."""
    from .formats import gguf_model

    folder = Folder(found.ref) if os.path.isdir(found.ref) else None
    projector = found.projector
    if folder is not None and (inside := gguf_model.find_projector(folder)) is not None:
        projector = folder.path_of(inside)
    text = gguf_model.describe_gguf(found.path, key=name, ref=found.ref)
    if projector is None and f"{text.spec.architecture}.vision.block_count" not in text.spec.kv:
        return text
    from .formats import vision_gguf

    if projector is None:
        return vision_gguf.with_images(text, found.path)
    try:
        return vision_gguf.describe_pair(text, projector)
    except (Unsupported, FormatError) as error:
        if folder is not None or found.key is not None:
            raise
        log.warning("%s accepts texts only: %s", name, error.message)  # the reference did not name the projector file
        return text
