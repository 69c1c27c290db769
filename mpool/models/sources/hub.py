"""Repositories of the Hugging Face hub, downloaded with ``huggingface_hub`` into its own cache.

The library downloads, caches and locks, and reads its own environment variables: ``HF_HOME``, ``HF_ENDPOINT``,
``HF_HUB_OFFLINE``, ``HF_TOKEN`` (https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables).
This module selects the commit and the files, and verifies each file once against the size and hash that the hub states
for it: SHA-256 for large files, git's object id for small ones.
"""

from __future__ import annotations

import glob
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import (
    DownloadError,
    FormatError,
    IntegrityError,
    InvalidArgument,
    MpoolError,
    OfflineError,
    UnsafeFormat,
)
from ...records import logger
from .. import store
from ..files import PICKLE_SUFFIXES, SAFE_FORMATS, Folder, hub_cache
from ..layout import MODULES_NAME, is_projector
from ..references import HubRef
from . import FileFact, Resolved, downloads_disabled, probe, when_online
from .hub_files import choose, pickle_hint, wants_gguf
from .progress import Progress

log = logger("mpool.models")

#: Timeout for listing a repository, in seconds.
LIST_SECONDS = 10.0
#: Reasons of a DownloadError without a response of the hub.
UNREACHABLE, SILENT = "the hub cannot be reached", "the hub does not respond"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class _RemoteFile:
    """A file of a repository, as the hub lists it.

    Attributes:
        size: size in bytes, or None.
        kind: type of the digest, ``sha256`` or ``git``.
        digest: digest in hexadecimal, or None.
    """

    size: int | None
    kind: str
    digest: str | None


@dataclass(frozen=True)
class Expected:
    """Files that a download must consist of.

    Attributes:
        files: size and SHA-256 of all files to use, by path in the repository.
        hint: hint of the error if the hub has other files.
    """

    files: Mapping[str, FileFact]
    hint: str


def resolve(ref: HubRef, *, offline: bool = False, progress: Progress = None, recheck: bool = False,
            expected: Expected | None = None) -> Resolved:
    """Download the missing files of a repository into the hub's cache, all at one commit, and verify them.

    Args:
        ref: reference to a repository, or to a quantisation, file or folder of it.
        offline: True to use only the cache, as with ``HF_HUB_OFFLINE=1``.
        progress: True or False to show or hide progress bars; None: show them if standard error is a terminal and the
            settings of ``huggingface_hub`` allow it.
        recheck: True to hash every file again.
        expected: files that the reference must have; None: the files are chosen, and accepted as the hub states them.

    Raises:
        OfflineError: the model is not in the cache and downloads are disabled; the hint says how to download it.
        DownloadError: the repository, revision or file does not exist, is not accessible, or the download failed.
        IntegrityError: a file differs from the hub's record and was removed from the cache, or the hub has other files
            than ``expected``.
        InvalidArgument: the repository has no such quantisation.
        UnsafeFormat: the repository has only pickled weights, or the reference names a pickled file.
    """
    if ref.file and ref.file.endswith(PICKLE_SUFFIXES):
        raise UnsafeFormat(f"{ref}: {ref.file} is in a format that can run code when it is loaded",
                           hint=f"Use {SAFE_FORMATS}. {pickle_hint(_where(ref), ref.file)}".rstrip())
    if offline and not os.path.isdir(_cache_folder(ref.repo)):
        raise _offline(ref, "is not on this machine", None)  # the import of huggingface_hub takes half a second
    import huggingface_hub
    from huggingface_hub import constants

    if offline or constants.HF_HUB_OFFLINE:
        return _from_cache(ref, None, recheck, expected)
    if ref.revision and _COMMIT.fullmatch(ref.revision):
        # a commit never changes, so a complete copy in the cache needs no network access
        try:
            return _from_cache(ref, None, recheck, expected)
        except OfflineError:
            pass
    reason = probe.unreachable(constants.ENDPOINT)
    if reason is not None:
        return _cached_or_refused(ConnectionError(f"{constants.ENDPOINT} cannot be reached: {reason}"), ref, recheck,
                                  expected)
    try:
        return _Fetch(huggingface_hub, ref, progress, recheck, expected).run()
    except MpoolError:
        raise
    except Exception as error:
        return _translate_error(error, ref, recheck, expected)


def _where(ref: HubRef) -> str:
    """Return the repository of a reference, with the revision if it names one."""
    return f"{ref.repo}@{ref.revision}" if ref.revision else ref.repo


def _cache_folder(repo: str) -> str:
    """Return the folder of a repository in the hub's cache."""
    return os.path.join(hub_cache(), "models--" + repo.replace("/", "--"))


class _Fetch:
    """A download from the hub: list the repository, select files, download and verify them."""

    def __init__(self, hub: Any, ref: HubRef, progress: Progress, recheck: bool, expected: Expected | None) -> None:
        self.hub, self.ref, self.recheck, self.expected = hub, ref, recheck, expected
        self.progress = progress
        self.commit = ""
        self.remote: dict[str, _RemoteFile] = {}

    def run(self) -> Resolved:
        try:
            info = self.hub.HfApi(library_name="mpool").model_info(self.ref.repo, revision=self.ref.revision,
                                                                   files_metadata=True, timeout=LIST_SECONDS)
        except Exception as error:
            if not isinstance(error, ValueError) and getattr(error, "response", None) is None:
                probe.failed(self.hub.constants.ENDPOINT, f"{type(error).__name__}: {error}")
            raise
        self.commit = str(info.sha)
        if not _COMMIT.fullmatch(self.commit):
            raise _failure(f"{self.ref}: the server's response has no commit id (got {self.commit!r})",
                           "the hub's response has no commit id",
                           hint="Check HF_ENDPOINT: the server must support the hub's API")
        for file in info.siblings or ():
            lfs = file.lfs
            sha256 = getattr(lfs, "sha256", None) or (lfs.get("sha256") if isinstance(lfs, dict) else None)
            size = getattr(lfs, "size", None) or file.size
            self.remote[file.rfilename] = _RemoteFile(size, "sha256" if sha256 else "git", sha256 or file.blob_id)
        if self.expected is not None:
            self._compare(self.expected)
        chosen = list(self.expected.files) if self.expected else choose(self.ref, sorted(self.remote), self._read)
        folder = self._download(chosen)
        for name in chosen:
            _check(folder, name, self.remote[name], self.recheck)
        _check_expected(self.ref, folder, self.expected)
        try:
            store.write_json(_record_path(self.ref, self.commit),
                             {"repo": self.ref.repo, "commit": self.commit, "files": chosen})
        except OSError as error:
            log.debug("cannot write the record of %s: %s", self.ref, error)
        return _resolved(self.ref, folder, self.commit, chosen)

    def _compare(self, expected: Expected) -> None:
        """Compare the hub's listing with the expected files, before anything is downloaded."""
        for name, fact in expected.files.items():
            remote = self.remote.get(name)
            if remote is None:
                raise IntegrityError(f"{self.ref}: the hub has no file {name} at {self.commit}", hint=expected.hint)
            if remote.kind == "sha256" and remote.digest != fact.sha256:
                raise IntegrityError(f"{self.ref}: the hub states the SHA-256 {remote.digest} for {name} at "
                                     f"{self.commit}, expected {fact.sha256}", hint=expected.hint)

    def _download(self, names: Sequence[str]) -> str:
        """Download files, and return the folder of the snapshot."""
        total = sum(self.remote[name].size or 0 for name in names)
        log.info("downloading %d files, %.1f MB, of %s at %s", len(names), total / 1e6, self.ref.repo, self.commit)
        revisions = [self.commit]
        if self.ref.revision != self.commit:
            # download by the branch's name first, so that the library records its commit for offline use; if the branch
            # has moved since it was listed, download by commit
            revisions.insert(0, self.ref.revision or "main")
        folder = ""
        for revision in revisions:
            folder = str(self.hub.snapshot_download(
                self.ref.repo, revision=revision, allow_patterns=[glob.escape(name) for name in names],
                library_name="mpool", tqdm_class=_bar_class(self.progress, total), max_workers=4))
            if os.path.basename(folder) == self.commit:
                break
        return folder

    def _read(self, name: str) -> Any:
        folder = self._download([name])
        _check(folder, name, self.remote[name], self.recheck)
        return _read_json(folder, name)


def _read_json(folder: str, name: str) -> Any:
    if posixpath.basename(name) == MODULES_NAME:
        return Folder(folder).json(name)
    return Folder(folder).fields(name)


def _resolved(ref: HubRef, folder: str, commit: str, chosen: Sequence[str]) -> Resolved:
    first = next((name for name in chosen if not is_projector(name)), chosen[0])
    is_gguf = first.endswith(".gguf")
    path = os.path.join(folder, first if is_gguf else ref.file or "").rstrip("/")
    branch = os.path.join(os.path.dirname(os.path.dirname(folder)), "refs", ref.revision or "main")
    projector = next((os.path.join(folder, name) for name in chosen if is_projector(name) and name != first), None)
    return Resolved(ref=str(ref), kind="gguf" if is_gguf else "folder", path=path, source="hub",
                    files=tuple(os.path.join(folder, name) for name in chosen), revision=commit,
                    pointers=() if ref.revision == commit else (branch,), projector=projector)


def _check(folder: str, name: str, remote: _RemoteFile, recheck: bool) -> None:
    """Verify a file against the hub's record. A wrong file is removed from the cache, to be downloaded again."""
    path = Folder(folder).path_of(name)
    try:
        store.check(path, size=remote.size, kind=remote.kind, digest=remote.digest, recheck=recheck)
    except IntegrityError as error:
        blob = os.path.join(os.path.dirname(path), os.readlink(path)) if os.path.islink(path) else None
        for file in (path, blob):
            if file is not None:
                try:
                    os.unlink(file)
                except OSError:
                    pass
        error.hint = "The file was removed from the hub's cache; download it again"
        raise


def _check_expected(ref: HubRef, folder: str, expected: Expected | None) -> None:
    """Compare files in the cache with the expected sizes and hashes. They stay in the cache: the hub states others."""
    for name, fact in expected.files.items() if expected is not None else ():
        try:
            store.check(Folder(folder).path_of(name), size=fact.size, digest=fact.sha256)
        except IntegrityError as error:
            assert expected is not None
            raise IntegrityError(f"{ref}: {error.message}", hint=expected.hint) from None


def _record_path(ref: HubRef, commit: str) -> str:
    choice = re.sub(r"[^A-Za-z0-9._-]", "-", f"{ref.quant or ''}{ref.file or ''}{ref.projector or ''}") or "model"
    return os.path.join(store.cache_dir(), "hub", ref.repo.replace("/", "--"), commit, f"{choice}.json")


def _from_cache(ref: HubRef, cause: Exception | None, recheck: bool, expected: Expected | None = None) -> Resolved:
    """Resolve a reference from the hub's cache without network access, and verify each file against its blob's name.

    Args:
        ref: reference to resolve.
        cause: error of the preceding download; None: downloads are disabled.
        recheck: True to hash every file again.
        expected: see :func:`resolve`.

    Raises:
        OfflineError: the model is not in the cache, or not completely.
        IntegrityError: a file is damaged, or differs from ``expected``.
    """
    import huggingface_hub

    try:
        folder = str(huggingface_hub.snapshot_download(ref.repo, revision=ref.revision, local_files_only=True,
                                                       allow_patterns=[]))
    except Exception:
        raise _offline(ref, "is not on this machine", cause) from None
    commit = os.path.basename(folder)
    names = sorted(os.path.relpath(os.path.join(parent, name), folder)
                   for parent, _, files in os.walk(folder) for name in files)
    if expected is None and not wants_gguf(ref, names):
        # choose from all files of the commit if the library has cached their list, so that missing files are noticed
        names = _cached_listing(ref.repo, commit) or names
    record = store.read_json(_record_path(ref, commit)) or {}
    listed = list(expected.files) if expected is not None else record.get("files")
    try:
        chosen = [str(name) for name in listed] if isinstance(listed, list) and listed \
            else choose(ref, names, lambda name: _read_json(folder, name))
    except (DownloadError, InvalidArgument, UnsafeFormat, FormatError) as error:
        raise _offline(ref, f"is incomplete on this machine: {error.message}", cause) from None
    absent = [name for name in chosen if not os.path.exists(os.path.join(folder, name))]
    if absent:
        raise _offline(ref, f"is incomplete on this machine: {absent[0]} is missing", cause) from None
    for name in chosen:
        _check(folder, name, _cached_file(os.path.join(folder, name)), recheck)
    _check_expected(ref, folder, expected)
    return _resolved(ref, folder, commit, chosen)


def _cached_listing(repo: str, commit: str) -> list[str]:
    """Return the names of all files of a commit if the library has cached them (newer versions do), or else []."""
    import huggingface_hub

    try:
        return sorted(file.path for file in huggingface_hub.get_cached_repo_tree(repo, revision=commit))
    except Exception as error:
        log.debug("no cached listing of %s at %s: %s", repo, commit, error)
        return []


def verify(path: str) -> None:
    """Hash a file of the hub's cache again. Raises IntegrityError if the hash differs from the name of its blob."""
    recorded = _cached_file(path)
    store.check(path, kind=recorded.kind, digest=recorded.digest, recheck=True)


def _cached_file(path: str) -> _RemoteFile:
    """Return the hash that the cache records for a file: a blob is named after its hash."""
    name = os.path.basename(os.readlink(path)) if os.path.islink(path) else ""
    if re.fullmatch(r"[0-9a-f]{64}", name):
        return _RemoteFile(None, "sha256", name)
    return _RemoteFile(None, "git", name) if _COMMIT.fullmatch(name) else _RemoteFile(None, "sha256", None)


def _offline(ref: HubRef, why: str, cause: Exception | None) -> OfflineError:
    because = f"the hub could not be reached ({type(cause).__name__}: {cause})" if cause is not None \
        else f"the hub was not asked: {downloads_disabled()}"
    return OfflineError(missing=f"{ref} {why}", cause=because,
                        hint=when_online(f"mpool pull {ref}") + "; or pass the path of a local copy")


def _translate_error(error: Exception, ref: HubRef, recheck: bool, expected: Expected | None) -> Resolved:
    """Convert an error of the library to an error of mpool. If the hub cannot be reached, use the cached copy instead.

    The errors have the library's text and no cause: its chain has dozens of frames of HTTP clients.

    Args:
        error: error of ``huggingface_hub``.
        ref: reference to resolve.
        recheck: True to hash every file of the cached copy again.
        expected: see :func:`resolve`.

    Raises:
        IntegrityError: the hub no longer has the commit that ``expected`` was recorded from.
        DownloadError: the hub refused the request, or cannot be reached and the cache has no complete copy.
    """
    from huggingface_hub import errors

    where = _where(ref)
    if isinstance(error, errors.GatedRepoError):
        text = f"the repository {ref.repo} is gated"
        raise _failure(text, text, hint=f"Accept its terms at https://huggingface.co/{ref.repo} and log in with: hf "
                                        "auth login") from None
    if isinstance(error, errors.RepositoryNotFoundError):
        text = f"the hub has no repository {ref.repo}, or it is private"
        raise _failure(text, text, hint="Check the spelling; for a private repository, log in with: hf auth login") \
            from None
    if isinstance(error, errors.RevisionNotFoundError) and expected is not None:
        raise IntegrityError(f"{where}: the hub has no such commit any more", hint=expected.hint) from None
    if isinstance(error, (errors.RevisionNotFoundError, errors.EntryNotFoundError)) \
            and not isinstance(error, errors.LocalEntryNotFoundError):
        raise _failure(f"{where}: {str(error).splitlines()[0]}", f"the hub has no such file or revision of {where}") \
            from None
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None and status < 500 and status not in (408, 429):
        text = f"the hub refused the request with HTTP status {status}"
        raise _failure(f"{where}: {text}", text) from None
    return _cached_or_refused(error, ref, recheck, expected)


def _cached_or_refused(error: Exception, ref: HubRef, recheck: bool, expected: Expected | None) -> Resolved:
    """Return the cached copy because the hub did not respond, or raise DownloadError if there is none."""
    where = _where(ref)
    try:
        found = _from_cache(ref, error, recheck, expected)
    except OfflineError as offline:
        raise _failure(f"{where} could not be downloaded: {type(error).__name__}: {error}",
                       UNREACHABLE if isinstance(error, OSError) else SILENT,
                       offline.hint) from None
    message = f"the hub could not be asked for a newer version of {where} ({error}); using the cached commit " \
              f"{found.revision}"
    log.warning("%s", message)
    probe.warn_once(message)
    return found


def _failure(message: str, reason: str, hint: str | None = None) -> DownloadError:
    """Return the error of a download; ``reason`` is its message without addresses."""
    error = DownloadError(message, hint=hint)
    error._reason = reason
    return error


def _bar_class(progress: Progress, total: int) -> Any:
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bars(tqdm):  # type: ignore[misc,valid-type]
        """Progress bars that are shown or hidden as ``progress`` says. ``total``: bytes of all files."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts = callable(progress) and kwargs.get("unit") == "B"  # another bar counts files
            self._bytes = 0
            if progress is not None:
                kwargs["disable"] = callable(progress) or not progress
            else:
                kwargs.setdefault("disable", None)  # tqdm hides the bar unless standard error is a terminal
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts and callable(progress):
                self._bytes += int(n or 0)
                progress(min(self._bytes, total), total or None)
            shown: bool | None = super().update(n)
            return shown

    return Bars
