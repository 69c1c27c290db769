"""The server's life cycle: a socket, uvicorn on one event loop, signals, and a shutdown that ends every request."""

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
from .application import OPERATIONS, make_app
from .protocol import hardened
from .state import State

if TYPE_CHECKING:
    from ..pool import Pool
    from .operations import Operation
    from .settings import Settings

log = logging.getLogger("mpool.server")

#: Bytes of a response that the system buffers for a client that does not read; its default is megabytes.
_UNSENT = 128 << 10
#: Files that the process needs beside its connections; the default of ``last`` of :class:`Serving` in seconds.
_FILES, _LAST = 256, 2.0
#: Length of the system's queue of new connections, and connections accepted in one turn of the loop: without free
#: file descriptors asyncio fails once for each of these, and retries after a second.
_BACKLOG, _ACCEPTED = 2048, 32
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _Uvicorn(uvicorn.Server):
    """uvicorn's server without its signal handlers; it closes the pool while requests drain."""

    def __init__(self, config: uvicorn.Config, state: State) -> None:
        super().__init__(config)
        self.state = state

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """Capture nothing: :class:`Serving` handles signals, and the process goes on after the server's end."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse further requests. Requests in flight end; the pool fails those that outlast its grace period."""
        self.state.stopping = True
        closing = threading.Thread(target=self.state.pool.close, name="mpool-server-close")
        closing.start()
        await super().shutdown(sockets)
        while closing.is_alive():
            await asyncio.sleep(0.01)


class Serving:
    """A server for a pool, on a thread of the caller's choice.

    Args:
        settings: address, clients and limits.
        pool: closed when the server ends; requests in flight then get its ``shutdown_grace``.
        models: see :class:`mpool.server.models.Models`.
        catalogue: also serve the catalogue's models whose files are on this machine.
        compute: compute type of all models.
        operations: the routes.
        last: seconds that clients get to read their last bytes after the pool was closed.

    Attributes:
        port: the port that the server listens on.
        url: the server's base URL.

    Raises:
        FileError: the server cannot listen on the address.
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
        config = uvicorn.Config(
            make_app(self.state, operations), http=hardened(settings), ws="none", lifespan="off", log_config=None,
            access_log=False, loop="asyncio", proxy_headers=False, server_header=False, backlog=_ACCEPTED,
            interface="asgi3", timeout_graceful_shutdown=int(pool.config.shutdown_grace + last + 0.999))
        self._uvicorn = _Uvicorn(config, self.state)

    def run(self, ready: Callable[[], object] | None = None) -> None:
        """Serve until :meth:`stop`, or, on the main thread, SIGTERM or SIGINT. A second signal cuts the requests in
        flight off.

        Args:
            ready: called once the server accepts connections.
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
        """Log an error of asyncio. Connections that cannot be accepted are logged once a second, not once each."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
            loop.default_exception_handler(context)
        elif loop.time() >= self._quiet_until:
            self._quiet_until = loop.time() + 1.0
            log.warning("New connections have to wait: %s", error.strerror)

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
        """End :meth:`run`. Thread-safe and idempotent."""
        self._uvicorn.should_exit = True

    def close(self) -> None:
        """Release the address of a server that will not run."""
        self._socket.close()


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # IPPROTO_TCP must be named: asyncio sets TCP_NODELAY only on sockets that say so
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNSENT)  # accepted connections inherit it
        made.bind((settings.host, settings.port))
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise FileError(f"the server cannot listen on {settings.host}:{settings.port}: {error.strerror or error}",
                        hint="Choose another --port, or --port 0 for a free one") from None
    return made


def _allow_files(connections: int) -> None:
    """Raise the process's limit of open files as far as the connections need it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


__all__ = ["Serving"]
