"""Probe with one TCP connection whether the hub can be reached: ``huggingface_hub`` alone would wait longer.

The result of a probe is kept for five minutes, so an unreachable hub costs a process less than a second in that time.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
import urllib.parse
import warnings

from ...checks import caller_stacklevel
from ...records import logger

log = logger("mpool.models")

#: Limit for the name's look-up and the connection, in seconds.
CONNECT_SECONDS = 0.7
#: Time for which a result counts, in seconds.
REMEMBER_SECONDS = 300.0

_lock = threading.Lock()
#: Address of a hub -> (end of validity by time.monotonic, reason why it cannot be reached, or None).
_known: dict[str, tuple[float, str | None]] = {}
#: True after :func:`warn_once` has warned.
_warned = False


def unreachable(endpoint: str) -> str | None:
    """Return why the server at ``endpoint`` cannot be reached, or None if it accepts connections.

    With a proxy in the environment, the probe connects to the proxy. Thread-safe; threads that ask at the same time
    share one probe.
    """
    with _lock:
        until, reason = _known.get(endpoint, (0.0, None))
        if time.monotonic() >= until:
            reason = _connect(endpoint)
            _remember(endpoint, reason)
        return reason


def failed(endpoint: str, reason: str) -> None:
    """Remember that a request failed although the probe succeeded, so that the next request does not wait again."""
    with _lock:
        _remember(endpoint, reason)


def warn_once(message: str) -> None:
    """Warn that mpool continues without the hub. Only the first call of a process warns.

    Without a configuration of ``logging``, records of the loggers are not shown. If nothing replaces the hub, the error
    says that it cannot be reached.
    """
    global _warned
    with _lock:
        warned, _warned = _warned, True
    if not warned:
        warnings.warn(message, stacklevel=caller_stacklevel())


def _remember(endpoint: str, reason: str | None) -> None:
    _known[endpoint] = (time.monotonic() + REMEMBER_SECONDS, reason)
    if reason is not None:
        log.info("%s cannot be reached (%s); mpool tries again in %.0f minutes", endpoint, reason,
                 REMEMBER_SECONDS / 60)


def _connect(endpoint: str) -> str | None:
    host, port = _address(endpoint)
    result: list[str | None] = []

    def work() -> None:  # the look-up of a name has no time limit, so it runs on a thread of its own
        try:
            result.append(_race(host, port, time.monotonic() + CONNECT_SECONDS))
        except (OSError, UnicodeError, ValueError) as error:
            result.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work, name="mpool-hub-probe", daemon=True)
    thread.start()
    thread.join(CONNECT_SECONDS + 0.1)
    return result[0] if result else f"no connection to {host}:{port} within {CONNECT_SECONDS} s"


def _address(endpoint: str) -> tuple[str, int]:
    """Return host and port of a server, or of the proxy that the environment names for it."""
    from urllib.request import getproxies, proxy_bypass

    parts = urllib.parse.urlsplit(endpoint)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(parts.hostname or ""):
        parts = urllib.parse.urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    ports = {"https": 443, "http": 80}
    return parts.hostname or "", parts.port or ports.get(parts.scheme, 1080)


def _race(host: str, port: int, deadline: float) -> str | None:
    """Connect to all addresses of a host at once. Return None if one accepts, else the reason of the last failure."""
    reason = f"no connection to {host}:{port} within {CONNECT_SECONDS} s"
    opened: list[socket.socket] = []
    try:
        with selectors.DefaultSelector() as selector:
            for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[:8]:
                try:
                    one = socket.socket(family, kind, protocol)
                except OSError:
                    continue  # the machine has no IPv6
                opened.append(one)
                one.setblocking(False)
                one.connect_ex(address)
                selector.register(one, selectors.EVENT_WRITE)
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for event, _ in selector.select(left):
                    assert isinstance(event.fileobj, socket.socket)
                    error = event.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if error == 0:
                        return None
                    reason = f"{host}:{port}: error {error} of the connection"
                    selector.unregister(event.fileobj)
    finally:
        for one in opened:
            one.close()
    return reason


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held the old lock at the fork


os.register_at_fork(after_in_child=_after_fork_in_child)
