"""A tokenizer in a process of its own, for regular expressions that may take exponential time.

The process has limits on memory and on the time of a call, no standard error, and is killed when a call takes too long;
the next call starts it again. It ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence

from .. import interpreter
from ..errors import LimitError, Unsupported
from . import limits

#: Memory of the process in bytes, and seconds that it has to start.
_MEMORY, _START = 4 << 30, 60.0

#: Reads frames of 8 bytes of length and JSON from standard input, and answers each with such a frame. The first frame
#: is the tokenizer.
_PROGRAM = """
import json, os, resource, signal, sys
sys.path[:0] = sys.argv[1:2]
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import Tokenizer

def read():
    head = sys.stdin.buffer.read(8)
    return json.loads(sys.stdin.buffer.read(int.from_bytes(head, "little"))) if len(head) == 8 else os._exit(0)

def write(value):
    data = json.dumps(value).encode()
    sys.stdout.buffer.write(len(data).to_bytes(8, "little") + data)
    sys.stdout.buffer.flush()

made = Tokenizer.from_str(read()["json"])
made.no_truncation()
made.no_padding()
write({})
while True:
    call = read()
    signal.alarm(call["seconds"])  # the default action ends the process, also if its parent is gone
    made.encode_special_tokens = call["plain"]
    try:
        ids = [made.encode(text, add_special_tokens=call["special"]).ids for text in call["texts"]]
        write({"ids": ids})
    except BaseException as error:
        write({"error": str(error)[:300]})
    signal.alarm(0)
"""


class IsolatedTokenizer:
    """A tokenizer in a process, which starts at the first call. Thread-safe: calls run one after another.

    Args:
        source: content of a ``tokenizer.json``.
        plain: True if the texts of special tokens are plain text.
    """

    class Failed(Exception):
        """The tokenizer failed on a text; the process is still usable."""

    def __init__(self, source: str, plain: bool) -> None:
        self._source, self._plain = source, plain
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process id of this process when it started the other one

    def encode(self, texts: Sequence[str], add_special: bool) -> list[Sequence[int]]:
        """Encode texts.

        Raises:
            Failed: an expression of the tokenizer gave up on a text.
            LimitError: the call took more than ``limits.max_tokenizing_seconds``, or too much memory.
            Unsupported: the process cannot be started.
            UnicodeEncodeError, TypeError: a text contains a lone surrogate, or is not a string.
        """
        for text in texts:
            text.encode()
        seconds = limits.max_tokenizing_seconds
        call = {"texts": list(texts), "special": add_special, "plain": self._plain, "seconds": int(seconds) + 2}
        with self._held(time.monotonic() + seconds):
            try:
                if self._process is None or self._owner != os.getpid():
                    self._start()
                found = self._ask(call, time.monotonic() + seconds)
            except (OSError, EOFError, ValueError, TimeoutError) as error:
                self._stop()
                raise LimitError(f"the tokenizer of the model needs more than {seconds:g} seconds or "
                                 f"{_MEMORY >> 30} GB for this text", param="text",
                                 hint="Its regular expressions take too many steps; "
                                      "mpool.tokenizers.limits.max_tokenizing_seconds raises the limit") from error
            except BaseException:
                self._stop()  # interrupted in the middle of a frame
                raise
        if "error" in found:
            raise self.Failed(found["error"])
        ids: list[Sequence[int]] = found["ids"]
        return ids

    @contextlib.contextmanager
    def _held(self, deadline: float):  # type: ignore[no-untyped-def]
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise LimitError("the tokenizer of the model is busy with other texts", param="text")
        try:
            yield
        finally:
            self._lock.release()

    def _start(self) -> None:
        import tokenizers

        python, reason = interpreter.find()
        if reason:
            raise Unsupported("the tokenizer of the model has a regular expression that may take exponential time, and "
                              f"a process of its own for it needs a Python interpreter: {reason}")
        folder = os.path.dirname(os.path.dirname(os.path.abspath(tokenizers.__file__)))
        try:
            self._process = subprocess.Popen([python, "-I", "-c", _PROGRAM, folder, str(_MEMORY)],
                                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                             start_new_session=True, env={**os.environ, "RUST_BACKTRACE": "0"})
        except OSError as error:
            raise Unsupported(f"the process of the tokenizer cannot be started: {error.strerror or error}") from None
        self._owner = os.getpid()
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe.fileno(), False)  # type: ignore[union-attr]
        weakref.finalize(self, _end, self._process, self._owner)
        self._ask({"json": self._source}, time.monotonic() + _START)

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _end(process, self._owner)

    def _ask(self, value: object, deadline: float) -> dict[str, list[Sequence[int]]]:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        data = json.dumps(value).encode()
        to, source = self._process.stdin.fileno(), self._process.stdout.fileno()
        rest = memoryview(len(data).to_bytes(8, "little") + data)
        while rest:
            _wait(to, select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(to, rest[:1 << 16]):]
        found: dict[str, list[Sequence[int]]] = json.loads(
            _receive(source, int.from_bytes(_receive(source, 8, deadline), "little"), deadline))
        return found


def _wait(file: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(file, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
        raise TimeoutError


def _receive(file: int, size: int, deadline: float) -> bytearray:
    found = bytearray()
    while len(found) < size:
        _wait(file, select.POLLIN, deadline)
        with contextlib.suppress(BlockingIOError):
            part = os.read(file, min(size - len(found), 1 << 20))
            if not part:
                raise EOFError
            found += part
    return found


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Kill the process and close its pipes; in a forked child, only close the child's copies of the pipes."""
    if owner == os.getpid():
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


__all__ = ["IsolatedTokenizer"]
