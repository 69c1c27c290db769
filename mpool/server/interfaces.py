"""Addresses of this machine, from Linux's tables."""

from __future__ import annotations

import ipaddress
import re

#: Entry of the kernel's routing table for an address of this machine: the address, then a line that marks it as local.
_LOCAL = re.compile(r"\|-- (\d+\.\d+\.\d+\.\d+)\n\s+/32 host LOCAL")
#: Maximum size in bytes of a table that is read, and maximum number of addresses.
_MAX_TABLE, _MAX_ADDRESSES = 1 << 20, 16


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as table:
            return table.read(_MAX_TABLE)
    except (OSError, ValueError):
        return ""


def addresses(version: int = 4) -> list[str]:
    """Return the addresses by which other machines may reach this one, at most 16; empty on systems without the tables.

    Args:
        version: 4: IPv4 addresses only; 6: IPv6 addresses, too.
    """
    found = [ipaddress.ip_address(text) for text in _LOCAL.findall(_read("/proc/net/fib_trie"))]
    if version == 6:
        found += [ipaddress.ip_address(bytes.fromhex(line[:32])) for line in _read("/proc/net/if_inet6").splitlines()
                  if re.match("[0-9a-f]{32} ", line)]
    return [str(address) for address in dict.fromkeys(found)
            if not (address.is_loopback or address.is_link_local)][:_MAX_ADDRESSES]


def is_address(host: str) -> bool:
    """Return True if the value of a Host header in lower case is an IP address, with or without a port."""
    name, _, port = host.rpartition(":") if re.search(r"[^:]:\d{1,5}$", host) else (host, "", "")
    if name.startswith("[") != name.endswith("]") or port and not 1 <= int(port) <= 65535:
        return False
    try:
        address = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return name.startswith("[") == (address.version == 6)


__all__ = ["addresses", "is_address"]
