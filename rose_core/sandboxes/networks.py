"""Which addresses a sandbox may reach, where somebody says it by address: a ``NetworkPolicy`` does.

An address that stands inside another one (IPv4 in IPv6) is both: each must be allowed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
"""What a translator makes of an IPv4 address, which stands in the last 32 bits."""


@dataclass(frozen=True)
class Network:
    """Addresses and ports that may be reached.

    Attributes:
        cidr: the addresses, as ``10.0.0.0/8``.
        beside: networks in it that may not.
        ports: first and last of each range of TCP ports; empty: all.
    """

    cidr: str
    beside: tuple[str, ...] = ()
    ports: tuple[tuple[int, int], ...] = ()


PUBLIC = (
    Network("0.0.0.0/0", ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16")),
    Network("::/0", ("fc00::/7", "fe80::/10")),
)
"""The public internet, as agent-sandbox's controller means it where a template has no policy of its
own (0.5.6, ``sandboxtemplate_controller``)."""


def inner(address: Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that stands in an IPv6 one; None: there is none."""
    if isinstance(address, ipaddress.IPv4Address):
        return None
    found = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
    if any(address in one for one in _NAT64):
        found = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return found


def may_reach(networks: Sequence[Network], address: str, port: int) -> bool:
    """Whether one of the networks has an address, and allows the port."""
    found = ipaddress.ip_address(address.partition("%")[0])
    within = inner(found)
    if within is not None and not may_reach(networks, str(within), port):
        return False
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        return True  # another way to write that address
    return any(_has(one, found, port) for one in networks)


def _has(network: Network, address: Address, port: int) -> bool:
    if network.ports and not any(first <= port <= last for first, last in network.ports):
        return False
    inside = address in ipaddress.ip_network(network.cidr, strict=False)
    return inside and not any(
        address in ipaddress.ip_network(one, strict=False) for one in network.beside
    )
