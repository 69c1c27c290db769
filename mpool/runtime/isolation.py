"""Start command of worker processes. ``csrc/isolation`` implements them."""

from __future__ import annotations

import os
import re
import sys

from ..checks import one_of
from ..errors import SpawnFailed
from ..names import ISOLATION

# Imports only ctypes and loads the core: a worker process needs neither numpy, nor this package, nor site.
_START = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).mp_isolation_main())"
_PYTHON = re.compile("py(thon|py)|graalpy", re.IGNORECASE)


def check(isolation: object, what: str) -> None:
    """Check the value of the option named ``what``.

    Raises:
        InvalidArgument: the value is not one of :data:`ISOLATION`.
    """
    one_of(what, isolation, ISOLATION)


def _executable() -> tuple[str, bool]:
    """Return the Python that multiprocessing would start, and True if ``multiprocessing.set_executable`` set it."""
    spawn = sys.modules.get("multiprocessing.spawn")  # not imported: set_executable was not called
    chosen = spawn.get_executable() if spawn is not None else None
    path = os.fsdecode(chosen) if chosen else ""
    return (path, True) if path and path != sys.executable else (sys.executable or "", False)


def command() -> tuple[str, ...]:
    """Return the command of a worker process, with the Python that multiprocessing would start.

    Raises:
        SpawnFailed: the Python executable is unknown or another program: a frozen application (PyInstaller, cx_Freeze)
            or a program that embeds Python would start itself again.
    """
    from .. import _core

    path, chosen = _executable()
    what = ""
    if not path:
        what = "sys.executable is empty"
    elif getattr(sys, "frozen", False) and not chosen:
        what = f"this application is frozen, and {path} would start the application instead of Python"
    elif not chosen and not _PYTHON.search(os.path.basename(path)):
        what = f"sys.executable is {path}, which does not look like a Python interpreter"
    if what:
        raise SpawnFailed(f"no worker process can be started: {what}",
                          hint='Use isolation="thread", or set the path of a Python of this version with '
                               "multiprocessing.set_executable(path)")
    return (path, "-I", "-S", "-c", _START, _core.__file__)
