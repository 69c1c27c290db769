"""The Python interpreter that child processes run."""

from __future__ import annotations

import os
import re
import sys

_PYTHON = re.compile("py(thon|py)|graalpy", re.IGNORECASE)


def find() -> tuple[str, str]:
    """Return the path of the Python that multiprocessing would start, and the reason why it cannot be used.

    The reason is empty if the path is usable. In a frozen application (PyInstaller, cx_Freeze) or a program that
    embeds Python, ``sys.executable`` would start the program again; ``multiprocessing.set_executable`` chooses another.
    """
    spawn = sys.modules.get("multiprocessing.spawn")  # not imported: set_executable was not called
    given = spawn.get_executable() if spawn is not None else None
    path = os.fsdecode(given) if given else ""
    chosen = bool(path) and path != sys.executable
    path = path if chosen else sys.executable or ""
    if not path:
        return path, "sys.executable is empty"
    if getattr(sys, "frozen", False) and not chosen:
        return path, f"this application is frozen, and {path} would start the application instead of Python"
    if not chosen and not _PYTHON.search(os.path.basename(path)):
        return path, f"sys.executable is {path}, which does not look like a Python interpreter"
    return path, ""


__all__ = ["find"]
