"""The tenant of the request that is being prepared, and caches whose keys hold it.

What is prepared from a caller's own text (a compiled format, a plan with a prompt) is kept for the next request of the
same tenant only: otherwise its response time would tell what another tenant has sent. The core does the same with the
numbers of tenants that requests carry (csrc/models/cache_key.h).
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")

_current: ContextVar[int] = ContextVar("mpool_tenant", default=0)


def current() -> int:
    """Return the core's number of the tenant whose request is being prepared; 0: it names none."""
    return _current.get()


@contextmanager
def preparing(tenant: int) -> Iterator[None]:
    """Set the tenant of the block, also for calls that it starts on threads for native calls."""
    token = _current.set(tenant)
    try:
        yield
    finally:
        _current.reset(token)


class TenantCache(Generic[K, V]):
    """An ordered dictionary of values of the current tenant. The caller limits its size; not thread-safe."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[int, K], V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return the current tenant's value, or None."""
        return self._entries.get((current(), key))

    def __setitem__(self, key: K, value: V) -> None:
        self._entries[current(), key] = value

    def move_to_end(self, key: K) -> None:
        """Make a value of the current tenant the newest."""
        self._entries.move_to_end((current(), key))

    def __len__(self) -> int:
        return len(self._entries)

    def values(self) -> ValuesView[V]:
        """Return the values of all tenants."""
        return self._entries.values()

    def popitem(self, last: bool = True) -> None:
        """Drop the newest or the oldest value of all tenants."""
        self._entries.popitem(last)


def cached(maxsize: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator like :func:`functools.lru_cache` whose results are those of the current tenant."""
    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        @functools.lru_cache(maxsize)
        def of_tenant(tenant: int, *args: Any) -> T:
            return function(*args)

        @functools.wraps(function)
        def call(*args: Any) -> T:
            return of_tenant(current(), *args)

        return call
    return decorate


__all__ = ["TenantCache", "cached", "current", "preparing"]
