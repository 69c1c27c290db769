"""Parser of ``PoolConfig.chaos``, which injects faults for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .checks import integer, real, shown
from .errors import InvalidArgument

FAULTS = ("fail", "stall", "die", "slow", "memory")
_ALLOWED = (f"None, or a seed and the probabilities per step of {', '.join(FAULTS)}, such as "
            '"seed=7,fail=0.01,stall=0.002" or a dict with the same keys')


def chaos_of(value: str | Mapping[str, float] | None) -> tuple[int, float, float, float, float, float] | None:
    """Return the seed and the probability of each of :data:`FAULTS`; None: off.

    Raises:
        InvalidArgument: the value does not have the format that :class:`mpool.PoolConfig` describes.

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
                raise _wrong(value, f"{name!r} is given twice")
            found[name] = _number(number)
    elif isinstance(value, Mapping):
        found = dict(value)
    else:
        raise _wrong(value, "it is neither a string nor a mapping")
    seed, rates = 0, dict.fromkeys(FAULTS, 0.0)
    for name, number in found.items():
        if name == "seed":
            whole = integer(number)
            if whole is None or not 0 <= whole < 2**64:
                raise _wrong(value, f"`seed` must be an integer from 0 to 2**64 - 1, got {number!r}")
            seed = whole
        elif name not in rates:
            raise _wrong(value, f"{name!r} is unknown")
        else:
            rate = real(number)
            if rate is None or not 0 <= rate <= 1:
                raise _wrong(value, f"`{name}` must be a probability from 0 to 1, got {number!r}")
            rates[str(name)] = rate
    if not any(rates.values()):
        raise _wrong(value, "every probability is 0; None turns chaos off")
    if sum(rates.values()) > 1 + 1e-9:
        raise _wrong(value, f"the sum of the probabilities must be at most 1, got {sum(rates.values()):g}")
    fail, stall, die, slow, memory = rates.values()
    return seed, fail, stall, die, slow, memory


def _number(text: str) -> object:
    """Return the text as a number, or unchanged if it is not a number."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _wrong(value: object, why: str) -> InvalidArgument:
    return InvalidArgument(f"`chaos` must be {_ALLOWED}, got {shown(value)}: {why}", param="chaos", got=shown(value),
                           allowed=_ALLOWED)
