"""Give the name of a model to another model without failing a request.

The core keeps the old model under each key of the name and stages the new one beside it. Once every part of the new
model is loaded, one call of the core gives all keys to it, and the pool's names follow under the same locks. Requests
that the core accepted before are completed by the old model. A request carries the revision of the model that it was
prepared for (tokenized, rendered). If its key belongs to another revision when the request is submitted, the core
refuses the request, and the drivers in :mod:`mpool.tasks` prepare it again for the new model.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import (
    FileError,
    IntegrityError,
    MemoryExhausted,
    MpoolError,
    SendError,
    Timeout,
    UnknownModel,
    WrongCapability,
)
from . import deadlines as _deadlines
from .entry import Entry
from .load_options import LoadOptions

if TYPE_CHECKING:
    from .. import _core
    from .hosts import Host

_HINT = "The old model serves until the new one is loaded, so both must fit. unload() frees the old one first; " \
        "requests that arrive then load it again"


#: States of a model that loads its files again for the next request.
_UNLOADED = ("cold", "failed", "evicting")
#: Maximum number of seconds that a request of a forked process waits for the removal of a model.
_FORKED_SECONDS = 5.0

R = TypeVar("R")
T = TypeVar("T")


def for_current(prepare: Callable[[], R], use: Callable[[R], T]) -> T:
    """Prepare a request and use it; begin again if its model is replaced before the core accepts the request.

    Args:
        prepare: prepares the request (tokenizes, renders) for the model that has the name now. Its result has an
            ``entry``, or a ``plan`` with one.
        use: runs or submits the request.

    Returns:
        The result of ``use``. One model computed all of it.
    """
    while True:
        request: R | None = None
        try:
            request = prepare()
            return use(request)
        except (SendError, IntegrityError, FileError) as error:
            if not begins_again(request, error):
                raise


async def afor_current(prepare: Callable[[], Awaitable[R]], use: Callable[[R], Awaitable[T]]) -> T:
    """Asynchronous form of :func:`for_current`."""
    while True:
        request: R | None = None
        try:
            request = await prepare()
            return await use(request)
        except (SendError, IntegrityError, FileError) as error:
            if not begins_again(request, error):
                raise


def begins_again(request: Any, error: MpoolError) -> bool:
    """Return True if a request that raised this error must be prepared again: its model was replaced, or its files
    changed before the core loaded them."""
    if isinstance(error, SendError):
        return was_replaced(request)
    if request is not None and (error._outdated or isinstance(error, IntegrityError)):
        entry = _entry_of(request)
        entry.files.mark_outdated()  # the next request reads the files again, if they have changed
    return error._outdated


def ended_outdated(request: Any, ticket: _core.Ticket) -> bool:
    """Return True if a request must be prepared again because its finished ticket says so: the core refused to load the
    model, whose files had changed."""
    try:
        ticket.check()
    except (IntegrityError, FileError) as error:
        return begins_again(request, error)
    except MpoolError:  # the reader raises it, perhaps with another cause
        pass
    return False


def _entry_of(request: Any) -> Entry:
    found: Entry = request.plan.entry if hasattr(request, "plan") else request.entry
    return found


def was_replaced(request: Any) -> bool:
    """Return True if a request that raised SendError must be prepared again, because its model was replaced.

    Args:
        request: the prepared request. None: the preparation raised SendError, which it does only for this reason.
    """
    if request is None:
        return True
    entry = _entry_of(request)
    main = entry.main
    if not entry.was_replaced() and main.replacement.process != os.getpid():
        # The process was forked during a swap: its core has the new model, but its names lead to the old one.
        with contextlib.suppress(Timeout):
            renew(main, time.monotonic() + _FORKED_SECONDS)
    return entry.was_replaced()


def swap(old: Entry, new: Entry, load: bool, deadline: float | None, kept: LoadOptions | None = None) -> bool:
    """Give the name of ``old`` to ``new``. The pin and the keep-alive of the name stay.

    Args:
        old: entry that has the name.
        new: entry with the same key, whose files have been read.
        load: load the new model first, also if the old one is not loaded; False: only if the old one is loaded.
        deadline: value of ``time.monotonic()``; None: none.
        kept: options of ``old`` that ``new`` has, too; None: it keeps none.

    Returns:
        False, and nothing changed, if the name has other options than ``kept`` by now.

    Raises:
        WrongCapability: the new model lacks a capability of the old one.
        Timeout: the new model was not loaded in time, or another swap of the name took too long. The old one serves.
        MpoolError: the new model cannot be loaded; the old one serves.
    """
    with contextlib.ExitStack() as held:
        while not _hold(old, deadline, held):
            if kept is not None:
                return False
            old = old.latest()
        if kept is not None and old.loading != kept:
            return False
        parts = _parts(old, new)
        _Swap(old, new, parts, load or _is_loaded(old), deadline).run()
    return True


def is_current(entry: Entry) -> bool:
    """Return True unless :func:`current` has to read changed files."""
    main = entry.main
    return not main.files.outdated and main.changed(folders=True) is None


def current(entry: Entry, held: bool = False) -> Entry:
    """Return the entry that has the name, made of the files of now.

    If the files have changed, their new version gets the name beside the old one. The core completes the requests that
    it accepted for the old version. If reading the files fails, the old version keeps the name, and the next call reads
    them again. A loaded model whose weights are missing at their paths stays as it is: there is no new version.

    Args:
        entry: entry of a name.
        held: True for a handle, which looks no name up: a loaded model stays as it is.

    Raises:
        MpoolError: the files have changed and cannot be read.
    """
    main = entry.main
    if is_current(main):
        return main
    with contextlib.ExitStack() as locks:
        locks.enter_context(main.replacement.reading)
        if not main.replacement.changing.acquire(blocking=False):  # a swap of the name: it takes the files of now
            return main
        locks.callback(main.replacement.changing.release)
        if main.replacement.successor is not None:
            return main.latest()
        if not main.changed(folders=True):  # another thread has read them meanwhile
            main.files.outdated = False
            return main
        if main.forget_unless_added():
            return main
        if not main.files.outdated and (held or main.files.lost_weights()) and _is_loaded(main, _UNLOADED):
            return main
        new = main.unread()
        new.read()
        if main.adopt_stamps(new):
            main.files.outdated = False
            return main
        _give(main, new, locks)
        return new


def renew(old: Entry, deadline: float | None, pinned: bool = True) -> None:
    """Unload a model whose files changed, and give its name to an entry that reads them again on its next use.

    Requests that the core accepted before are completed with the old files; this waits for them. Requests that were
    prepared for the old files and come later are prepared again. Without effect if the name has another entry already.

    Args:
        old: entry that has the name.
        deadline: value of ``time.monotonic()``; None: none.
        pinned: the new version stays pinned if the old one is. It keeps the keep-alive in any case.

    Raises:
        Timeout: requests are still active; the core frees the memory when they have completed.
    """
    with contextlib.ExitStack() as held:
        if not _hold(old, deadline, held):
            return
        new = old.unread()
        if not pinned:
            kept = new.replacement.kept
            kept.update({key: (False, seconds) for key, (_, seconds) in kept.items()})
        keys = _give(old, new, held)
    wait_removed(old.pool, keys, deadline)


def wait_removed(pool: Host, keys: list[str], deadline: float | None) -> None:
    """Wait until the core has completed the requests of old models under these keys, and has freed the models.

    Raises:
        Timeout: requests are still active; the core frees the memory when they have completed.
    """
    for key in keys:
        pool.registry.wait_removed(key, timeout=_deadlines.remaining(deadline, key))


def _give(old: Entry, new: Entry, held: contextlib.ExitStack) -> list[str]:
    """Give the name of ``old``, whose ``changing`` must be held, to an entry that has no keys in the core. Returns the
    keys of the old model, which the core drops once it has completed their requests. ``held`` ends afterwards."""
    for part in (*old.known_parts(), new):  # requests add no key until the core has dropped the old ones
        held.enter_context(part.lock)
    held.enter_context(old.pool._names.lock)
    keys = old.core_keys()
    try:
        old.pool._names.hand_over(old, new)
        old.retire(new)
    finally:
        for key in keys:
            with contextlib.suppress(Timeout, UnknownModel):
                old.pool.registry.remove(key, timeout=0.0)
    return keys


def _hold(entry: Entry, deadline: float | None, held: contextlib.ExitStack) -> bool:
    """Hold ``changing`` of an entry until ``held`` ends. Returns False, and holds nothing, if it lost its name."""
    seconds = _deadlines.remaining(deadline, entry.key)
    if not entry.replacement.changing.acquire(timeout=-1 if seconds is None else seconds):
        raise Timeout("another swap of this model did not end within the timeout", key=entry.key,
                      hint="Raise `timeout`, or try again after the other swap")
    held.callback(entry.replacement.changing.release)
    if entry.replacement.successor is None:
        return True
    held.close()
    return False


def _parts(old: Entry, new: Entry) -> list[tuple[Entry, Entry]]:
    """Return the pairs of entries (old, new), one per capability and task of the old model."""
    had = {part.name_of_network: part for part in old.parts()}
    have = {part.name_of_network: part for part in new.parts()}
    if new.capability != old.capability or not set(had) <= set(have):
        raise WrongCapability(f"the new model's capabilities are {', '.join(have)}, those of the old one "
                              f"{', '.join(had)}", key=old.key, hint="Register it under another name")
    return [(had[name], part) for name, part in have.items() if name in had]


def _is_loaded(entry: Entry, without: tuple[str, ...] = ("cold",)) -> bool:
    """Return True if the core has the model in a state other than those of ``without``."""
    keys = set(entry.core_keys())
    return bool(keys) and any(row["key"] in keys and row["state"] not in without
                              for row in entry.pool.registry.entries())


class _Swap:
    """One attempt. Must hold ``old.replacement.changing``."""

    def __init__(self, old: Entry, new: Entry, parts: list[tuple[Entry, Entry]], load: bool,
                 deadline: float | None) -> None:
        self.old, self.new, self.parts, self.load, self.deadline = old, new, parts, load, deadline
        self.pool: Any = new.pool
        self.registry = new.pool.registry
        self.staged: list[str] = []
        self.alone: list[str] = []  # keys that the core did not have, because the old model cannot be read

    def run(self) -> None:
        try:
            while True:
                for key in self._stage():
                    self._load(key)
                with contextlib.ExitStack() as held:
                    for part, _ in self.parts:
                        held.enter_context(part.lock)
                    if self._missing():  # a request used a further compute type meanwhile
                        continue
                    held.enter_context(self.pool._names.lock)
                    self.registry.commit(tuple(self.staged), self.new.revision)
                    self._take_names()
                    return
        except BaseException as error:
            if not self._undo():  # the core had switched before the exception, such as KeyboardInterrupt
                return
            if isinstance(error, MemoryExhausted):
                error.hint = (f"{error.hint}. " if error.hint else "") + _HINT
            raise

    def _missing(self) -> list[tuple[Entry, Entry, str]]:
        """Return the old part, the new part and the compute type of every key that is to be staged."""
        return [(had, have, compute) for had, have in self.parts
                for compute in had.keys.computes() or (["auto"] if self.load else [])
                if compute not in have.keys]

    def _stage(self) -> list[str]:
        """Stage the new model under all keys of the old one. Returns the keys that must be loaded."""
        found = []
        for had, have, compute in self._missing():
            unknown = False
            with had.lock:
                if compute not in had.keys:
                    try:
                        had.keys.add_cold(compute)  # else a request for the old model could add the key before the swap
                    except MpoolError:
                        unknown = True
            key = have.keys.add_cold(compute, staged=True)
            (self.alone if unknown else self.staged).append(key)
            found.append(key)
        rows = {row["key"]: row for row in self.registry.entries()}
        for key in found:
            if key in rows:
                self.registry.keep_alive(key, rows[key]["keep_alive"])
        self.pinned = {key for key, row in rows.items() if row["pinned"]}
        self.pinned.update(key for key, (pinned, _) in self.old.replacement.kept.items() if pinned)
        return found if self.load else []

    def _load(self, key: str) -> None:
        for _, have in self.parts:
            if have.describe().tokenizes and have.describe().tokenizer is not None:
                have.tokenizer()
        self.registry.load(key, pin=key in self.pinned, timeout=_deadlines.remaining(self.deadline, key))

    def _take_names(self) -> None:
        """Give the pool's names to the new entry. Must hold the locks of the names and of the old entry."""
        was, now = self.old.replacement, self.new.replacement
        now.former, now.kept = (*was.former[-7:], self.old.ref), dict(was.kept)
        self.pool._names.hand_over(self.old, self.new)
        self.old.retire(self.new)

    def _undo(self) -> bool:
        """Drop what was staged. If the core has switched already, take the names instead and return False."""
        if self.old.replacement.successor is self.new:
            return False
        with contextlib.ExitStack() as held:
            for part, _ in self.parts:
                held.enter_context(part.lock)
            held.enter_context(self.pool._names.lock)
            withdrawn = [self.registry.withdraw(key, self.new.revision) for key in self.staged]
            if withdrawn and not all(withdrawn):
                self._take_names()
                return False
        for key in self.alone:
            with contextlib.suppress(MpoolError):
                self.registry.remove(key, timeout=0.0)
        return True


__all__ = ["afor_current", "begins_again", "current", "ended_outdated", "for_current", "is_current", "renew", "swap",
           "wait_removed", "was_replaced"]
