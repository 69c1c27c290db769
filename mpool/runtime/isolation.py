"""Start command of worker processes. ``csrc/isolation`` implements them."""

from __future__ import annotations

import os
from contextlib import suppress

from .. import _core
from ..errors import SpawnFailed
from ..host import interpreter

# Imports only ctypes and loads the core: a worker process needs neither numpy, nor this package, nor site.
_START = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).mp_isolation_main())"


def command() -> tuple[str, ...]:
    """Return the command of a worker process, with the Python that multiprocessing would start.

    Raises:
        SpawnFailed: the path of the Python executable is unknown, or names another program. A frozen application
            (PyInstaller, cx_Freeze) or a program that embeds Python would start itself again.
    """
    path, reason = interpreter.find()
    if reason:
        raise SpawnFailed(f"no worker process can be started: {reason}",
                          hint='Use isolation="thread", or set the path of a Python of this version with '
                               "multiprocessing.set_executable(path)")
    return (path, "-I", "-S", "-c", _START, _core.__file__)


def environment() -> list[bytes]:
    """Return the variables of this process, ``NAME=value``, for a worker process.

    They come from ``os.environ``, which any thread may change meanwhile: the core cannot read the C library's
    ``environ`` without a race.
    """
    found = []
    for name in list(os.environ):
        with suppress(KeyError):
            found.append(os.fsencode(f"{name}={os.environ[name]}"))
    return found
