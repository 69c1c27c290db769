"""Before a fork, wait until imports that other threads have begun are complete.

mpool imports modules on first use. A forked child does not have the thread that imports a module, but it inherits the
module's import lock: without this wait, the child's next import of that module would never return.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

#: Packages whose imports a fork waits for, with those of the standard library. Other modules may run a whole program.
_PACKAGES = frozenset(("mpool", "PIL", "filelock", "fsspec", "hf_xet", "httpx", "huggingface_hub", "jinja2",
                       "llguidance", "markupsafe", "msgspec", "numpy", "requests", "sse_starlette", "starlette",
                       "tokenizers", "tqdm", "uvicorn", "yaml")) | sys.stdlib_module_names
#: Longest wait in seconds.
_SECONDS = 5.0
#: Names of the modules that are being imported. The import system of CPython has no public way to ask.
_locks: Mapping[str, Any] = getattr(sys.modules.get("_frozen_importlib"), "_module_locks", {})


def _others_import() -> bool:
    """Return True if another thread imports a module of these packages."""
    names = {name for name in list(_locks) if name.partition(".")[0] in _PACKAGES}
    frame = sys._getframe().f_back if names else None
    while names and frame is not None:  # a module that this thread imports has a frame of its own
        names.discard(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return bool(names)


#: The only module of these packages whose handlers take a lock before a fork and release it after, besides logging and
#: mpool's own.
_EXECUTORS = "concurrent.futures.thread"


def _shutdown_lock(complete: bool) -> Any:
    """Return the lock of :mod:`concurrent.futures` that a fork holds; None: it does not exist, or, if ``complete``, its
    module is not imported completely."""
    if complete and _EXECUTORS in _locks:
        return None
    return getattr(sys.modules.get(_EXECUTORS), "_global_shutdown_lock", None)


def _wait_for_imports() -> None:
    lock = _shutdown_lock(complete=False)
    # Python has listed the handlers of this fork. It calls those of a module that was imported completely by now.
    called = _shutdown_lock(complete=True) is not None or (lock is not None and lock.locked())
    end = time.monotonic() + _SECONDS
    while _others_import() and time.monotonic() < end:
        time.sleep(0.001)
    if not called and (lock := _shutdown_lock(complete=True)) is not None:
        # The module was imported during the wait. Python will call only its handler after the fork, which releases the
        # lock.
        lock.acquire()


# Handlers run in reverse order: those of mpool's other modules before this one, and that of `logging` after it, which
# takes a lock that nearly every module needs while it is imported.
assert logging
os.register_at_fork(before=_wait_for_imports)
