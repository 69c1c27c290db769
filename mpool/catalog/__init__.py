"""References, sources and descriptions: from a name to files on disk, and from files to what the core loads.

``resolve`` turns a reference into checked files; ``describe`` reads them into a
:class:`~mpool.catalog.spec.ModelDescription`; ``load_catalogue`` gives the known models. Everything is imported on
first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .catalogue import Catalogue, Row, nearest, unknown
    from .catalogue import load as load_catalogue
    from .describing import describe, describe_resolved, is_offline, resolve, verify
    from .references import HubRef, KeyRef, LocalRef, PipRef
    from .references import parse as parse_reference
    from .sources import Resolved
    from .spec import (EmbeddingSettings, GenerationSettings, ModelDescription, ModelSpec, TensorEntry, TokenizerSource,
                       TokenTable)
    from .store import cache_dir

#: Name -> (module, name in it).
_EXPORTS: dict[str, tuple[str, str]] = {name: (module, name) for module, names in {
    "describing": ("describe", "describe_resolved", "is_offline", "resolve", "verify"),
    "catalogue": ("Catalogue", "Row", "nearest", "unknown"),
    "references": ("HubRef", "KeyRef", "LocalRef", "PipRef"),
    "sources": ("Resolved",),
    "spec": ("EmbeddingSettings", "GenerationSettings", "ModelDescription", "ModelSpec", "TensorEntry",
             "TokenizerSource", "TokenTable"),
    "store": ("cache_dir",),
}.items() for name in names}
_EXPORTS |= {"load_catalogue": ("catalogue", "load"), "parse_reference": ("references", "parse")}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _EXPORTS[name]
    value = getattr(import_module(f".{module}", __name__), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
