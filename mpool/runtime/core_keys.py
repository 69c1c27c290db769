"""The keys of a model in the core's registry: one for each compute type that requests used."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..checks import one_of
from ..errors import Timeout, UnknownModel
from ..models.spec import Adapter
from ..names import COMPUTE
from . import isolation as _isolated
from .model_files import ModelFiles
from .replacement import Replacement
from .setup import Setup

if TYPE_CHECKING:
    from .hosts import Host

#: Maximum length of a key of the core, in bytes.
_MAX_KEY = 240


class CoreKeys:
    """The keys of one network of a model. Thread-safe.

    A key is added under ``lock``, the lock of the entry, from the check that the model still has its name until the
    core has the key: the name cannot get another model meanwhile. The spec that the core gets may need the tokenizer,
    which is built under the same lock.

    Attributes:
        revision: number of the model in the core. A request that was prepared for one revision never runs on another.
    """

    def __init__(self, pool: Host, name: str, files: ModelFiles, setup: Setup, replacement: Replacement,
                 revision: int, lock: threading.RLock) -> None:
        self._pool, self._name, self._files, self._setup = pool, name, files, setup
        self._replacement, self.revision, self.lock = replacement, revision, lock
        self._keys: dict[str, str] = {}  # compute type -> key

    def __contains__(self, compute: object) -> bool:
        return compute in self._keys

    def all(self) -> list[str]:
        """Return the keys in use."""
        return list(dict.fromkeys(list(self._keys.values())))

    def computes(self) -> list[str]:
        """Return the compute types that have keys of their own in the core."""
        auto = self._keys.get("auto")
        return [compute for compute, key in list(self._keys.items()) if compute == "auto" or key != auto]

    def key_for(self, compute: str) -> str:
        """Return the key for a compute type. The first use adds the key, and loads nothing.

        The load begins when the first request is submitted, so a request that is refused before loads no model and
        evicts none.
        """
        key = self._keys.get(compute) if isinstance(compute, str) else None
        if key is not None:
            return key
        if not isinstance(compute, str) or compute not in COMPUTE:
            one_of("compute", compute, COMPUTE, key=self._files.key)
        with self.lock:
            self._replacement.require_current(self._files.key)
            if compute not in self._keys:
                self._keys[compute] = self._key_with_compute(compute) or self.add_cold(compute)
        return self._keys[compute]

    def _key_with_compute(self, compute: str) -> str | None:
        """Return the key of the ``"auto"`` entry if that is loaded with this compute type."""
        auto = self._keys.get("auto")
        if auto is not None:
            for row in self._pool.registry.entries():
                if row["key"] == auto and (row.get("facts") or {}).get("compute") == compute:
                    return auto
        return None

    def add_cold(self, compute: str, replace: bool = False, staged: bool = False) -> str:
        """Add the model to the core's registry without loading it, and return its key. Must hold ``lock``, but for a
        model that has no name yet.

        Args:
            compute: compute type, which the key includes unless it is ``"auto"``.
            replace: the key exists: the core replaces its model once this one is loaded.
            staged: the core replaces the model when :mod:`mpool.runtime.swapping` commits the replacement.
        """
        key = _shortened(self._name if compute == "auto" else f"{self._name} ({compute})")
        # The core has float32 with the setting mpool.float32_fast. A worker process opens only a library that the user
        # named, and the core must choose the same use of the weights there as here.
        fast = compute == "float32-fast" and (self._setup.runs_in == "thread" or _names_blas())
        compute_type = "float32" if compute == "float32-fast" else compute
        adapters = self._setup.adapters()
        spec = self._make_spec(self._files, adapters, fast)
        draft = self._setup.use_draft()
        if draft is not None:
            spec.set_draft(self._make_spec(draft, [], fast))
        registry = self._pool.registry
        if not replace and not staged:
            self._remove_stray(key)
        if self._setup.runs_in == "process":
            registry.add(key, spec, compute_type, replace, _isolated.command(), self._pool.config.process_memory,
                         revision=self.revision, staged=staged, environment=_isolated.environment())
        else:
            registry.add(key, spec, compute_type, replace, revision=self.revision, staged=staged)
        self._keys[compute] = key  # first: the registry now has the key, whatever fails below
        kept = self._replacement.kept.get(key)
        if kept is not None and not staged:
            registry.keep_alive(key, kept[1], pin=kept[0])
        return key

    def replace_all(self) -> None:
        """Replace the models of all keys by models with the present setup. Must hold ``lock``."""
        for compute in self.computes():
            self.add_cold(compute, replace=True)

    def _remove_stray(self, key: str) -> None:
        """Remove a key that the core has and this object lacks. Must hold ``lock``.

        A fork, or an interrupt of the thread, leaves such a key if it comes between a change of the core and the change
        of the object that belongs to it.
        """
        registry = self._pool.registry
        if not self._replacement.changing.locked() and any(row["key"] == key for row in registry.entries()):
            with contextlib.suppress(Timeout, UnknownModel):
                registry.remove(key, timeout=0.0)

    def _make_spec(self, files: ModelFiles, adapters: list[tuple[int, Adapter]], fast: bool) -> Any:
        """Return the core's spec of the model, or of its draft model, from the files."""
        description = files.describe()
        spec = description.spec.with_adapters(adapters).to_core()
        if self._setup.weights != "auto":
            spec.set("mpool.weights", self._setup.weights)
        if self._setup.kv_dtype != "auto" and description.generation is not None:
            spec.set("mpool.kv_dtype", self._setup.kv_dtype)
        if fast:
            spec.set("mpool.float32_fast", True)
        if description.generation is not None:
            table = files.token_table()
            spec.set_tokens(table.data, np.ascontiguousarray(table.offsets, dtype=np.int64), table.control,
                            sorted({*table.eog, *description.generation.eog_token_ids}))
        stamps = [*files.stamps(), *(adapter.stamps for _, adapter in adapters)]
        spec.note_files({path: stamp for one in stamps for path, stamp in one.items()})
        files.require_unchanged(self._setup.changed() if files is self._files else None)
        return spec

    def remember(self, keys: set[str]) -> None:
        """Remember pin and keep-alive of keys in the core, before another version of the model gets them."""
        self._replacement.kept.update({row["key"]: (row["pinned"], row["keep_alive"]) for row in
                                       (self._pool.registry.entries() if keys else ()) if row["key"] in keys})


def _shortened(key: str) -> str:
    """Return a key that is short enough for the core."""
    if len(key.encode()) <= _MAX_KEY:
        return key
    end = key.encode()[-_MAX_KEY // 2:].decode(errors="ignore")
    return "..." + hashlib.sha256(key.encode()).hexdigest()[:12] + end


def _names_blas() -> bool:
    """Return True if MPOOL_BLAS has a value: a library, or "none"."""
    return any(name == "MPOOL_BLAS" and value for name, value, *_ in _core.options())


__all__ = ["CoreKeys"]
