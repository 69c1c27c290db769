"""Repositories of the Hugging Face hub, downloaded with ``huggingface_hub`` into its own cache.

The library downloads, caches and locks, and reads its own environment variables: ``HF_HOME``, ``HF_ENDPOINT``,
``HF_HUB_OFFLINE``, ``HF_TOKEN`` (https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables).
This module selects the commit and the files, and verifies each file once against the size and hash that the hub states
for it: SHA-256 for large files, git's object id for small ones.
"""

from __future__ import annotations

import glob
import logging
import os
import posixpath
import re
from collections.abc import Callable, Sequence
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
from .. import store
from ..files import PICKLE_SUFFIXES, SAFE_FORMATS, Folder, check_relative
from ..layout import (
    INDEX_NAME,
    MODEL_CONFIG,
    MODULES_NAME,
    SINGLE_NAME,
    SPLIT,
    TRANSFORMER_CONFIGS,
    gguf_models,
    other_sizes,
    shard_names,
)
from ..references import HubRef
from . import Resolved
from .progress import Progress

log = logging.getLogger("mpool.models")

#: Files of a model folder that mpool reads in addition to the weights.
SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json", "merges.txt",
               "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
               *TRANSFORMER_CONFIGS)
#: Index of a diffusers folder.
PIPELINE_NAME = "model_index.json"
#: Quantisations to use if the reference names none, in order of preference, as in llama-server
#: (https://github.com/ggml-org/llama.cpp/blob/master/common/download.cpp). If the repository has neither, the first
#: model by name is used.
DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
#: Timeout for listing a repository, in seconds.
LIST_SECONDS = 30.0
_QUANT_IN_NAME = re.compile(r"(?:^|[-._/])((?:UD-)?(?:[IT]?Q\d[A-Z0-9_]*|F16|F32|BF16|FP16|NVFP4|MXFP4(?:_MOE)?))"
                            r"(?=[-.])", re.IGNORECASE)
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


def choose_gguf(names: Sequence[str], quant: str | None, *, where: str) -> str:
    """Choose the GGUF file of a repository.

    Args:
        names: every file of the repository.
        quant: quantisation; None: Q4_K_M, or else Q8_0, or else the first file by name.
        where: name of the repository, for errors.

    Raises:
        InvalidArgument: the repository has no such quantisation; the message lists the available ones.
    """
    models = gguf_models(names)
    for wanted in (quant,) if quant else DEFAULT_QUANTS:
        matches = [name for name in models if re.search(re.escape(wanted) + "[.-]", name, re.IGNORECASE)]
        # "Q4_0" is also a suffix of "IQ4_0": prefer names that contain the quantisation as a whole word
        word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}[.-]", re.IGNORECASE)
        whole = [name for name in matches if word.search(name)]
        if matches:
            return (whole or matches)[0]
    if quant is None and models:
        return models[0]
    tags = sorted({match.group(1) for name in models if (match := _QUANT_IN_NAME.search(name))})
    listed = ", ".join(tags) if tags else ", ".join(models[:12]) or "no GGUF files"
    raise InvalidArgument(f"{where} has no quantisation {quant}", param="ref", got=str(quant), allowed=listed,
                          hint=f"Available: {listed}")


def split_siblings(names: Sequence[str], first: str, *, where: str) -> list[str]:
    """Return every part of a GGUF model, in order.

    Args:
        names: every file of the repository.
        first: name of the model's first part, or of its only file.
        where: name of the repository, for errors.

    Raises:
        FormatError: a part is missing, or ``first`` is a later part.
    """
    split = SPLIT.fullmatch(first)
    if split is None:
        return [first]
    count = int(split["count"])
    parts = [f"{split['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    absent = [part for part in parts if part not in names]
    if absent or int(split["number"]) != 1:
        got = f"{absent[0]} missing" if absent else f"{first} is not the first part"
        raise FormatError(f"{where}: {got}; the model consists of {count} parts", file=where, field="split", got=got,
                          allowed=f"all {count} parts, named by the first part",
                          hint=None if absent else f"Name the first part: {parts[0]}")
    return parts


def _wants_gguf(ref: HubRef, names: Sequence[str]) -> bool:
    """Return True if the reference names a GGUF file or quantisation, or if the repository has only GGUF models."""
    if ref.quant or ref.file and ref.file.endswith(".gguf"):
        return True
    return not _has_folder(names, ref.file or "") and not ref.file and bool(gguf_models(names))


def _under(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _has_folder(names: Sequence[str], folder: str) -> bool:
    """Return True if there are a config.json and safetensors files in the folder or in its subfolders."""
    inside = [name for name in names if not folder or name.startswith(folder + "/")]
    return any(posixpath.basename(name) == "config.json" for name in inside) \
        and any(name.endswith(".safetensors") for name in inside)


def choose_folder(names: Sequence[str], folder: str, read: Callable[[str], Any], *, where: str) -> list[str]:
    """Choose the files to download of a transformers, sentence-transformers or diffusers folder.

    Args:
        names: every file of the repository.
        folder: folder of the model in the repository; empty for the root.
        read: function that returns a small JSON file of the repository as :class:`~mpool.models.fields.Fields` or list.
        where: name of the repository, for errors.

    Returns:
        sorted names of the configuration, tokenizer, weight and module files.

    Raises:
        UnsafeFormat: the repository has only pickled weights.
        FormatError: the repository has no weights, or an index or module list names a file outside the folder.
    """
    have = set(names)
    if _under(folder, PIPELINE_NAME) in have:
        return _choose_pipeline(have, folder, read, where=where)
    chosen = [_under(folder, name) for name in (*SMALL_FILES, MODULES_NAME, MODEL_CONFIG)]
    encoder = folder
    if _under(folder, MODULES_NAME) in have:
        modules = read(_under(folder, MODULES_NAME))
        for i, module in enumerate(modules if isinstance(modules, list) else []):
            name = module.get("path") if isinstance(module, dict) else None
            path = check_relative("" if name is None else name, file=where, field=f"{MODULES_NAME} [{i}].path",
                                  allow_empty=True)
            below = _under(folder, path) if path else folder
            if i == 0:
                encoder = below
                chosen += [_under(encoder, name) for name in SMALL_FILES]
            elif path:
                start = folder + "/" if folder else ""
                siblings = {name[len(start):].partition("/")[0] for name in names if name.startswith(start)}
                for part in (path, *other_sizes(path, siblings).values()):
                    chosen += [_under(_under(folder, part), name) for name in ("config.json", SINGLE_NAME)]
    weights = _under(encoder, SINGLE_NAME)
    index = _under(encoder, INDEX_NAME)
    if weights in have:
        chosen.append(weights)
    elif index in have:
        shards = sorted(set(shard_names(read(index)).values()))
        chosen += [index, *(_under(encoder, check_relative(shard, file=where, field=INDEX_NAME)) for shard in shards)]
    else:
        pickled = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
        if pickled:
            raise UnsafeFormat(f"{where}: the weights {pickled[0]} are in a format that can run code when it is loaded",
                               hint=f"Use a repository or revision with {SAFE_FORMATS}; to convert the model, use "
                                    "https://huggingface.co/spaces/safetensors/convert")
        raise FormatError(f"{where}: the repository or folder holds no model", file=where, field="files",
                          allowed=f"config.json with {SAFE_FORMATS}",
                          hint=f"mpool needs config.json with {SAFE_FORMATS}")
    return sorted(name for name in set(chosen) if name in have)


def _choose_pipeline(have: set[str], folder: str, read: Callable[[str], Any], *, where: str) -> list[str]:
    """Choose the files of a diffusers pipeline: the configuration and weights of each network, and the tokenizers."""
    index = _under(folder, PIPELINE_NAME)
    chosen = [index]
    for part, value in read(index).values.items():
        if not isinstance(value, list) or len(value) != 2 or value[0] is None:
            continue
        inside = _under(folder, check_relative(part, file=where, field=PIPELINE_NAME))
        chosen += [_under(inside, name) for name in (*SMALL_FILES, "scheduler_config.json")]
        for stem in ("model", "diffusion_pytorch_model"):
            whole, shards = (_under(inside, f"{stem}.safetensors{end}") for end in ("", ".index.json"))
            if whole in have:
                chosen.append(whole)
            elif shards in have:
                names = sorted(set(shard_names(read(shards)).values()))
                chosen += [shards, *(_under(inside, check_relative(name, file=where, field=shards))
                                     for name in names)]
    return sorted(name for name in set(chosen) if name in have)


def resolve(ref: HubRef, *, offline: bool = False, progress: Progress = None, recheck: bool = False) -> Resolved:
    """Download the missing files of a repository into the hub's cache, all at one commit, and verify them.

    Args:
        ref: reference to a repository, or to a quantisation, file or folder of it.
        offline: True to use only the cache, as with ``HF_HUB_OFFLINE=1``.
        progress: True or False to show or hide progress bars; None: show them if standard error is a terminal and the
            settings of ``huggingface_hub`` allow it.
        recheck: True to hash every file again.

    Raises:
        OfflineError: the model is not in the cache and downloads are disabled; the hint says how to download it.
        DownloadError: the repository, revision or file does not exist, is not accessible, or the download failed.
        IntegrityError: a file differs from the hub's record; it was removed from the cache.
        InvalidArgument: the repository has no such quantisation.
        UnsafeFormat: the repository has only pickled weights, or the reference names a pickled file.
    """
    if ref.file and ref.file.endswith(PICKLE_SUFFIXES):
        raise UnsafeFormat(f"{ref}: {ref.file} is in a format that can run code when it is loaded",
                           hint=f"Use {SAFE_FORMATS}")
    import huggingface_hub
    from huggingface_hub import constants

    if offline or constants.HF_HUB_OFFLINE:
        return _from_cache(ref, None, recheck)
    try:
        if ref.revision and _COMMIT.fullmatch(ref.revision):
            # a commit never changes, so a complete copy in the cache needs no network access
            try:
                return _from_cache(ref, None, recheck)
            except OfflineError:
                pass
        return _Fetch(huggingface_hub, ref, progress, recheck).run()
    except MpoolError:
        raise
    except Exception as error:
        return _translate_error(error, ref, recheck)


class _Fetch:
    """A download from the hub: list the repository, select files, download and verify them."""

    def __init__(self, hub: Any, ref: HubRef, progress: Progress, recheck: bool) -> None:
        self.hub, self.ref, self.recheck = hub, ref, recheck
        self.bars = _bar_class(progress)
        self.commit = ""
        self.remote: dict[str, _RemoteFile] = {}

    def run(self) -> Resolved:
        info = self.hub.HfApi(library_name="mpool").model_info(self.ref.repo, revision=self.ref.revision,
                                                               files_metadata=True, timeout=LIST_SECONDS)
        self.commit = str(info.sha)
        if not _COMMIT.fullmatch(self.commit):
            raise DownloadError(f"{self.ref}: the server's response has no commit id (got {self.commit!r})",
                                hint="Check HF_ENDPOINT: the server must support the hub's API")
        for file in info.siblings or ():
            lfs = file.lfs
            sha256 = getattr(lfs, "sha256", None) or (lfs.get("sha256") if isinstance(lfs, dict) else None)
            size = getattr(lfs, "size", None) or file.size
            self.remote[file.rfilename] = _RemoteFile(size, "sha256" if sha256 else "git", sha256 or file.blob_id)
        chosen = _choose(self.ref, sorted(self.remote), self._read)
        folder = self._download(chosen)
        for name in chosen:
            _check(folder, name, self.remote[name], self.recheck)
        try:
            store.write_json(_record_path(self.ref, self.commit),
                             {"repo": self.ref.repo, "commit": self.commit, "files": chosen})
        except OSError as error:
            log.debug("cannot write the record of %s: %s", self.ref, error)
        return _resolved(self.ref, folder, self.commit, chosen)

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
                library_name="mpool", tqdm_class=self.bars, max_workers=4))
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


def _choose(ref: HubRef, names: Sequence[str], read: Callable[[str], Any]) -> list[str]:
    """Return the files that a reference needs, with the first part of a GGUF model first."""
    where = f"{ref.repo}@{ref.revision}" if ref.revision else ref.repo
    if _wants_gguf(ref, names):
        if ref.file and ref.file not in names:
            raise DownloadError(f"{where} has no file {ref.file}",
                                hint=f"GGUF files of the repository: {', '.join(gguf_models(names)[:12]) or 'none'}")
        first = ref.file or choose_gguf(names, ref.quant, where=where)
        return split_siblings(names, first, where=where)
    if ref.file and ref.file in names:
        raise InvalidArgument(f"{ref} is a single file of a model that consists of a folder", param="ref", got=str(ref),
                              allowed="a repository, a folder in it, or a GGUF file",
                              hint=f"Use {ref.repo}, or hf://{ref.repo}/ with the path of the folder")
    if ref.file and not any(name.startswith(ref.file + "/") for name in names):
        raise DownloadError(f"{where} has no file or folder {ref.file}",
                            hint="Check the path and the revision; file names are case-sensitive")
    return choose_folder(names, ref.file or "", read, where=where)


def _resolved(ref: HubRef, folder: str, commit: str, chosen: Sequence[str]) -> Resolved:
    is_gguf = chosen[0].endswith(".gguf")
    path = os.path.join(folder, chosen[0] if is_gguf else ref.file or "").rstrip("/")
    return Resolved(ref=str(ref), kind="gguf" if is_gguf else "folder", path=path, source="hub",
                    files=tuple(os.path.join(folder, name) for name in chosen), revision=commit)


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


def _record_path(ref: HubRef, commit: str) -> str:
    choice = re.sub(r"[^A-Za-z0-9._-]", "-", f"{ref.quant or ''}{ref.file or ''}") or "model"
    return os.path.join(store.cache_dir(), "hub", ref.repo.replace("/", "--"), commit, f"{choice}.json")


def _from_cache(ref: HubRef, cause: Exception | None, recheck: bool) -> Resolved:
    """Resolve a reference from the hub's cache without network access, and verify each file against its blob's name.

    Args:
        ref: reference to resolve.
        cause: error of the preceding download; None: downloads are disabled.
        recheck: True to hash every file again.

    Raises:
        OfflineError: the model is not in the cache, or not completely.
    """
    import huggingface_hub

    try:
        folder = str(huggingface_hub.snapshot_download(ref.repo, revision=ref.revision, local_files_only=True,
                                                       allow_patterns=[]))
    except Exception as error:
        raise _offline(ref, "is not on this machine", cause) from (cause or error)
    commit = os.path.basename(folder)
    names = sorted(os.path.relpath(os.path.join(parent, name), folder)
                   for parent, _, files in os.walk(folder) for name in files)
    if not _wants_gguf(ref, names):
        # choose from all files of the commit if the library has cached their list, so that missing files are noticed
        names = _cached_listing(ref.repo, commit) or names
    record = store.read_json(_record_path(ref, commit)) or {}
    listed = record.get("files")
    try:
        chosen = [str(name) for name in listed] if isinstance(listed, list) and listed \
            else _choose(ref, names, lambda name: _read_json(folder, name))
    except (DownloadError, InvalidArgument, UnsafeFormat, FormatError) as error:
        raise _offline(ref, f"is incomplete on this machine: {error.message}", cause) from error
    absent = [name for name in chosen if not os.path.exists(os.path.join(folder, name))]
    if absent:
        raise _offline(ref, f"is incomplete on this machine: {absent[0]} is missing", cause) from cause
    for name in chosen:
        _check(folder, name, _cached_file(os.path.join(folder, name)), recheck)
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
    because = f", and the hub could not be reached ({type(cause).__name__}: {cause})" if cause is not None \
        else ", and downloads are disabled (offline)"
    return OfflineError(f"{ref} {why}{because}",
                        hint=f"When online and without HF_HUB_OFFLINE, run: mpool pull {ref}; or pass the path of a "
                             "local copy")


def _translate_error(error: Exception, ref: HubRef, recheck: bool) -> Resolved:
    """Convert an error of the library to an error of mpool. If the hub cannot be reached, use the cached copy instead.

    Args:
        error: error of ``huggingface_hub``.
        ref: reference to resolve.
        recheck: True to hash every file of the cached copy again.

    Raises:
        DownloadError: the hub refused the request, or cannot be reached and the cache has no complete copy.
    """
    from huggingface_hub import errors

    where = f"{ref.repo}@{ref.revision}" if ref.revision else ref.repo
    if isinstance(error, errors.GatedRepoError):
        raise DownloadError(f"the repository {ref.repo} is gated",
                            hint=f"Accept its terms at https://huggingface.co/{ref.repo} and log in with: hf auth "
                                 "login") from error
    if isinstance(error, errors.RepositoryNotFoundError):
        raise DownloadError(f"the repository {ref.repo} does not exist or is private",
                            hint="Check the spelling; for a private repository, log in with: hf auth login") from error
    if isinstance(error, (errors.RevisionNotFoundError, errors.EntryNotFoundError)) \
            and not isinstance(error, errors.LocalEntryNotFoundError):
        raise DownloadError(f"{where}: {str(error).splitlines()[0]}") from error
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None and status < 500 and status not in (408, 429):
        raise DownloadError(f"{where}: the hub refused the request with HTTP status {status}") from error
    try:
        found = _from_cache(ref, error, recheck)
    except OfflineError as offline:
        raise DownloadError(f"{where} could not be downloaded: {type(error).__name__}: {error}",
                            hint=offline.hint) from error
    log.warning("the hub could not be asked for a newer version of %s (%s); using the cached commit %s", where, error,
                found.revision)
    return found


def _bar_class(progress: Progress) -> Any:
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    if progress is None:
        return tqdm

    class Bars(tqdm):  # type: ignore[misc,valid-type]
        """Progress bars that are shown or hidden regardless of the terminal."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = not progress
            super().__init__(*args, **kwargs)

    return Bars
