"""Events of a server: loads, unloads, deaths of workers, downloads and refused requests, in bounded memory.

Refusals have a list of their own: clients choose how many there are, and must not drive out the death of a worker.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from .. import errors
from ..errors import sentence
from ..runtime import metrics
from ..runtime.history import NAME
from ..stores import STORES
from .errors import CODE_OF_NAME, memory_text

if TYPE_CHECKING:
    from ..pool import Pool
    from ..runtime.events import PoolEvent
    from .errors import Refusal

Kind = Literal["load", "load_failed", "unload", "death", "download", "download_failed", "refusal"]
#: Maximum number of refusals, and of other events.
KEPT = (STORES["events"].entries or 0) // 2
#: Maximum length of a reason, and of a path.
_REASON, _PATH = 300, 128
#: Seconds after an unload during which another worker may still become ready that was loading.
_LATE = 2.0
#: Reason for which the pool unloads a model -> text.
_UNLOADED = {
    "keep_alive": "It was idle for as long as its keep-alive.", "memory": "Its memory was needed.",
    "call": "A client or the program asked for it.", "fault": "Its workers failed.",
    "changed_files": "Its files changed: the next request loads the new ones.",
}
#: Name of an error -> what it means: the first sentence of the class's documentation.
_MEANINGS = {found.name: (found.__doc__ or "").split("\n")[0] for found in vars(errors).values()
             if isinstance(found, type) and issubclass(found, errors.MpoolError)}


class ServerEvent(Struct):
    """An event.

    ``time``: seconds since 1970 at which it happened last. ``kind``: ``load``, ``load_failed``, ``unload``, ``death``
    (of a worker), ``download``, ``download_failed``, or ``refusal`` (of a request). ``code``: code of the error, as
    clients see it; of an unload ``keep_alive``, ``memory``, ``call``, ``fault`` or ``changed_files``, null for a moment
    until it is known. ``reason``: why, as text for people. ``seconds``: duration of a load, null if unknown.
    ``worker``: its number.
    ``path``, ``client``: of a refused request. ``count``: number of equal refusals that followed each other.
    """

    time: float
    kind: Kind
    model: str | None
    reason: str
    code: str | None = None
    seconds: float | None = None
    worker: int | None = None
    path: str | None = None
    client: str | None = None
    count: int = 1


class EventList:
    """The last events of a server. Thread-safe.

    Args:
        pool: Pool whose models and workers are watched.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._events: deque[ServerEvent] = deque(maxlen=KEPT)
        self._refusals: deque[ServerEvent] = deque(maxlen=KEPT)
        self._workers: dict[str, set[int]] = {}  # core key -> workers that serve it
        self._loaded: set[str] = set()  # core keys whose load is in the list, and whose unload is not
        self._unloaded_at: dict[str, float] = {}  # core key -> time.monotonic()
        self._unexplained: deque[ServerEvent] = deque(maxlen=KEPT)  # unloads whose reason was not counted yet
        self._evictions: dict[str, dict[str, int]] = {}  # core key -> reason -> unloads in the list
        self._started = False

    def start(self) -> None:
        """Watch the pool. Idempotent."""
        if self._started or self._pool.closed:
            return
        self._started = True
        for kind, handler in (("ready", self._ready), ("evict", self._evicted), ("fail", self._failed)):
            self._pool.on(kind, handler)  # type: ignore[arg-type]
        for row in metrics.sample(self._pool)[1]:
            self._workers[row["key"]] = {worker["id"] for worker in row["worker"]}
            self._evictions[row["key"]] = dict(row["evictions"])
            if row["worker"]:
                self._loaded.add(row["key"])

    # ---- clients -----------------------------------------------------------------------------------------------------

    def refused(self, refusal: Refusal, path: str, client: str | None, model: str | None = None) -> None:
        """Add a refused or failed request."""
        found = ServerEvent(time.time(), "refusal", model[:NAME] if model else None, refusal.message[:_REASON],
                            refusal.code, path=path[:_PATH], client=client)
        with self._lock:
            if self._refusals:
                last = self._refusals[-1]
                if (last.code, last.model, last.path, last.client, last.reason) == \
                        (found.code, found.model, found.path, found.client, found.reason):
                    found.count = self._refusals.pop().count + 1
            self._refusals.append(found)

    def add(self, kind: Kind, model: str, reason: str, code: str | None = None, seconds: float | None = None,
            worker: int | None = None) -> None:
        """Add an event of a model."""
        with self._lock:
            self._events.append(ServerEvent(time.time(), kind, model[:NAME], reason[:_REASON],
                                            CODE_OF_NAME.get(code or "", code), seconds, worker))

    # ---- the pool, on the thread that drains its events --------------------------------------------------------------

    def _ready(self, event: PoolEvent) -> None:
        workers = self._workers.setdefault(event.model, set())
        workers.add(event.worker_id or 0)
        if event.model in self._loaded:
            return
        row = self._row(event.model)
        if row is not None and row["state"] not in ("cold", "evicting") \
                or event.timestamp - self._unloaded_at.get(event.model, -_LATE) >= _LATE:
            # not a second worker that became ready while the model was being unloaded
            self._loaded.add(event.model)
            self.add("load", event.model, "", seconds=row["load_seconds"] or None if row is not None else None)

    def _row(self, key: str) -> dict[str, Any] | None:
        if self._pool.closed:
            return None
        return next((row for row in self._pool.registry.entries() if row["key"] == key), None)

    def _evicted(self, event: PoolEvent) -> None:
        workers = self._workers.setdefault(event.model, set())
        workers.discard(event.worker_id or 0)
        if workers or event.model not in self._loaded:
            return  # the model stays loaded: a single worker was stopped because it was idle
        self._loaded.discard(event.model)
        self._unloaded_at[event.model] = event.timestamp
        self.add("unload", event.model, "")
        with self._lock:
            self._unexplained.append(self._events[-1])

    def _explain(self) -> None:
        """Give the unloads their reasons, which the pool counts a moment after the last worker has ended."""
        for event in self._unexplained.copy():
            row = self._row(event.model or "")
            if row is None:
                continue
            counted = self._evictions.setdefault(row["key"], {})
            for name, count in row["evictions"].items():
                if count > counted.get(name, 0):
                    counted[name] = counted.get(name, 0) + 1
                    event.code, event.reason = name, _UNLOADED.get(name, "")
                    self._unexplained.remove(event)
                    break

    def _failed(self, event: PoolEvent) -> None:
        workers = self._workers.setdefault(event.model, set())
        served = event.worker_id in workers
        workers.discard(event.worker_id or 0)
        if not workers:  # its replacement loads the model again
            self._loaded.discard(event.model)
        cause = sentence(event.reason) if event.reason else ""
        if not served and event.status == errors.MemoryExhausted.name:
            cause = memory_text(cause)
        if not served and "/" in cause:  # a path, which only the log may have
            cause = ""
        self.add("death" if served else "load_failed", event.model, cause or _MEANINGS.get(event.status, ""),
                 event.status, worker=event.worker_id)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def latest(self) -> list[ServerEvent]:
        """Return all events, the latest first."""
        with self._lock:
            self._explain()
            return sorted((*self._events, *self._refusals), key=lambda one: one.time, reverse=True)

    def deaths(self) -> Mapping[str, list[ServerEvent]]:
        """Return the deaths of workers and failed loads of each model, the latest first."""
        found: dict[str, list[ServerEvent]] = {}
        with self._lock:
            for event in reversed(self._events):
                if event.kind in ("death", "load_failed"):
                    found.setdefault(event.model or "", []).append(event)
        return found


__all__ = ["KEPT", "EventList", "ServerEvent"]
