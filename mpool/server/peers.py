"""The user that owns the other end of a loopback connection, from Linux's table of TCP sockets."""

from __future__ import annotations

import socket
import sys

#: State of an established connection in ``/proc/net/tcp``. In every other state the socket may have no owner any more,
#: and the kernel then reports user 0.
_ESTABLISHED = "01"


def _encoded(host: str, port: int, family: socket.AddressFamily) -> str:
    """Return an address as the kernel prints it: the address in 32-bit words in the byte order of the machine."""
    packed = socket.inet_pton(family, host)
    words = [int.from_bytes(packed[at:at + 4], sys.byteorder) for at in range(0, len(packed), 4)]
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def user_of(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the user id of the process at the other end of a connection on this machine.

    Args:
        client: address and port of the client.
        server: address and port of this end.

    Returns:
        The user id; None: the client is on another machine or in another network namespace, has closed the connection,
        or the system has no such table.
    """
    try:
        family = socket.AF_INET6 if ":" in client[0] else socket.AF_INET
        local, remote = _encoded(client[0], client[1], family), _encoded(server[0], server[1], family)
        with open("/proc/net/tcp6" if family == socket.AF_INET6 else "/proc/net/tcp", encoding="ascii") as table:
            for line in table:
                # sl, local address, remote address, state, queues, timer, retransmits, user, timeout, inode
                fields = line.split()
                if fields[1] == local and fields[2] == remote:
                    return int(fields[7]) if fields[3] == _ESTABLISHED and fields[9] != "0" else None
    except (OSError, ValueError, IndexError, TypeError):
        return None
    return None


__all__ = ["user_of"]
