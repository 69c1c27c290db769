"""Registry of the pools of this process, and the interface of a pool that the runtime uses.

The runtime must not import :class:`mpool.Pool`, which is in a higher tier. A pool implements :class:`Host` and
registers itself here.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .. import _core
    from ..config import PoolConfig
    from ..errors import MemoryExhausted
    from .history import PoolHistory


class Host(Protocol):
    """Interface of a pool for entries, events, metrics and health.

    Entries and their names have the type ``Any`` here, because :mod:`mpool.runtime.entry` imports this module.
    """

    config: PoolConfig
    _registry: _core.Registry | None
    _closed: bool
    _history: PoolHistory
    _names: Any
    _callbacks: tuple[tuple[str, Any], ...]
    _full_since: dict[str, float]
    _worker_positions: dict[str, dict[int, int]]
    _degraded: dict[str, str]

    @property
    def registry(self) -> _core.Registry:
        """The core's registry; the first use creates it."""

    @property
    def closed(self) -> bool:
        """True after the pool began to shut down."""

    @property
    def pools(self) -> Mapping[str, Any]:
        """Snapshots of the pool by capability."""

    def embed(self, *args: Any, **options: Any) -> Any:
        """See :func:`mpool.embed`."""

    def embed_image(self, *args: Any, **options: Any) -> Any:
        """See :func:`mpool.embed_image`."""

    def generate(self, *args: Any, **options: Any) -> Any:
        """See :func:`mpool.generate`."""

    def generate_image(self, *args: Any, **options: Any) -> Any:
        """See :func:`mpool.generate_image`."""

    def vision(self, *args: Any, **options: Any) -> Any:
        """See :func:`mpool.vision`."""

    def _find(self, model: Any, capability: str | None = None) -> Any: ...

    def _known(self, model: Any, capability: str | None) -> Any: ...

    def _name_idle(self, error: MemoryExhausted, key: str) -> None: ...

    def _stats(self) -> dict[str, Any]: ...


_lock = threading.Lock()
_hosts: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def register(identity: str, host: Host) -> None:
    """Add a pool under its identity, with a weak reference. Thread-safe."""
    with _lock:
        _hosts[identity] = host


def find(identity: str) -> Any:
    """Return the pool with an identity, or None. Thread-safe."""
    with _lock:
        return _hosts.get(identity)


def hosts() -> list[Any]:
    """Return every existing pool. Thread-safe."""
    with _lock:
        return list(_hosts.values())


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
