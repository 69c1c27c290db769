"""What ``PoolConfig.chaos`` says, read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import InvalidArgument

FAULTS = ("fail", "stall", "die", "slow", "memory")


def chaos_of(value: str | Mapping[str, float] | None) -> tuple[int, float, float, float, float, float] | None:
    """Seed and the chance of each of :data:`FAULTS`; None: off.

    Raises:
        InvalidArgument: it is not as :class:`mpool.PoolConfig` describes it.

    Example:
        >>> from mpool.chaos import chaos_of
        >>> chaos_of("seed=7, fail=0.01, slow=0.05")
        (7, 0.01, 0.0, 0.0, 0.05, 0.0)
    """
    if value is None:
        return None
    if isinstance(value, str):
        found: dict[Any, Any] = {}
        for part in value.split(","):
            name, equals, number = (text.strip() for text in part.partition("="))
            if not equals or not name or not number:
                raise _wrong(value, f"{part.strip()!r} is not name=number")
            if name in found:
                raise _wrong(value, f"{name!r} is there twice")
            found[name] = _number(number)
    elif isinstance(value, Mapping):
        found = dict(value)
    else:
        raise _wrong(value, "it is neither a string nor a mapping")
    seed, chances = 0, dict.fromkeys(FAULTS, 0.0)
    for name, number in found.items():
        if name == "seed":
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**64:
                raise _wrong(value, f"seed is {number!r}, allowed: an integer from 0 to 2**64 - 1")
            seed = number
        elif name not in chances:
            raise _wrong(value, f"there is no {name!r}")
        elif isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= 1:
            raise _wrong(value, f"{name} is {number!r}, allowed: a chance from 0 to 1")
        else:
            chances[str(name)] = float(number)
    if not any(chances.values()):
        raise _wrong(value, "no fault has a chance; None turns chaos off")
    if sum(chances.values()) > 1 + 1e-9:
        raise _wrong(value, f"the chances are {sum(chances.values()):g} together, allowed: at most 1")
    fail, stall, die, slow, memory = chances.values()
    return seed, fail, stall, die, slow, memory


def _number(text: str) -> object:
    """The number, or the text if it is none."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _wrong(value: object, why: str) -> InvalidArgument:
    return InvalidArgument(f"PoolConfig.chaos is {value!r}: {why}; allowed: None, or seed and chances a step of "
                           f'{", ".join(FAULTS)}, as "seed=7,fail=0.01,stall=0.002" or as a mapping')
