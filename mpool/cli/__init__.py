"""The command ``mpool``.

Exit codes: 0 done; 1 failed, with the reason and what to do on standard error; 2 wrong usage; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

FAILED, INTERRUPTED = 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments after the program's name; None: those of this process.

    Returns:
        the exit code.
    """
    try:
        return _run(argv)
    except KeyboardInterrupt:
        pass
    except Exception as error:
        if not _follows_interrupt(error):
            raise
    print("mpool: interrupted", file=sys.stderr)
    return INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    from ..errors import MpoolError
    from .parser import make_parser

    arguments = make_parser().parse_args(argv)
    _prepare(arguments)
    try:
        code: int = arguments.run(arguments) or 0
        sys.stdout.flush()
        return code
    except MpoolError as error:
        print(f"mpool: {error}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # whoever read our output has enough; without this, Python complains when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except UnicodeDecodeError as error:
        print(f"mpool: standard input is not UTF-8 text: {error.reason}. Convert it first, as with iconv",
              file=sys.stderr)
        return FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"mpool: {where}{error.strerror or error}", file=sys.stderr)
        return FAILED


def _follows_interrupt(error: BaseException | None) -> bool:
    """Whether an error was made of a Ctrl-C, as code does that is interrupted while it is imported."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _prepare(arguments: object) -> None:
    """Streams that take any character, and log records where ``--verbose`` wants them."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    verbose = getattr(arguments, "verbose", 0)
    if verbose:
        import logging

        logging.basicConfig(level=logging.DEBUG if verbose > 1 else logging.INFO,
                            format="%(levelname)s %(name)s: %(message)s")
        if verbose == 1:  # what other libraries have to say is for -vv
            logging.getLogger().setLevel(logging.WARNING)
            logging.getLogger("mpool").setLevel(logging.INFO)


__all__ = ["main"]
