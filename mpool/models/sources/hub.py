"""Repositories of the Hugging Face hub, through ``huggingface_hub`` and its own cache.

The library does the fetching, caching and locking, and reads its own environment: ``HF_HOME``, ``HF_ENDPOINT``,
``HF_HUB_OFFLINE``, ``HF_TOKEN`` (https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables).
Here it is decided which commit and which files, and each file is checked once against the size and hash that the hub
states for it: SHA-256 for large files, git's object id for small ones.
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

#: Files beside the weights that a folder's description may read.
SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
               "special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json", "merges.txt",
               "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
               *TRANSFORMER_CONFIGS)
#: Index of a diffusers folder.
PIPELINE_NAME = "model_index.json"
#: Quantisations taken when none is named, in this order, as llama-server does
#: (https://github.com/ggml-org/llama.cpp/blob/master/common/download.cpp); then the first model by name.
DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")
#: Timeout for listing a repository, in seconds.
LIST_SECONDS = 30.0
_QUANT_IN_NAME = re.compile(r"(?:^|[-._/])((?:UD-)?(?:[IT]?Q\d[A-Z0-9_]*|F16|F32|BF16|FP16|NVFP4|MXFP4(?:_MOE)?))"
                            r"(?=[-.])", re.IGNORECASE)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class _Remote:
    """A file as the hub lists it."""

    size: int | None
    kind: str
    digest: str | None


def choose_gguf(names: Sequence[str], quant: str | None, *, where: str) -> str:
    """The GGUF file of a repository: the one with ``quant`` in its name, else Q4_K_M, else Q8_0, else the first.

    Raises:
        InvalidArgument: none has that quantisation; the message lists those that exist.
    """
    models = gguf_models(names)
    for wanted in (quant,) if quant else DEFAULT_QUANTS:
        matches = [name for name in models if re.search(re.escape(wanted) + "[.-]", name, re.IGNORECASE)]
        # Q4_0 is also the end of IQ4_0's name; a whole word goes first
        word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}[.-]", re.IGNORECASE)
        whole = [name for name in matches if word.search(name)]
        if matches:
            return (whole or matches)[0]
    if quant is None and models:
        return models[0]
    tags = sorted({match.group(1) for name in models if (match := _QUANT_IN_NAME.search(name))})
    listed = ", ".join(tags) if tags else ", ".join(models[:12]) or "no GGUF file at all"
    raise InvalidArgument(f"{where} has no quantisation {quant}; it has {listed}", param="ref", got=str(quant),
                          allowed=listed)


def split_siblings(names: Sequence[str], first: str, *, where: str) -> list[str]:
    """Every part of a GGUF model, in order. Raises FormatError if a part is missing."""
    split = SPLIT.fullmatch(first)
    if split is None:
        return [first]
    count = int(split["count"])
    parts = [f"{split['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    absent = [part for part in parts if part not in names]
    if absent or int(split["number"]) != 1:
        raise FormatError(file=where, field="split", got=f"{absent[0]} missing" if absent else f"{first}, a later part",
                          allowed=f"all {count} parts, named by the first")
    return parts


def _wants_gguf(ref: HubRef, names: Sequence[str]) -> bool:
    """The reference means a GGUF file: explicitly, or because the repository has no safetensors model."""
    if ref.quant or ref.file and ref.file.endswith(".gguf"):
        return True
    return not _has_folder(names, ref.file or "") and not ref.file and bool(gguf_models(names))


def _under(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _has_folder(names: Sequence[str], folder: str) -> bool:
    """A model folder with safetensors exists; its encoder may be in a folder below."""
    inside = [name for name in names if not folder or name.startswith(folder + "/")]
    return any(posixpath.basename(name) == "config.json" for name in inside) \
        and any(name.endswith(".safetensors") for name in inside)


def choose_folder(names: Sequence[str], folder: str, read: Callable[[str], Any], *, where: str) -> list[str]:
    """Files of a transformers or sentence-transformers folder: configuration, tokenizer, weights, modules.

    Args:
        names: every file of the repository.
        folder: of the model in it, empty for the root.
        read: gives a small JSON file of the repository as :class:`~mpool.models.fields.Fields` or list.

    Raises:
        UnsafeFormat: the only weights are pickled.
        FormatError: there are none, or an index or module list names something outside.
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
                beside = {name[len(start):].partition("/")[0] for name in names if name.startswith(start)}
                for part in (path, *other_sizes(path, beside).values()):
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
            raise UnsafeFormat(f"{where}: its weights, {pickled[0]}, can run code when they are loaded",
                               hint=f"Use a repository or revision with {SAFE_FORMATS}; "
                                    "https://huggingface.co/spaces/safetensors/convert makes one from it")
        raise FormatError(file=where, field="files", got="no model", allowed=f"config.json with {SAFE_FORMATS}")
    return sorted(name for name in set(chosen) if name in have)


def _choose_pipeline(have: set[str], folder: str, read: Callable[[str], Any], *, where: str) -> list[str]:
    """Files of a pipeline of diffusers: of each network its configuration and weights, and the tokenizers."""
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
    """Files of a repository in the hub's cache, fetched if need be, at one commit, each checked.

    Args:
        offline: use only the cache, as ``HF_HUB_OFFLINE=1`` does.
        progress: whether to show bars; None: when standard error is a terminal and the library's settings agree.
        recheck: hash every file again.

    Raises:
        OfflineError: not in the cache, and offline; the hint says how to fetch it.
        DownloadError: the repository, revision or file does not exist, is not open to you, or could not be reached.
        IntegrityError: a file differs from the hub's record; it was removed from the cache.
        InvalidArgument: no such quantisation.
        UnsafeFormat: only pickled weights, or a reference to one.
    """
    if ref.file and ref.file.endswith(PICKLE_SUFFIXES):
        raise UnsafeFormat(f"{ref}: {ref.file} is a format that can run code when it is loaded",
                           hint=f"Use {SAFE_FORMATS}")
    import huggingface_hub
    from huggingface_hub import constants

    if offline or constants.HF_HUB_OFFLINE:
        return _from_cache(ref, None, recheck)
    try:
        if ref.revision and _COMMIT.fullmatch(ref.revision):
            # a commit never changes: what is complete here needs no network
            try:
                return _from_cache(ref, None, recheck)
            except OfflineError:
                pass
        return _Fetch(huggingface_hub, ref, progress, recheck).run()
    except MpoolError:
        raise
    except Exception as error:
        return _explain(error, ref, recheck)


class _Fetch:
    """A fetch from the hub: lists the repository, selects files, downloads and checks them."""

    def __init__(self, hub: Any, ref: HubRef, progress: Progress, recheck: bool) -> None:
        self.hub, self.ref, self.recheck = hub, ref, recheck
        self.bars = _bar_class(progress)
        self.commit = ""
        self.remote: dict[str, _Remote] = {}

    def run(self) -> Resolved:
        info = self.hub.HfApi(library_name="mpool").model_info(self.ref.repo, revision=self.ref.revision,
                                                               files_metadata=True, timeout=LIST_SECONDS)
        self.commit = str(info.sha)
        if not _COMMIT.fullmatch(self.commit):
            raise DownloadError(f"{self.ref}: the server names no commit")
        for file in info.siblings or ():
            lfs = file.lfs
            sha256 = getattr(lfs, "sha256", None) or (lfs.get("sha256") if isinstance(lfs, dict) else None)
            size = getattr(lfs, "size", None) or file.size
            self.remote[file.rfilename] = _Remote(size, "sha256" if sha256 else "git", sha256 or file.blob_id)
        chosen = _choose(self.ref, sorted(self.remote), self._read)
        folder = self._download(chosen)
        for name in chosen:
            _check(folder, name, self.remote[name], self.recheck)
        try:
            store.write_json(_record_path(self.ref, self.commit),
                             {"repo": self.ref.repo, "commit": self.commit, "files": chosen})
        except OSError as error:
            log.debug("no record of %s: %s", self.ref, error)
        return _resolved(self.ref, folder, self.commit, chosen)

    def _download(self, names: Sequence[str]) -> str:
        """Fetches files; returns the snapshot's folder. The library notes which commit the branch is at."""
        total = sum(self.remote[name].size or 0 for name in names)
        log.info("fetching %d files, %.1f MB, of %s at %s", len(names), total / 1e6, self.ref.repo, self.commit)
        revisions = [self.commit]
        if self.ref.revision != self.commit:
            # by its name first, so that the name is known offline; it may have moved since it was listed
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
    """Files that a reference needs, the first GGUF part first."""
    where = f"{ref.repo}@{ref.revision}" if ref.revision else ref.repo
    if _wants_gguf(ref, names):
        if ref.file and ref.file not in names:
            raise DownloadError(f"{where} has no file {ref.file}",
                                hint=f"It has {', '.join(gguf_models(names)[:12]) or 'no GGUF file'}")
        first = ref.file or choose_gguf(names, ref.quant, where=where)
        return split_siblings(names, first, where=where)
    if ref.file and ref.file in names:
        raise InvalidArgument(f"{ref} is one file of a model that is a folder", param="ref", got=str(ref),
                              allowed="the repository or a folder in it", hint=f"Use {ref.repo}, or the folder")
    if ref.file and not any(name.startswith(ref.file + "/") for name in names):
        raise DownloadError(f"{where} has no file or folder {ref.file}")
    return choose_folder(names, ref.file or "", read, where=where)


def _resolved(ref: HubRef, folder: str, commit: str, chosen: Sequence[str]) -> Resolved:
    is_gguf = chosen[0].endswith(".gguf")
    path = os.path.join(folder, chosen[0] if is_gguf else ref.file or "").rstrip("/")
    return Resolved(ref=str(ref), kind="gguf" if is_gguf else "folder", path=path, source="hub",
                    files=tuple(os.path.join(folder, name) for name in chosen), revision=commit)


def _check(folder: str, name: str, remote: _Remote, recheck: bool) -> None:
    """Checks a file against the hub's record; a wrong file is removed from the cache, so that it is fetched again."""
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
        error.hint = "It was removed from the hub's cache; fetch it again"
        raise


def _record_path(ref: HubRef, commit: str) -> str:
    choice = re.sub(r"[^A-Za-z0-9._-]", "-", f"{ref.quant or ''}{ref.file or ''}") or "model"
    return os.path.join(store.cache_dir(), "hub", ref.repo.replace("/", "--"), commit, f"{choice}.json")


def _from_cache(ref: HubRef, cause: Exception | None, recheck: bool) -> Resolved:
    """Resolves a reference from the hub's cache without network access; each file is checked against its blob's
    name."""
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
        # a folder is complete only with every file of the commit, if its list is known
        names = _listed(ref.repo, commit) or names
    record = store.read_json(_record_path(ref, commit)) or {}
    listed = record.get("files")
    try:
        chosen = [str(name) for name in listed] if isinstance(listed, list) and listed \
            else _choose(ref, names, lambda name: _read_json(folder, name))
    except (DownloadError, InvalidArgument, UnsafeFormat, FormatError) as error:
        raise _offline(ref, f"is not whole on this machine: {error.message}", cause) from error
    absent = [name for name in chosen if not os.path.exists(os.path.join(folder, name))]
    if absent:
        raise _offline(ref, f"is not whole on this machine: {absent[0]} is missing", cause) from cause
    for name in chosen:
        _check(folder, name, _blob_fact(os.path.join(folder, name)), recheck)
    return _resolved(ref, folder, commit, chosen)


def _listed(repo: str, commit: str) -> list[str]:
    """Names of all files of a commit, if the library kept its listing (its newer versions do)."""
    import huggingface_hub

    try:
        return sorted(file.path for file in huggingface_hub.get_cached_repo_tree(repo, revision=commit))
    except Exception as error:
        log.debug("no listing of %s at %s: %s", repo, commit, error)
        return []


def verify(path: str) -> None:
    """Hashes a file of the hub's cache again. Raises IntegrityError if it is not what its blob's name says."""
    fact = _blob_fact(path)
    store.check(path, kind=fact.kind, digest=fact.digest, recheck=True)


def _blob_fact(path: str) -> _Remote:
    """The hash that the cache records for a file: a blob is named after its hash."""
    name = os.path.basename(os.readlink(path)) if os.path.islink(path) else ""
    if re.fullmatch(r"[0-9a-f]{64}", name):
        return _Remote(None, "sha256", name)
    return _Remote(None, "git", name) if _COMMIT.fullmatch(name) else _Remote(None, "sha256", None)


def _offline(ref: HubRef, why: str, cause: Exception | None) -> OfflineError:
    because = f" and the hub could not be reached ({type(cause).__name__}: {cause})" if cause is not None \
        else ", and downloading is not allowed (offline)"
    return OfflineError(f"{ref} {why}{because}",
                        hint=f"When online, without HF_HUB_OFFLINE: mpool pull {ref}; or give the path of a copy")


def _explain(error: Exception, ref: HubRef, recheck: bool) -> Resolved:
    """Turns an error of the library into one of ours, unless the cache can serve instead."""
    from huggingface_hub import errors

    where = f"{ref.repo}@{ref.revision}" if ref.revision else ref.repo
    if isinstance(error, errors.GatedRepoError):
        raise DownloadError(f"{ref.repo} is gated", hint=f"Accept its terms at https://huggingface.co/{ref.repo} and "
                                                         "log in with: hf auth login") from error
    if isinstance(error, errors.RepositoryNotFoundError):
        raise DownloadError(f"the hub has no repository {ref.repo} that you may read",
                            hint="Check the spelling; for a private one, log in with: hf auth login") from error
    if isinstance(error, (errors.RevisionNotFoundError, errors.EntryNotFoundError)) \
            and not isinstance(error, errors.LocalEntryNotFoundError):
        raise DownloadError(f"{where}: {str(error).splitlines()[0]}") from error
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None and status < 500 and status not in (408, 429):
        raise DownloadError(f"{where}: the hub answered {status}") from error
    try:
        found = _from_cache(ref, error, recheck)
    except OfflineError as offline:
        raise DownloadError(f"{where} could not be fetched: {type(error).__name__}: {error}",
                            hint=offline.hint) from error
    log.warning("%s could not be checked for news (%s); the copy of commit %s is used", where, error, found.revision)
    return found


def _bar_class(progress: Progress) -> Any:
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    if progress is None:
        return tqdm

    class Bars(tqdm):  # type: ignore[misc,valid-type]
        """A class of progress bars that are always, or never, shown."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = not progress
            super().__init__(*args, **kwargs)

    return Bars
