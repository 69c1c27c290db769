"""Model references, download sources and model descriptions.

``resolve`` turns a reference into verified files on disk, ``describe`` reads these files into a
:class:`~mpool.models.spec.ModelDescription` (which contains the spec that the C core loads), and ``load_catalogue``
returns the catalogue of known models. Submodules are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..checks import nearest as nearest
    from .catalogue import Catalogue as Catalogue
    from .catalogue import Row as Row
    from .catalogue import unknown as unknown
    from .describing import describe as describe
    from .describing import describe_resolved as describe_resolved
    from .describing import is_offline as is_offline
    from .describing import resolve as resolve
    from .describing import verify as verify
    from .references import BundledRef as BundledRef
    from .references import HubRef as HubRef
    from .references import KeyRef as KeyRef
    from .references import LocalRef as LocalRef
    from .references import PipRef as PipRef
    from .references import parse as _parse
    from .removing import remove as remove
    from .sources import Resolved as Resolved
    from .spec import EmbeddingSettings as EmbeddingSettings
    from .spec import GenerationSettings as GenerationSettings
    from .spec import ImageSettings as ImageSettings
    from .spec import ModelDescription as ModelDescription
    from .spec import ModelSpec as ModelSpec
    from .spec import TensorEntry as TensorEntry
    from .spec import TokenizerSource as TokenizerSource
    from .spec import TokenTable as TokenTable
    from .spec import VisionSettings as VisionSettings
    from .store import cache_dir as cache_dir

    def load_catalogue() -> Catalogue: ...

    parse_reference = _parse

#: Public name -> (submodule, name in that submodule).
_EXPORTS: dict[str, tuple[str, str]] = {name: (module, name) for module, names in {
    "describing": ("describe", "describe_resolved", "is_offline", "resolve", "verify"),
    "catalogue": ("Catalogue", "Row", "unknown"),
    "references": ("BundledRef", "HubRef", "KeyRef", "LocalRef", "PipRef"),
    "removing": ("remove",),
    "similar_names": ("nearest",),
    "sources": ("Resolved",),
    "spec": ("EmbeddingSettings", "GenerationSettings", "ImageSettings", "ModelDescription", "ModelSpec", "TensorEntry",
             "TokenizerSource", "TokenTable", "VisionSettings"),
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
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
