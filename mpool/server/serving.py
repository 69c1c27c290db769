"""Life cycle of the server: socket, uvicorn on one event loop, signals, and a shutdown that ends every request."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from .. import records
from ..errors import FileError, MpoolError, ShuttingDown
from ..host import native_calls
from ..host.resources import start_thread
from ..runtime.history import NAME
from .application import OPERATIONS, make_app
from .protocol import hardened
from .state import State

if TYPE_CHECKING:
    from ..pool import Pool
    from .operations import Operation
    from .settings import Settings

log = records.logger("mpool.server")
#: Records that an operator needs also without ``-v``: why a server that was told to stop still runs.
notices = records.logger("mpool.serve")

#: Size in bytes of the system's send buffer per connection. The system's default is megabytes.
_SEND_BUFFER = 128 << 10
#: File descriptors that the process needs in addition to its connections; default of ``Serving.drain`` in seconds.
_OTHER_FILES, _DRAIN = 256, 2.0
#: Maximum number of requests that the record of a stop names; exit code of a process that a second signal ends.
_NAMED, _INTERRUPTED = 5, 130
#: Length of the system's queue of new connections, and maximum number of connections accepted in one iteration of the
#: event loop. Without free file descriptors, all accepts of an iteration fail, and asyncio retries after a second.
_BACKLOG, _ACCEPTED = 2048, 32
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _Uvicorn(uvicorn.Server):
    """uvicorn's server without its signal handlers. On shutdown it closes the pool while requests drain."""

    def __init__(self, config: uvicorn.Config, state: State) -> None:
        super().__init__(config)
        self.state = state

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """Install no signal handlers: :class:`Serving` does, and the process continues after the server has stopped."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, and wait for requests in flight. The pool fails those that exceed its grace period."""
        self.state.stopping = True
        try:
            closing = start_thread(self.state.pool.close, "mpool-server-close")
        except MpoolError:  # no thread: stop accepting first, then close the pool on this thread
            self.state.pool.begin_shutdown()
            await super().shutdown(sockets)
            self.state.pool.close()
            return
        refusing = asyncio.create_task(self._refuse_after(closing))
        await super().shutdown(sockets)
        while closing.is_alive():
            await asyncio.sleep(0.01)
        refusing.cancel()

    async def _refuse_after(self, closing: threading.Thread) -> None:
        """Once the pool is closed, fail the requests that still wait for a native call: they cannot be submitted."""
        while closing.is_alive():
            await asyncio.sleep(0.01)
        while True:
            native_calls.refuse_callers(asyncio.get_running_loop(), ShuttingDown("the server is shutting down"))
            await asyncio.sleep(0.1)


class Serving:
    """A server for a pool. :meth:`run` serves on the calling thread.

    Args:
        settings: Address, access control and limits.
        pool: Pool that runs the requests. It is closed when the server stops; requests in flight then have its
            ``shutdown_grace`` to complete.
        models: Models to serve, as for :class:`mpool.server.models.Models`.
        catalogue: Serve also the models of the catalogue whose files are on this machine.
        compute: Compute type of all models.
        operations: Routes.
        drain: Seconds that clients have to read the end of their responses after the pool was closed.
        adapters: Adapters of the models, as for :class:`mpool.server.models.Models`.

    Attributes:
        state: State that all requests share.
        port: Port that the server listens on.
        url: Base URL of the server.

    Raises:
        FileError: The server cannot listen on the address.
        MpoolError: A model cannot be served; see :class:`mpool.server.models.Models`.
    """

    def __init__(self, settings: Settings, pool: Pool, models: Any = (), catalogue: bool = True,
                 compute: str = "auto", operations: tuple[Operation, ...] = OPERATIONS, drain: float = _DRAIN,
                 adapters: Iterable[str] = ()) -> None:
        self._socket = listen(settings)  # before files are read or downloaded
        try:
            self.state = State(settings, pool, models, catalogue, compute, adapters)
            self.state.events.start()  # before models are loaded
        except BaseException:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        self.state.hosts = settings.hosts(self.port)
        self.url = f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{self.port}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._quiet_until = 0.0
        config = uvicorn.Config(
            make_app(self.state, operations), http=hardened(settings, self.state.http.refused), ws="none",
            lifespan="off", log_config=None, access_log=False, loop="asyncio", proxy_headers=False,
            server_header=False, backlog=_ACCEPTED, interface="asgi3",
            timeout_graceful_shutdown=int(pool.config.shutdown_grace + drain + 0.999))
        for name in ("asyncio", "uvicorn.error"):  # their records about exceptions have texts of clients
            records.logger(name)
        self._uvicorn = _Uvicorn(config, self.state)

    def run(self, ready: Callable[[], object] | None = None) -> None:
        """Serve until :meth:`stop` is called or, on the main thread, until SIGTERM or SIGINT.

        The first signal logs what the server waits for. A second one ends the process at once, with exit code 130.

        Args:
            ready: Callback, called when the server accepts connections.
        """
        _allow_files(self.state.settings.max_connections)
        asyncio.run(self._run(ready))

    async def _run(self, ready: Callable[[], object] | None) -> None:
        self._loop = loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_error)
        self.state.begin()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal, number)
        if ready is not None:
            loop.call_soon(self._wait_until_ready, ready)
        await self._uvicorn.serve(sockets=[self._socket])

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of the event loop. Connections that cannot be accepted are logged at most once a second."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _EXHAUSTED:
            loop.default_exception_handler(context)
        elif loop.time() >= self._quiet_until:
            self._quiet_until = loop.time() + 1.0
            log.warning("New connections cannot be accepted and wait: %s", error.strerror)

    def _wait_until_ready(self, ready: Callable[[], object]) -> None:
        assert self._loop is not None
        if self._uvicorn.started:
            ready()
        else:
            self._loop.call_later(0.005, self._wait_until_ready, ready)

    def _on_signal(self, number: int) -> None:
        if self._uvicorn.should_exit:
            notices.info("Ending now, without waiting for requests", extra=records.fields(event="aborted"))
            native_calls.end_process(_INTERRUPTED)
        waits = self._awaited()
        notices.info("Stopping%s%s", f": waiting up to {self.state.pool.config.shutdown_grace:g} s for {waits}" if waits
                     else ": no request is in progress",
                     "; press Ctrl-C again to end at once" if waits and number == signal.SIGINT else "",
                     extra=records.fields(event="stopping", requests=len(self.state.running)))
        self._uvicorn.should_exit = True

    def _awaited(self) -> str:
        """Return what a stop waits for: requests, with the models that compute them or are being loaded for them."""
        now, running = time.monotonic(), list(self.state.running.values())
        found = [f"{one.path} of {one.model[:NAME] or 'no model'} (since {now - one.started:.1f} s)"
                 for one in running[:_NAMED]]
        if len(running) > _NAMED:
            found.append(f"{len(running) - _NAMED} more")
        parts = [f"{len(running)} request{'s' if len(running) > 1 else ''}: {', '.join(found)}"] if running else []
        rows = [row for row in self.state.pool.ps() if row.running or row.queued or row.state == "loading"]
        if rows:
            parts.append("models: " + ", ".join(
                f"{row.model} (loading)" if row.state == "loading" else
                f"{row.model} ({row.running} running, {row.queued} queued)" for row in rows))
        return "; ".join(parts)

    def stop(self) -> None:
        """End :meth:`run`. Thread-safe and idempotent."""
        self._uvicorn.should_exit = True

    def close(self) -> None:
        """Close the socket of a server that will not run."""
        self._socket.close()


def listen(settings: Settings) -> socket.socket:
    """Return a socket at the address of the settings.

    Raises:
        FileError: The address is taken, or is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets that were created with an explicit IPPROTO_TCP
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # accepted connections inherit it
        made.bind((settings.host, settings.port))
        made.setblocking(False)
    except OSError as error:
        made.close()
        unknown = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        raise FileError(f"the server cannot listen on {settings.host}:{settings.port}: {error.strerror or error}",
                        hint="Choose an address of this machine as --host; 0.0.0.0 stands for all of them" if unknown
                        else "Choose another --port, or --port 0 for a free port") from None
    return made


def _allow_files(connections: int) -> None:
    """Raise the limit of open files of the process if the connections need more, up to the hard limit."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


__all__ = ["Serving", "listen"]
