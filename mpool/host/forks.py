"""Before a fork, wait until imports that other threads have begun are complete.

mpool imports modules on first use. A forked child does not have the thread that imports a module, but it inherits the
module's import lock: without this wait, the child's next import of that module would never return.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from contextlib import suppress

#: Packages whose imports a fork waits for, with those of the standard library. Other modules may run a whole program.
_PACKAGES = frozenset(("mpool", "PIL", "filelock", "fsspec", "hf_xet", "httpx", "huggingface_hub", "jinja2",
                       "llguidance", "markupsafe", "msgspec", "numpy", "requests", "sse_starlette", "starlette",
                       "tokenizers", "tqdm", "uvicorn", "yaml")) | sys.stdlib_module_names


def _wait_for_imports() -> None:
    """Import every module of these packages that an import has begun with: that waits for the thread which began it."""
    known: set[str] = set()
    while threading.active_count() > 1 and (new := [name for name in list(sys.modules) if name not in known]):
        known.update(new)
        for name in new:
            if name.partition(".")[0] in _PACKAGES:
                with suppress(Exception):  # the thread that imports it gets the error
                    importlib.import_module(name)
        time.sleep(0.001)  # a thread that has found a module's file needs a moment to begin with the module


# The handler of logging takes a lock that nearly every module needs while it is imported. It is registered first, and
# therefore runs after this one.
assert logging
os.register_at_fork(before=_wait_for_imports)
