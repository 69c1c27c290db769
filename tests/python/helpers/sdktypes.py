"""Values of the types that clients give to requests: for each field, option and member of a union, one value."""

import collections.abc
import types
import typing
from collections.abc import Iterator
from typing import Any

_LISTS = (list, collections.abc.Iterable, collections.abc.Sequence, tuple)


def variants(kind: Any, inside: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a type: first the smallest value, then values that differ from it in one part.

    The name of a value is its path: ``.field`` of a TypedDict, ``[]`` of a list, ``{}`` of a dict, ``=value`` of a
    literal, and ``:type`` (or ``:role``) of a TypedDict with such a field. Types that contain themselves end there.

    Args:
        kind: Type of a field: TypedDict, pydantic class, union, literal, list, dict or scalar.
        inside: TypedDicts that contain the field.
    """
    kind = _bare(kind)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for part in parts:
            yield from variants(part, inside)
    elif origin is typing.Literal:
        yield from ((f"={value}", value) for value in parts)
    elif hasattr(kind, "__required_keys__") or hasattr(kind, "model_fields"):
        if kind not in inside:
            yield from _objects(kind, (*inside, kind))
    elif origin in _LISTS or kind is list:
        yield from ((f"[]{name}", [value]) for name, value in variants(parts[0] if parts else str, inside))
    elif origin in (dict, collections.abc.Mapping) and parts[1] in (Any, object):
        yield "{}", {}
    elif origin in (dict, collections.abc.Mapping):
        yield from (("{}" + name, {"a": value}) for name, value in variants(parts[1], inside))
    elif kind in _SCALARS:
        yield "", _SCALARS[kind]


_SCALARS: dict[Any, Any] = {str: "x", bool: True, int: 1, float: 0.5, object: {}, Any: {}}


def fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Return the fields of a TypedDict or a pydantic class: the type of each, and whether it is required."""
    if hasattr(kind, "model_fields"):
        return {name: (field.annotation, field.is_required()) for name, field in kind.model_fields.items()}
    found = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        marked = str(typing.get_origin(hint))
        found[name] = hint, kind.__total__ if "Required" not in marked else "NotRequired" not in marked
    return found


def _objects(kind: Any, inside: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    given = {name: (list(variants(hint, inside)), required) for name, (hint, required) in fields(kind).items()}
    base = {name: values[0][1] for name, (values, required) in given.items() if required and values}
    tag = next((f":{base[name]}" for name in ("type", "role") if isinstance(base.get(name), str)), "")
    yield tag, base
    for name, (values, _) in given.items():
        yield from ((f"{tag}.{name}{part}", {**base, name: value}) for part, value in values[name in base:])


def _bare(kind: Any) -> Any:
    """Return a type without Annotated, Required, NotRequired, ReadOnly and the name of an alias."""
    while True:
        if hasattr(kind, "__value__"):
            kind = kind.__value__
        elif typing.get_origin(kind) is typing.Annotated or "Required" in str(typing.get_origin(kind)) \
                or "ReadOnly" in str(typing.get_origin(kind)):
            kind = typing.get_args(kind)[0]
        else:
            return kind
