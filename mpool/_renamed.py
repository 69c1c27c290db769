"""Names of earlier releases, for one more: public names, modules and the classes that old pickles mention.

Every old name gives the same object as the new one, and a DeprecationWarning that names it. This is the only place that
knows old names.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Old public name -> new one, of the package or of the module in the second table.
NAMES = {"Picture": "GeneratedImage", "Pictures": "GeneratedImages", "PictureStep": "ImageStep",
         "PictureStream": "ImageStream", "AsyncPictureStream": "AsyncImageStream"}
#: Old module -> modules that have its names now; the first stands for the module itself.
MODULES = {"catalog": ("models",), "text": ("tokenizers", "conversation.template"),
           "pictures": ("tasks.images_result",), "reranking": ("tasks.rerank",),
           "captures": ("tasks.captures", "tasks.capture_files"), "comparing": ("debug.comparing",)}
_PACKAGE = __name__.rpartition(".")[0]


def warn(old: str, new: str, level: int) -> None:
    """Warns, as the caller ``level`` frames up."""
    import warnings

    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=level + 1)


def of_module(module: str, name: str) -> Any:
    """The object behind an old name of a module, for its ``__getattr__``.

    Raises:
        AttributeError: the module never had the name.
    """
    new = NAMES.get(name)
    if new is None or (found := getattr(import_module(module), new, None)) is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warn(f"{module}.{name}", f"{module}.{new}", 3)
    return found


class _Loader:
    """Makes a module that forwards to others. No subclass of ``importlib.abc.Loader``, whose import is slow."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        old = spec.name.rpartition(".")[2]
        module = ModuleType(spec.name, f"Now :mod:`{_PACKAGE}.{MODULES[old][0]}`.")
        warn(spec.name, f"{_PACKAGE}.{MODULES[old][0]}", 3)

        def forward(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            for home in MODULES[old]:
                target = import_module(f"{_PACKAGE}.{home}")
                if hasattr(target, name):
                    return getattr(target, name)
            raise AttributeError(f"module {spec.name!r} has no attribute {name!r}")

        module.__getattr__ = forward  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to run."""


class _Finder:
    """Finds the old modules."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != _PACKAGE or name not in MODULES:
            return None
        return ModuleSpec(fullname, _Loader())  # type: ignore[arg-type]


def install() -> None:
    """Makes the old modules importable. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # type: ignore[arg-type]
