"""The command-line interface ``mpool``.

Exit codes: 0 success; 2 if argparse cannot parse the command line; 1 for every other error, with the reason and a hint
on standard error; 130 interrupted.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from ..errors import MpoolError
from ..records import one_line, one_line_each, to_standard_error
from .layout import fit

FAILED, INTERRUPTED = 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments after the program name; None: ``sys.argv[1:]``.

    Returns:
        Exit code.
    """
    _replace_closed_streams()
    atexit.register(_discard_unwritten_errors)  # runs after the exit handlers of pools and logs
    try:
        return _run(argv)
    except KeyboardInterrupt:
        pass
    except Exception as error:
        if not _follows_interrupt(error):
            raise
    print("mpool: interrupted", file=sys.stderr)
    return INTERRUPTED


def _replace_closed_streams() -> None:
    """Open the null device for standard streams that the caller closed: input is empty, output is discarded.

    Python sets such a stream to None. Without a replacement, the next file that the process opens would become the
    standard output of native code and child processes.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _discard_unwritten_errors() -> None:
    """Discard buffered text that standard error refuses, for example on a full disk.

    Python flushes the buffer at exit and replaces the exit code by 120 if that fails.
    """
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    except (AttributeError, ValueError):  # no standard error, or it is closed
        pass


def _run(argv: Sequence[str] | None) -> int:
    from .parser import make_parser

    arguments = make_parser().parse_args(argv)
    _prepare(arguments)
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _note
        return _done(arguments)


def _note(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as the commands print notes: without the line of code that issued it."""
    print(fit(one_line(f"mpool: {message}"), sys.stderr), file=sys.stderr)


def _done(arguments: Any) -> int:
    try:
        code: int = arguments.run(arguments) or 0
        sys.stdout.flush()
        return code
    except MpoolError as error:
        from .messages import text_of

        print(fit(f"mpool: {one_line_each(text_of(error, arguments))}", sys.stderr), file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # the reader closed the pipe; redirect standard output so that the flush at exit does not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except UnicodeDecodeError as error:
        print(f"mpool: standard input is not UTF-8 text: {error.reason}. Convert it first, for example with iconv",
              file=sys.stderr)
        return FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(one_line(f"mpool: {where}{error.strerror or error}"), file=sys.stderr)
        return FAILED


def _follows_interrupt(error: BaseException | None) -> bool:
    """Return True if a KeyboardInterrupt caused the error, such as the ImportError of an interrupted import."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _prepare(arguments: object) -> None:
    """Make the standard streams accept any character, and log to standard error with ``--verbose``."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")  # a byte order mark is no text
    verbose = getattr(arguments, "verbose", 0)
    if verbose:
        to_standard_error(verbose)


__all__ = ["main"]
