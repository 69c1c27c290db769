"""Workers that are processes of their own: what they are started with. The rest is in the core, ``csrc/isolation``."""

from __future__ import annotations

import sys

from .errors import InvalidArgument, SpawnFailed

#: Where a model's workers run.
ISOLATION = ("thread", "process")
# Nothing but ctypes and the core: such a process needs neither numpy nor this package, and no site.
_START = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).mp_isolation_main())"


def check(isolation: object, what: str) -> None:
    """Checks a value that a caller gave.

    Raises:
        InvalidArgument: it is none of :data:`ISOLATION`.
    """
    if not isinstance(isolation, str) or isolation not in ISOLATION:
        from .catalog.json_strict import shorten

        raise InvalidArgument(f"{what} is {shorten(repr(isolation))}, allowed: " + ", ".join(ISOLATION))


def command() -> tuple[str, ...]:
    """What starts a worker process.

    Raises:
        SpawnFailed: it is not known which Python this is.
    """
    from . import _core

    if not sys.executable:
        raise SpawnFailed("sys.executable is empty, so no worker process can be started",
                          hint='Use isolation="thread", or set sys.executable to a Python of this version')
    return (sys.executable, "-I", "-S", "-c", _START, _core.__file__)
