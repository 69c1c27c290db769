"""A worker server for tests in a thread of this process, and clients that post jobs and read their events."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import waiting
from servers import Raw, running, server_idle
from mpool.server.worker import Worker, worker_config, worker_settings

TERMINAL = ("end", "error")
until = functools.partial(waiting.until, seconds=60)
Event = tuple[str, dict[str, Any]]


@contextmanager
def working(ref: Any, limits: dict[str, Any] | None = None, **options: Any) -> Iterator[Worker]:
    """Run a worker inside a ``with`` block, and check that it stops at the end.

    Args:
        ref: model reference.
        limits: fields of the pool's config to replace.
        options: further arguments of `Worker`.
    """
    config = dataclasses.replace(worker_config(grace=1.0), **(limits or {}))
    worker = Worker(ref, worker_settings(0), config, **options)
    with running(worker.run, worker.serving.stop):
        yield worker


class Events:
    """A posted job, as an iterator over its events."""

    def __init__(self, server: Any, **body: Any) -> None:
        self.raw = Raw(server, 120).request("/execute", json.dumps(body).encode())
        self._data = b""
        while b"\r\n\r\n" not in self._data:
            self._more()
        head, _, self._data = self._data.partition(b"\r\n\r\n")
        self.status = int(head.split()[1])
        assert self.status == 200 and b"text/event-stream" in head, (head, self._data)
        self._text, self.over = b"", False

    def _more(self) -> None:
        part = self.raw._read()
        if not part:
            raise ConnectionError("the connection was closed before the end of the response")
        self._data += part

    def _chunk(self) -> None:
        """Read the next chunk of the body."""
        while b"\r\n" not in self._data:
            self._more()
        size, _, self._data = self._data.partition(b"\r\n")
        count = int(size, 16)
        while len(self._data) < count + 2:
            self._more()
        self._text += self._data[:count]
        self._data, self.over = self._data[count + 2:], count == 0

    def __iter__(self) -> Iterator[Event]:
        while True:
            while b"\n\n" not in self._text:
                if self.over:
                    assert not self._text
                    return
                self._chunk()
            block, _, self._text = self._text.partition(b"\n\n")
            text = block.decode()  # no event ends inside a UTF-8 character
            if not text.startswith(":"):
                name, data = text.split("\n")
                yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))

    def close(self) -> None:
        """Close the connection."""
        self.raw.socket.close()


def run(server: Any, **body: Any) -> list[Event]:
    """Run a job and return all its events. Checks their order: one start, tokens in order, one end."""
    events = Events(server, **body)
    found = list(events)
    events.close()
    names = [name for name, _ in found]
    assert names[0] == "started" and names[-1] in TERMINAL and set(names[1:-1]) <= {"token"}, names
    numbers = [data["i"] for name, data in found if name == "token"]
    assert numbers == sorted(numbers) and (not numbers or numbers[0] >= 0)
    assert len(set(numbers[:-1])) == len(numbers[:-1])  # the last token event may repeat the number of the one before
    return found


def refused(server: Any, **body: Any) -> tuple[int, dict[str, Any]]:
    """Post a job that is refused. Returns the HTTP status and the error."""
    with Raw(server, 60) as raw:
        status, _, data = raw.request("/execute", json.dumps(body).encode()).response()
    return status, json.loads(data)


def text_of(events: list[Event]) -> str:
    """Return the text that a job generated."""
    return "".join(data["t"] for name, data in events if name == "token")


def free(worker: Worker) -> None:
    """Wait until the worker has no running or waiting job and its server is idle."""
    until(lambda: worker.jobs.running is None and not worker.jobs.waiting)
    server_idle(worker.serving, 60)
