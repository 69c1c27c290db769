"""The socket that the server listens on, and addresses in the header Host."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from mpool.errors import FileError

pytest.importorskip("uvicorn")

from mpool.server import interfaces, serving  # noqa: E402
from mpool.server.settings import Settings  # noqa: E402


def test_a_port_is_free_again_while_its_connections_linger() -> None:
    """The side that closes a connection first keeps it in TIME_WAIT for a minute; a restarted server must not wait."""
    first = serving.listen(Settings(port=0))
    host, port = first.getsockname()
    first.listen()
    first.setblocking(True)
    with socket.create_connection((host, port)) as client:
        accepted, _ = first.accept()
        with first:
            accepted.close()
            assert client.recv(1) == b""
    with serving.listen(Settings(port=port)) as second:
        assert second.getsockname() == (host, port) and not second.getblocking()
        second.listen()
        with pytest.raises(FileError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use. "
                                                  "Choose another --port"):
            serving.listen(Settings(port=port))


@pytest.mark.parametrize("host", ["203.0.113.77", "999.1.1.1"])  # TEST-NET-3 of RFC 5737, and no address
def test_an_address_of_another_machine(host: str) -> None:
    with pytest.raises(FileError, match=rf"cannot listen on {host}:0: .*Choose an address of this machine"):
        serving.listen(Settings(host=host, port=0, token="0123456789abcdef"))


@pytest.mark.parametrize("host, family", [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_options_of_the_socket(host: str, family: Any) -> None:
    """Accepted connections inherit the size of the buffer. asyncio needs the explicit protocol."""
    with socket.socket(family) as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, serving._SEND_BUFFER)
        size = plain.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)  # Linux doubles it, up to a limit of the system
    try:
        made = serving.listen(Settings(host=host, port=0))
    except FileError:
        if family == socket.AF_INET:
            raise
        pytest.skip(f"no address {host}")
    with made:
        assert (made.family, made.type, made.proto) == (family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == size


@pytest.mark.parametrize("host, expected", [
    ("127.0.0.1", True), ("10.1.2.3:1", True), ("10.1.2.3:65535", True), ("10.1.2.3:65536", False),
    ("10.1.2.3:0", False), ("10.1.2.3:123456", False), ("10.1.2.3:", False), ("10.1.2", False), ("[10.1.2.3]", False),
    ("[::1]", True), ("[::1]:8000", True), ("[::1]:0", False), ("::1", False), ("[::1", False), ("::1]", False),
    ("[]", False), ("", False), ("localhost", False), ("localhost:80", False), ("[localhost]", False)])
def test_addresses_in_a_host_header(host: str, expected: bool) -> None:
    """IPv6 addresses have brackets, others have none; a port is from 1 to 65535."""
    assert interfaces.is_address(host) is expected
