"""A ``dataclass`` whose methods are generated when they are used first.

:mod:`dataclasses` writes the methods of a class as source text and compiles it, which takes about a millisecond per
class. A program imports the classes of all verbs and file formats, uses few of them, and of most only ``__init__``.
This decorator is for modules that a first token imports; all others use the standard one.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    def dataclass(*, repr: bool = True, eq: bool = True, frozen: bool = False, kw_only: bool = False,
                  slots: bool = False) -> Callable[[type], type]:
        """Return a decorator like :func:`dataclasses.dataclass`, which generates methods on their first use.

        The class needs a docstring, and has no fields of the types ``InitVar`` and ``KW_ONLY``.
        """
        def decorate(cls: type) -> type:
            namespace = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
            namespace["__qualname__"] = cls.__qualname__
            names = [name for name, annotation in inspect.get_annotations(cls).items()
                     if not str(annotation).startswith(("ClassVar", "typing.ClassVar"))]
            if slots:
                taken = {slot for base in cls.__mro__[1:] for slot in vars(base).get("__slots__", ())}
                kept = {name: value for name, value in namespace.items() if name not in names}
                kept["__slots__"] = tuple(name for name in names if name not in taken)
                cls = type(cls)(cls.__name__, cls.__bases__, kept)
            else:
                _set_defaults(cls, names)

            deferred = ["__init__", "__match_args__", "__dataclass_fields__", "__dataclass_params__", "__replace__",
                        *["__repr__"] * repr, *["__eq__"] * eq, *["__getstate__", "__setstate__"] * (frozen and slots)]
            if sys.version_info < (3, 13):
                deferred.remove("__replace__")
            if eq and namespace.get("__hash__") is None:
                if frozen:
                    deferred.append("__hash__")
                else:
                    cls.__hash__ = None
            made = _LazyDataclass(cls, namespace, {"init": True, "repr": repr, "eq": eq, "frozen": frozen,
                                                   "kw_only": kw_only, "slots": slots})
            for name in deferred:
                if name == "__hash__" or name not in namespace:
                    setattr(cls, name, _LazyAttribute(made, name))
            if "__new__" in namespace:  # its signature would hide that of __init__
                cls.__signature__ = _InitSignature(cls)
            if frozen:
                cls.__setattr__, cls.__delattr__ = _refusals(cls)
            return cls

        return decorate


class _InitSignature:
    """``__signature__`` of a class with a ``__new__`` of its own: the signature of its ``__init__``."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        if instance is not None or owner is not self.cls:  # a subclass may have another __init__
            raise AttributeError("__signature__")
        made = inspect.signature(self.cls.__init__)  # type: ignore[misc]
        return made.replace(parameters=list(made.parameters.values())[1:])


def _set_defaults(cls: type, names: list[str]) -> None:
    """Replace the results of :func:`dataclasses.field` by the defaults of the fields."""
    for name in names:
        value = vars(cls).get(name)
        if isinstance(value, dataclasses.Field):
            if value.default is dataclasses.MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, value.default)


def _refusals(cls: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return ``__setattr__`` and ``__delattr__`` of a frozen class."""
    def set_attribute(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in cls.__dataclass_fields__:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def delete_attribute(self: Any, name: str) -> None:
        if type(self) is cls or name in cls.__dataclass_fields__:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    for function, name in ((set_attribute, "__setattr__"), (delete_attribute, "__delattr__")):
        function.__name__, function.__qualname__ = name, f"{cls.__qualname__}.{name}"
    return set_attribute, delete_attribute


#: Generated method -> the argument of :func:`dataclasses.dataclass` that asks for it.
_METHODS = {"__init__": "init", "__repr__": "repr", "__eq__": "eq", "__hash__": "eq"}


class _LazyDataclass:
    """A class that is made a dataclass later.

    Args:
        cls: the class.
        namespace: its attributes before it was decorated.
        options: arguments of :func:`dataclasses.dataclass`.
    """

    __slots__ = ("cls", "namespace", "options")

    def __init__(self, cls: type, namespace: dict[str, Any], options: dict[str, bool]) -> None:
        self.cls, self.namespace, self.options = cls, namespace, options

    def attribute(self, name: str) -> Any:
        """Generate a deferred attribute, put it into the class and return it. Thread-safe: a second thread repeats it.

        :mod:`dataclasses` replaces no attribute of a class, so the attribute is generated in a second class with the
        same attributes. A thread that uses the first class meanwhile always finds the deferred attribute.
        """
        cls, wanted = self.cls, _METHODS.get(name)
        options = self.options | {method: method == wanted for method in ("init", "repr", "eq")}
        twin: Any = dataclasses.dataclass(**options)(type(cls)(cls.__name__, cls.__bases__, dict(self.namespace)))
        for method in ("init", "repr", "eq"):
            setattr(twin.__dataclass_params__, method, self.options[method])
        found = dict(vars(twin))
        for one, value in list(vars(cls).items()):
            if isinstance(value, _LazyAttribute) and _METHODS.get(one) in (None, wanted):
                setattr(cls, one, found[one])
        return found[name]


class _LazyAttribute:
    """Placeholder of a class attribute that is generated on first use."""

    __slots__ = ("made", "name")

    def __init__(self, made: _LazyDataclass, name: str) -> None:
        self.made, self.name = made, name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        value = self.made.attribute(self.name)
        get = getattr(type(value), "__get__", None)
        return value if get is None else get(value, instance, owner)


__all__ = ["dataclass"]
