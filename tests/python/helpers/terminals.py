"""The command ``mpool`` in a process whose output is read while it runs, with pipes or in a terminal."""

import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Enable Ctrl-C, which a shell disables for tests that run in the background.
START = ("import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
         "from mpool.cli import main; sys.exit(main())")
#: Working directory of commands. It must not contain the sources, because ``python -c`` imports from it first.
ELSEWHERE = Path(__file__).parent.parent


def command(*arguments: str) -> list[str]:
    """Return the command line, to be run in ELSEWHERE."""
    return [sys.executable, "-c", START, *arguments]


class Talk:
    """A running command, whose output can be read while it runs."""

    def __init__(self, child: subprocess.Popen[bytes], read: int, write: int) -> None:
        self.child, self.read, self.write = child, read, write
        self.seen = b""

    def send(self, text: str) -> None:
        """Send input."""
        os.write(self.write, text.encode())

    def until(self, wanted: str, timeout: float = 120) -> str:
        """Wait for a text in the new output. Return the output up to and including it."""
        end = time.monotonic() + timeout
        while wanted.encode() not in self.seen:
            left = end - time.monotonic()
            assert left > 0 and select.select([self.read], [], [], left)[0], f"{wanted!r} not in {self.seen!r}"
            try:
                more = os.read(self.read, 65536)
            except OSError:  # the other side of the terminal is closed
                more = b""
            assert more, f"{wanted!r} not in {self.seen!r} at the end of the output"
            self.seen += more
        head, found, self.seen = self.seen.partition(wanted.encode())
        return (head + found).decode(errors="replace")

    def wait_for_input(self) -> None:
        """Let the child reach its read: it handles a signal between prompt and read only after the next key. Its main
        thread then sleeps, and nothing wakes it."""
        path = Path(f"/proc/{self.child.pid}/status")
        if not path.exists():  # no Linux
            time.sleep(2.0)
            return
        quiet, before = 0, ""
        while quiet < 20:
            time.sleep(0.01)
            now = "".join(line for line in path.read_text().splitlines() if line.startswith(("State", "voluntary")))
            quiet = quiet + 1 if now == before and "sleeping" in now else 0
            before = now

    def some(self, count: int = 20) -> None:
        """Wait for ``count`` bytes of output and discard them."""
        while len(self.seen) < count:
            assert select.select([self.read], [], [], 120)[0]
            self.seen += os.read(self.read, 65536)
        self.seen = b""


@contextmanager
def talk(*arguments: str, terminal: str = "", **env: str) -> Iterator[Talk]:
    """Start the command, with standard output and standard error combined.

    Args:
        arguments: command line behind ``mpool``.
        terminal: type of a terminal of 80 columns and 24 lines (``TERM``); "": pipes.
        env: further variables.
    """
    if terminal:
        import fcntl
        import termios

        outer, inner = os.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        child = subprocess.Popen(command(*arguments), stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
                                 cwd=ELSEWHERE,
                                 preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
                                 env={**os.environ, "TERM": terminal, "INPUTRC": "/dev/null",
                                      "PROMPT_TOOLKIT_NO_CPR": "1", **env})
        os.close(inner)
        read = write = outer
    else:
        child = subprocess.Popen(command(*arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, bufsize=0, cwd=ELSEWHERE)
        assert child.stdout is not None and child.stdin is not None
        read, write = child.stdout.fileno(), child.stdin.fileno()
    try:
        yield Talk(child, read, write)
    finally:
        child.kill()
        child.wait()
        if terminal:
            os.close(read)
        else:
            child.stdin.close()
            child.stdout.close()
