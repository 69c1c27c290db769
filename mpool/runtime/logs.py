"""What the core has to say, through Python's ``logging``.

The core writes records into a bounded ring and never to a file descriptor; one daemon thread, started with the first
pool and joined at exit, moves them to the logger ``mpool.pool``. To see them: ``logging.basicConfig(level="INFO")``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

#: Seconds between two looks at the ring; while there are callbacks for events.
PERIOD, HURRIED = 0.25, 0.02

for _name in ("mpool", "mpool.pool", "mpool.models"):
    logging.getLogger(_name).addHandler(logging.NullHandler())

log = logging.getLogger("mpool")
pool_log = logging.getLogger("mpool.pool")


#: Hands over events to their callbacks; set with the first callback.
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
                self.adopt_level()
                self.thread = threading.Thread(target=self.run, name="mpool-log", daemon=True)
                self.thread.start()

    def adopt_level(self) -> None:
        """What nobody listens to is not written into the ring at all."""
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
                self.adopt_level()
                self.flush()
                self.deliver()
            except MemoryError:  # what was in hand is lost; the next round may have memory again
                continue

    def deliver(self) -> None:
        # nothing is imported here: a dataclass that is made while the interpreter exits has it forget a Ctrl-C
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
            except Exception:  # a handler's fault is its owner's; the other records still get their turn
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
    """Starts the thread unless it runs."""
    if _drain.thread is None:
        _drain.start()


def hurry(on: bool) -> None:
    """Looks more often from now on, or as usual again."""
    _drain.period = HURRIED if on else PERIOD
    _drain.hurried.set()


def flush() -> None:
    """Hands over what is in the ring now."""
    _drain.flush()


def stop() -> None:
    """Ends the thread, after a last look."""
    _drain.stop()


def _after_fork_in_child() -> None:
    global _drain
    _drain = _Drain()


os.register_at_fork(after_in_child=_after_fork_in_child)
