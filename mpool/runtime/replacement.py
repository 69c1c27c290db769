"""The link from a model of a pool to the model that takes over its name."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from ..errors import SendError


class Replacement:
    """The replacement of a model and of all its networks: by other files, or by another model that gets the name.

    Order of locks: ``reading``, ``changing``, the lock of the model's entry, those of its networks, ``Names.lock``.
    ``successor`` is set with all of them but the first; a thread that holds the lock of one entry reads a
    ``successor`` that stays as it is. The other attributes change with ``changing``.

    Attributes:
        successor: the entry that took over the name (:meth:`mpool.runtime.entry.Entry.retire`); None: this one has it.
        handles: the handles that lead to the entry, by ``id()``.
        former: references that the name had before.
        kept: key in the core -> whether it was pinned, and its keep-alive in seconds, when the model was replaced.
        process: id of the process that created the entry.
        changing: held while the entry's models in the core are replaced.
        reading: held while changed files are read for a successor.
    """

    def __init__(self) -> None:
        self.successor: Any = None  # the type Entry is in a module that imports this one
        self.handles: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.former: tuple[str, ...] = ()
        self.kept: dict[str, tuple[bool, float]] = {}
        self.process = os.getpid()
        self.renew_locks()

    def renew_locks(self) -> None:
        """Replace the locks in a forked child, where the threads that held them do not exist."""
        self.changing, self.reading = threading.Lock(), threading.Lock()

    def require_current(self, key: str) -> None:
        """Raise SendError if another model has the name by now: the core's keys belong to that model."""
        if self.successor is not None:
            raise SendError("the model was replaced before the request was queued", key=key)


__all__ = ["Replacement"]
