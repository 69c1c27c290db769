"""Address space that native libraries need, checked before they are used.

Libraries end the process if they cannot allocate memory: OpenBLAS calls ``exit()`` or raises SIGINT, and code in Rust
aborts. A limit on the address space (``ulimit -v``) makes that likely. Therefore mpool reserves the space before the
call, gives it back, and raises MemoryError if there is too little. Another thread may take the space meanwhile: this
makes such an end unlikely, not impossible.
"""

from __future__ import annotations

import mmap
import os
from resource import RLIM_INFINITY, RLIMIT_AS, RLIMIT_STACK, getrlimit

_MB = 1 << 20
_FLAGS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0) | getattr(mmap, "MAP_NORESERVE", 0)
#: Address space of numpy with its OpenBLAS, measured with numpy 2.4.6 (83 MB), and the buffer of each further thread.
_NUMPY, _BLAS_BUFFER = 96 * _MB, 32 * _MB
#: Maximum number of threads of the OpenBLAS in numpy's wheels; stack of a thread if the limit of stacks is infinite.
_BLAS_THREADS, _STACK = 64, 8 * _MB


def is_limited() -> bool:
    """Return True if the process has a limit on its address space."""
    return getrlimit(RLIMIT_AS)[0] != RLIM_INFINITY


def require(count: int, user: str, hint: str = "") -> None:
    """Raise MemoryError unless ``count`` bytes of address space are free.

    Args:
        user: subject of the message, in the singular.
        hint: further sentence of the message.
    """
    try:
        mmap.mmap(-1, count, flags=_FLAGS).close()
    except OSError:
        raise MemoryError(f"{user} needs {count // _MB} MB of address space{hint}") from None


def require_if_limited(count: int, user: str) -> None:
    """As :func:`require` if the process has a limit on its address space; else the system decides."""
    if is_limited():
        require(count, user)


def require_for_numpy() -> None:
    """Raise MemoryError unless numpy can be imported: its OpenBLAS starts a thread per CPU, each with a buffer."""
    if not is_limited():
        return
    threads, stack = _blas_threads(), getrlimit(RLIMIT_STACK)[0]
    each = _BLAS_BUFFER + (_STACK if stack == RLIM_INFINITY else stack)
    require(_NUMPY + (threads - 1) * each, "numpy",
            f" for {threads} threads of OpenBLAS; OPENBLAS_NUM_THREADS=1 reduces it" if threads > 1 else "")


def _blas_threads() -> int:
    try:
        most = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on macOS
        most = os.cpu_count() or 1
    for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "").partition(",")[0]
        if value.isdecimal() and int(value) > 0:
            most = min(most, int(value))
            break
    return min(most, _BLAS_THREADS)


__all__ = ["is_limited", "require", "require_for_numpy", "require_if_limited"]
