"""The ``dataclass`` of mpool, which generates methods late, compared with that of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest

from mpool import _dataclasses

SOURCE = '''
from __future__ import annotations
from dataclasses import field
from typing import Any, ClassVar
import typing

@dataclass(frozen=True)
class Plain:
    """Doc."""
    a: int
    b: tuple[int, ...] = ()
    c: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    d: Any = field(default=4, metadata={"doc": "text"})

    @property
    def twice(self): return 2 * self.a

@dataclass(frozen=True)
class Derived(Plain):
    """Doc."""
    b: int = 7
    e: str = "e"
    kind: ClassVar[str] = "kind"
    other: typing.ClassVar[int] = 3

@dataclass(frozen=True, slots=True)
class Slots:
    """Doc."""
    a: int
    b: list[int] = field(default_factory=list)

    def __post_init__(self): object.__setattr__(self, "a", int(self.a))

@dataclass(frozen=True, slots=True, kw_only=True)
class Options(Slots):
    """Doc."""
    c: int | None = None
    kind: ClassVar[str] = "kind"

@dataclass(slots=True)
class Mutable:
    """Doc."""
    a: int
    b: int = 2

@dataclass()
class Own:
    """Doc."""
    a: int
    def __repr__(self): return "own"
    def __eq__(self, other): return True

@dataclass(frozen=True)
class Hashed:
    """Doc."""
    a: int
    def __hash__(self): return 5

@dataclass(frozen=True, eq=False, repr=False)
class Bare:
    """Doc."""
    a: int

class Child(Plain):
    def __init__(self, a): super().__init__(a, (a,))
'''
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "Plain": ((1,), {"c": {"x": 1}}), "Derived": ((1, 2), {"e": "f"}), "Slots": (("3",), {"b": [4]}),
    "Options": ((1,), {"c": 3}), "Mutable": ((1,), {}), "Own": ((1,), {}), "Hashed": ((1,), {}), "Bare": ((1,), {}),
    "Child": ((5,), {})}


def _module(name: str, dataclass: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__["dataclass"] = dataclass
    sys.modules[name] = module
    exec(SOURCE, module.__dict__)
    return module


@pytest.fixture
def both() -> Iterator[tuple[types.ModuleType, types.ModuleType]]:
    """The classes of SOURCE by mpool's decorator, whose methods are not generated yet, and by the standard one."""
    yield _module("late_classes", _dataclasses.dataclass), _module("known_classes", dataclasses.dataclass)
    del sys.modules["late_classes"], sys.modules["known_classes"]


def _deferred(cls: type) -> set[str]:
    return {name for name, value in vars(cls).items() if isinstance(value, _dataclasses._LazyAttribute)}


#: What a program may ask of a class or an instance first.
USES: dict[str, Any] = {
    "signature": lambda cls, make: str(inspect.signature(cls)),
    "annotations": lambda cls, make: cls.__init__.__annotations__,
    "qualname": lambda cls, make: (cls.__init__.__qualname__, cls.__qualname__, cls.__module__[-7:], cls.__doc__),
    "fields": lambda cls, make: [(one.name, one.type, one.default, one.compare, one.repr, one.kw_only, one.metadata)
                                 for one in dataclasses.fields(cls)],
    "params": lambda cls, make: repr(cls.__dataclass_params__),
    "match_args": lambda cls, make: cls.__match_args__,
    "is_dataclass": lambda cls, make: dataclasses.is_dataclass(cls),
    "slots": lambda cls, make: (vars(cls).get("__slots__"), hasattr(make(), "__dict__")),
    "attributes": lambda cls, make: sorted(set(vars(cls)) - {"__annotations_cache__", "__weakref__"}),
    "defaults": lambda cls, make: [getattr(cls, one, None) for one in ("a", "c", "d", "e", "kind", "other")
                                   if not inspect.ismemberdescriptor(getattr(cls, one, None))],
    "repr": lambda cls, make: repr(make()).partition(" object at ")[0],
    "eq": lambda cls, make: (make() == make(), make() != make(), make() == 1),
    "hash": lambda cls, make: "identity" if cls.__hash__ is object.__hash__ else _hash(make()),
    "replace": lambda cls, make: vars_of(dataclasses.replace(make(), a=9)),
    "asdict": lambda cls, make: dataclasses.asdict(make()),
    "pickle": lambda cls, make: vars_of(pickle.loads(pickle.dumps(make()))),
    "copy": lambda cls, make: vars_of(copy.copy(make())),
    "deepcopy": lambda cls, make: vars_of(copy.deepcopy(make())),
    "set": lambda cls, make: _error(lambda: setattr(make(), "a", 1)),
    "set other": lambda cls, make: _error(lambda: setattr(make(), "zzz", 1)),
    "delete": lambda cls, make: _error(lambda: delattr(make(), "a")),
    "missing": lambda cls, make: _error(lambda: cls()),
    "unknown": lambda cls, make: _error(lambda: cls(1, zzz=2)),
    "help": lambda cls, make: [one.name for one in inspect.classify_class_attrs(cls) if one.name != "__weakref__"],
}


def vars_of(value: Any) -> dict[str, Any]:
    """Return the fields of an instance by name."""
    return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}


def _hash(value: Any) -> int | str:
    return _error(lambda: hash(value)).partition(":")[0] if _error(lambda: hash(value)) != "no error" else hash(value)


def _error(function: Any) -> str:
    try:
        function()
    except (AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}".replace("known_classes", "late_classes")
    return "no error"


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", CALLS)
def test_a_first_use_gives_what_the_standard_decorator_gives(
        both: tuple[types.ModuleType, types.ModuleType], name: str, use: str) -> None:
    if (name, use) == ("Child", "replace"):
        pytest.skip("the constructor of this class does not take its fields")
    if name == "Options" and use in ("slots", "attributes") and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 repeats the slots of the base class")
    late, known = both
    assert _deferred(late.Plain) >= {"__init__", "__eq__", "__dataclass_fields__"}
    args, keywords = CALLS[name]

    def found(module: types.ModuleType) -> Any:
        cls = getattr(module, name)
        return USES[use](cls, lambda: cls(*args, **keywords))

    wanted = found(known)
    if use == "set other" and name in ("Slots", "Options"):  # Python 3.11 raises a TypeError for slots by mistake
        wanted = "FrozenInstanceError: cannot assign to field 'zzz'"
    assert repr(found(late)).replace("late_classes", "known_classes") \
        == repr(wanted).replace("late_classes", "known_classes")


@pytest.mark.parametrize("name", ["Plain", "Slots", "Options", "Mutable"])
def test_an_instance_that_was_pickled_elsewhere_is_the_first_one(
        both: tuple[types.ModuleType, types.ModuleType], name: str) -> None:
    """An instance may exist before anything called the class."""
    late, known = both
    args, keywords = CALLS[name]
    text = pickle.dumps(getattr(known, name)(*args, **keywords), protocol=2).replace(b"known_classes", b"late_classes")
    assert b"late_classes" in text and "__init__" in _deferred(getattr(late, name))
    loaded = pickle.loads(text)
    assert "__init__" in _deferred(getattr(late, name))
    assert vars_of(loaded) == vars_of(getattr(late, name)(*args, **keywords))
    assert loaded == getattr(late, name)(*args, **keywords)


def test_only_the_methods_that_are_used_are_generated(both: tuple[types.ModuleType, types.ModuleType]) -> None:
    late, _ = both
    made = late.Plain(1)
    assert _deferred(late.Plain) == {"__repr__", "__eq__", "__hash__"}
    assert made == late.Plain(1) and hash(made) == hash(late.Plain(1))
    assert _deferred(late.Plain) == {"__repr__"}


def test_threads_that_use_a_class_first() -> None:
    """A thread never finds a class without its methods while another thread generates them."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    errors: list[BaseException] = []
    try:
        for _ in range(60):
            module = _module("late_classes", _dataclasses.dataclass)
            barrier = threading.Barrier(4)

            def use(module: types.ModuleType = module, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                try:
                    for _ in range(20):
                        assert module.Plain(1) == module.Plain(1) and len(dataclasses.fields(module.Plain)) == 4
                        assert module.Options(1, c=2).c == 2
                        assert hash(module.Plain(1)) == hash(module.Plain(1))
                        assert repr(module.Plain(1)) == "Plain(a=1, b=(), d=4)"
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=use) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
        del sys.modules["late_classes"]
    assert not errors, errors[0]
