"""Forward log records of the core to Python's ``logging``.

The core writes records into a bounded ring and never to a file descriptor. One daemon thread moves them to the logger
``mpool.pool``; it starts with the first pool and is joined at exit. To see the records, call
``logging.basicConfig(level="INFO")``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

#: Poll interval of the ring in seconds: the usual one, and the one while events have callbacks.
PERIOD, HURRIED = 0.25, 0.02

for _name in ("mpool", "mpool.pool", "mpool.models"):
    logging.getLogger(_name).addHandler(logging.NullHandler())

log = logging.getLogger("mpool")
pool_log = logging.getLogger("mpool.pool")


#: Function that calls the callbacks of events; set when the first callback is added.
deliver: Callable[[], None] | None = None


class _Drain:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.thread: threading.Thread | None = None
        self.level, self.period = -1, PERIOD
        self.hurried = threading.Event()

    def start(self) -> None:
        with self.lock:
            if self.thread is None and not self.stopping.is_set():
                self.update_level()
                self.thread = threading.Thread(target=self.run, name="mpool-log", daemon=True)
                self.thread.start()

    def update_level(self) -> None:
        """Pass the logger's level to the core, which writes no records below it."""
        from .. import _core

        level = pool_log.getEffectiveLevel()
        if level != self.level:
            _core.set_log_level(level)
            self.level = level

    def run(self) -> None:
        while not self.stopping.is_set():
            if self.period == HURRIED:
                self.stopping.wait(HURRIED)
            elif self.hurried.wait(PERIOD):
                self.hurried.clear()
            try:
                self.update_level()
                self.flush()
                self.deliver()
            except MemoryError:  # these records are lost; the next round may have memory again
                continue

    def deliver(self) -> None:
        # Import nothing here: a dataclass that is defined while the interpreter exits discards a pending Ctrl-C.
        if deliver is not None:
            try:
                deliver()
            except Exception:
                pool_log.exception("Events were lost")

    def flush(self) -> None:
        from .. import _core

        for level, text in _core.drain_log():
            try:
                pool_log.log(level, "%s", text)
            except Exception:  # a handler of the program failed; go on with the other records
                pass

    def stop(self) -> None:
        with self.lock:
            thread, self.thread = self.thread, None
            self.stopping.set()
            self.hurried.set()
        if thread is not None:
            thread.join(5.0)
            self.flush()


_drain = _Drain()


def start() -> None:
    """Start the thread unless it is running."""
    if _drain.thread is None:
        _drain.start()


def hurry(on: bool) -> None:
    """Poll more often from now on (``on``), or at the usual rate again."""
    _drain.period = HURRIED if on else PERIOD
    _drain.hurried.set()


def flush() -> None:
    """Log the records that are in the ring now."""
    _drain.flush()


def stop() -> None:
    """Drain the ring a last time and join the thread."""
    _drain.stop()


def _after_fork_in_child() -> None:
    global _drain
    _drain = _Drain()


os.register_at_fork(after_in_child=_after_fork_in_child)
