"""IP packets as captured -> ``Segment``; the tap's hot path, so it is flat and allocates little.

Next step: ``rose_core.telemetry.tracker``.
"""

from __future__ import annotations

import socket
import struct

from rose_core.telemetry.segments import Segment

_HOP_BY_HOP = 0
_PORTS = struct.Struct("!HHI")


def decode(
    packet: bytes, port: int, time_ns: int, local: frozenset[str] = frozenset()
) -> Segment | None:
    """Read one packet.

    The IP header's own length counts, not what was captured: the capture may be cut, and short
    frames may be padded. It is 0 for segments above 64 kB (BIG TCP); the missing part then shows
    as a hole before the next segment.

    Args:
        packet: from the IP header on.
        port: the serving port.
        time_ns: when the kernel saw it.
        local: addresses of the namespace as hex digits; empty = do not look. Where other pods pass
            by, and where the engine itself calls the same port elsewhere, only the server's address
            tells whose segment it is.

    Returns:
        None when it is no TCP segment of the port here.
    """
    version = packet[0] >> 4 if len(packet) >= 40 else 0
    if version == 4:
        head, protocol = (packet[0] & 0x0F) * 4, packet[9]
        total = int.from_bytes(packet[2:4]) or len(packet)
        source_address, target_address = packet[12:16], packet[16:20]
    elif version == 6:
        head, protocol = 40, packet[6]
        if protocol == _HOP_BY_HOP:
            head, protocol = 48, packet[40] if len(packet) >= 48 else _HOP_BY_HOP
        total = (int.from_bytes(packet[4:6]) or len(packet) - 40) + 40
        source_address, target_address = packet[8:24], packet[24:40]
    else:
        return None
    if protocol != socket.IPPROTO_TCP or len(packet) < head + 20:
        return None
    source, target, sequence = _PORTS.unpack_from(packet, head)
    data = head + (packet[head + 12] >> 4) * 4
    flags, payload, size = packet[head + 13], packet[data:total], max(0, total - data)
    if target == port and _is_local(target_address, local):
        return Segment(
            time_ns, (source_address.hex(), source), True, sequence, flags, payload, size
        )
    if source == port and _is_local(source_address, local):
        return Segment(
            time_ns, (target_address.hex(), target), False, sequence, flags, payload, size
        )
    return None


def _is_local(server: bytes, local: frozenset[str]) -> bool:
    # All of 127.0.0.0/8 is here, whatever the interface lists.
    return not local or (len(server) == 4 and server[0] == 127) or server.hex() in local
