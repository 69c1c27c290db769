"""Pools of this process, as the runtime sees them.

:class:`mpool.Pool` stands in a tier above; it registers itself here and fits the protocol :class:`Host`.
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


class Host(Protocol):
    """The part of a pool that entries, events, metrics and health use.

    Entries are ``Any`` here: :mod:`mpool.runtime.entry` imports this module.
    """

    config: PoolConfig
    _registry: _core.Registry | None
    _closed: bool
    _callbacks: tuple[tuple[str, Any], ...]
    _full_since: dict[str, float]

    @property
    def registry(self) -> _core.Registry:
        """The core's registry; the first use creates it."""

    @property
    def pools(self) -> Mapping[str, Any]:
        """Capability -> its pool."""

    def embed(self, *args: Any, **options: Any) -> Any:
        """See :func:`mpool.embed`."""

    def embed_image(self, *args: Any, **options: Any) -> Any:
        """See :func:`mpool.embed_image`."""

    def generate(self, *args: Any, **options: Any) -> Any:
        """See :func:`mpool.generate`."""

    def _find(self, model: Any, capability: str | None = None) -> Any: ...

    def _known(self, model: Any, capability: str | None) -> Any: ...

    def _require(self, entry: Any, capability: str) -> Any: ...

    def _name_idle(self, error: MemoryExhausted, key: str) -> None: ...

    def _stats(self) -> dict[str, Any]: ...


_lock = threading.Lock()
_hosts: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def register(identity: str, host: Host) -> None:
    """Adds a pool under its identity. The reference is weak. Thread-safe."""
    with _lock:
        _hosts[identity] = host


def find(identity: str) -> Any:
    """The pool of an identity, or None. Thread-safe."""
    with _lock:
        return _hosts.get(identity)


def hosts() -> list[Any]:
    """Every pool that exists. Thread-safe."""
    with _lock:
        return list(_hosts.values())


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
