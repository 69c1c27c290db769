"""Former public names, kept for one release: names, modules, and classes that old pickles refer to.

Every former name returns the same object as the new name and emits a DeprecationWarning with the new name. Former names
appear only in this module.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Former public name -> new name, of the package or of a module in the second table.
NAMES = {"Picture": "GeneratedImage", "Pictures": "GeneratedImages", "PictureStep": "ImageStep",
         "PictureStream": "ImageStream", "AsyncPictureStream": "AsyncImageStream"}
#: Former module -> modules that now define its names; the warning mentions the first.
MODULES = {"catalog": ("models",), "text": ("tokenizers", "conversation.template"),
           "pictures": ("tasks.images_result",), "reranking": ("tasks.rerank",),
           "captures": ("tasks.captures", "tasks.capture_files"),
           "debug.captures": ("tasks.captures", "tasks.capture_files"), "comparing": ("debug.comparing",)}
#: Class -> former attribute -> new attribute.
ATTRIBUTES = {"GeneratedImages": {"pictures": "results"}, "ImageStep": {"picture": "index"},
              "ModelDescription": {"drawing": "pipeline", "towers": "networks"}}
_PACKAGE = __name__.rpartition(".")[0]


def warn(old: str, new: str, level: int) -> None:
    """Emit a DeprecationWarning for the caller ``level`` frames up."""
    import warnings

    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=level + 1)


def of_module(module: str, name: str) -> Any:
    """Return the object that a former name of a module refers to. For the ``__getattr__`` of the module.

    Raises:
        AttributeError: the name is not a former name of the module.
    """
    new = NAMES.get(name)
    if new is None or (found := getattr(import_module(module), new, None)) is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warn(f"{module}.{name}", f"{module}.{new}", 3)
    return found


def attribute(owner: object, name: str) -> Any:
    """Return the attribute that a former name refers to. For the ``__getattr__`` of the class.

    Raises:
        AttributeError: the name is not a former name of an attribute.
    """
    kind = type(owner).__name__
    new = ATTRIBUTES.get(kind, {}).get(name)
    if new is None:
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")
    warn(f"{kind}.{name}", f"{kind}.{new}", 3)
    return getattr(owner, new)


def set_state(owner: object, state: dict[str, Any]) -> None:
    """Set the attributes of an unpickled object, also from a pickle of a former version. For its ``__setstate__``."""
    names = ATTRIBUTES[type(owner).__name__]
    owner.__dict__.update({names.get(name, name): value for name, value in state.items()})


class _Loader:
    """Loader of a module that forwards to others. Not a subclass of ``importlib.abc.Loader``: its import is slow."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        old = spec.name.removeprefix(f"{_PACKAGE}.")
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
        """Do nothing: ``create_module`` completes the module."""


class _Finder:
    """Finder of the former modules."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != _PACKAGE or name not in MODULES:
            return None
        return ModuleSpec(fullname, _Loader())  # type: ignore[arg-type]


def install() -> None:
    """Make the former modules importable. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # type: ignore[arg-type]
