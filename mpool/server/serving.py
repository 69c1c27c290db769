"""The server's life: a socket, uvicorn on one event loop, signals, and an end at which nobody is left without one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from ..errors import FileError
from .app import OPERATIONS, make_app
from .protocol import Connection
from .state import State

if TYPE_CHECKING:
    from ..pool import Pool
    from .operations import Operation
    from .settings import Settings

log = logging.getLogger("mpool.server")

#: Bytes that the system holds of an answer that its client does not read; by itself it would hold megabytes.
_UNSENT = 128 << 10
#: Seconds between two looks at what takes too long; files that the process needs beside connections; ``last`` of
#: Serving.
_LOOK, _FILES, _LAST = 1.0, 256, 2.0
#: Connections that the system keeps until they are accepted, and that are accepted in one turn of the loop: where there
#: are no descriptors left, asyncio fails at so many in a turn, and tries again after a second.
_BACKLOG, _ACCEPTED = 2048, 32
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, which leaves signals and the pool's end to :class:`Serving`."""

    def __init__(self, config: uvicorn.Config, state: State) -> None:
        super().__init__(config)
        self.state = state

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """Nothing: signals end the server and not, afterwards, the process."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)
        self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        pause = min(_LOOK, *(getattr(self.state.settings, name) / 4 for name in
                             ("header_timeout", "body_timeout", "write_timeout", "idle_timeout")))
        while True:
            await asyncio.sleep(pause)
            now = loop.time()
            for connection in list(self.server_state.connections):
                try:
                    connection.look(now)  # type: ignore[union-attr]
                except Exception:
                    log.exception("A connection could not be looked at")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """No further requests; those in flight end, or fail when the pool's grace is over: it tells each."""
        self.state.stopping = True
        closing = threading.Thread(target=self.state.pool.close, name="mpool-server-close")
        closing.start()
        await super().shutdown(sockets)
        while closing.is_alive():
            await asyncio.sleep(0.01)
        self._looking.cancel()


class Serving:
    """A server for a pool, on a thread of the caller's choice.

    Args:
        settings: where and for whom.
        pool: it is closed when the server ends; its ``shutdown_grace`` is the time that requests get then.
        models: see :class:`mpool.server.models.Models`.
        catalogue: whether keys of the catalogue may be named.
        compute: class of arithmetic of all models.
        operations: what it does.
        last: seconds that connections get to take their last bytes after the pool was closed.

    Attributes:
        port: the one it listens on.
        url: where it is.

    Raises:
        FileError: the address cannot be listened on.
        and what :class:`mpool.server.models.Models` raises.
    """

    def __init__(self, settings: Settings, pool: Pool, models: Any = (), catalogue: bool = True,
                 compute: str = "auto", operations: tuple[Operation, ...] = OPERATIONS, last: float = _LAST) -> None:
        self.state = State(settings, pool, models, catalogue, compute)
        self._socket = _listen(settings)
        self.port: int = self._socket.getsockname()[1]
        self.state.hosts = settings.hosts(self.port)
        self.url = f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{self.port}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._quiet_until = 0.0
        protocol = type("Connection", (Connection,), {"settings": settings})
        config = uvicorn.Config(
            make_app(self.state, operations), http=protocol, ws="none", lifespan="off", log_config=None,
            access_log=False, loop="asyncio", proxy_headers=False, server_header=False, backlog=_ACCEPTED,
            interface="asgi3", timeout_graceful_shutdown=int(pool.config.shutdown_grace + last + 0.999))
        self._uvicorn = _Uvicorn(config, self.state)

    def run(self, ready: Callable[[], object] | None = None) -> None:
        """Serves until :meth:`stop`, or SIGTERM or SIGINT if this is the main thread; a second one of these ends at
        once what the first one lets end.

        Args:
            ready: called when connections are accepted.
        """
        _allow_files(self.state.settings.max_connections)
        asyncio.run(self._run(ready))

    async def _run(self, ready: Callable[[], object] | None) -> None:
        self._loop = loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._failed)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._end)
        if ready is not None:
            loop.call_soon(self._tell, ready)
        await self._uvicorn.serve(sockets=[self._socket])

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What asyncio has to say: of connections that cannot be accepted one line a second, not one each."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
            loop.default_exception_handler(context)
        elif loop.time() >= self._quiet_until:
            self._quiet_until = loop.time() + 1.0
            log.warning("Connections have to wait: %s", error.strerror)

    def _tell(self, ready: Callable[[], object]) -> None:
        assert self._loop is not None
        if self._uvicorn.started:
            ready()
        else:
            self._loop.call_later(0.005, self._tell, ready)

    def _end(self) -> None:
        if self._uvicorn.should_exit:
            self._uvicorn.force_exit = True
        self._uvicorn.should_exit = True

    def stop(self) -> None:
        """Ends :meth:`run`; from any thread. Idempotent."""
        self._uvicorn.should_exit = True

    def close(self) -> None:
        """Gives up the address of a server that is never going to run."""
        self._socket.close()


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # of TCP by name: else asyncio does not know it for one, and leaves its small writes to wait for each other
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNSENT)  # connections have it from here
        made.bind((settings.host, settings.port))
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise FileError(f"{settings.host}:{settings.port} cannot be listened on: {error.strerror or error}",
                        hint="Choose another --port, or --port 0 for one that is free") from None
    return made


def _allow_files(connections: int) -> None:
    """Raises the process's own limit of open files where so many connections need it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


__all__ = ["Serving"]
