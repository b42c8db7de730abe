"""Kernel filters of the tap: classic BPF programs for one serving port.

All pass, of TCP segments to or from the port: everything with RST, the server's FIN, every client
segment with payload, and of the server's heads (``HTTP``) and ends (the segment ends with an empty
line: the zero chunk and heads do). All but the bell pass SYN and the client's FIN too, from which
nothing follows at once. They differ in the server's other segments with payload, its tokens:

| rate | passes | for |
|---|---|---|
| 1 | all of them | the *whole* |
| N | one of N, at random | the *sample* |
| 0 | none | the *bell*, which says when the others are worth reading |
| 0, requests alone | nor heads, ends, RST | the *request bell*: an end beside others can wait |

The tap reads the sample only while every request under way streams its tokens, so neither a first
token nor an end depends on the dice. Sockets are SOCK_DGRAM: offset 0 is the IP header. Fragments
are passed over (TCP segments of a serving port are not fragmented), and of IPv6's extension headers
only the one before a jumbo segment is known.
Next step: ``sockets`` attaches and locks them.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from dataclasses import dataclass

SO_ATTACH_FILTER, SO_LOCK_FILTER = 26, 44
SNAP = 65_535  # bytes of a packet that are copied: the end of a response is in its last ones

_LD_W, _LD_H, _LD_B, _LD_LEN = 0x20, 0x28, 0x30, 0x80
_LD_IW, _LD_IH, _LD_IB = 0x40, 0x48, 0x50
_HOP_BY_HOP, _TCP = 0, 6
_LD_IMM, _TAX, _ST, _LDXM = 0x00, 0x07, 0x02, 0x61
_ADD_X, _SUB_X, _SUB_K, _AND_K, _RSH_K, _LSH_K = 0x0C, 0x1C, 0x14, 0x54, 0x74, 0x64
_JEQ, _JGT_X, _JGE_K, _JSET, _RET = 0x15, 0x2D, 0x35, 0x45, 0x06
_ANCILLARY = 0xFFFFF000  # SKF_AD_OFF
_AD_RANDOM = 56
_FLAGS, _END, _RESET = 0x07, 0x05, 0x04  # FIN, SYN, RST; FIN, RST
_HTTP, _EMPTY_LINE = 0x48545450, 0x0D0A0D0A


@dataclass(frozen=True)
class Jump:
    """A conditional jump to labels; '' is the next instruction."""

    code: int
    k: int
    yes: str = ""
    no: str = ""


Line = tuple[int, int] | Jump | str


def assemble(lines: list[Line]) -> bytes:
    """Turn instructions, jumps to labels and labels (strings) into ``sock_filter`` records."""
    labels: dict[str, int] = {}
    body: list[tuple[int, int] | Jump] = []
    for line in lines:
        if isinstance(line, str):
            labels[line] = len(body)
        else:
            body.append(line)
    out = b""
    for index, line in enumerate(body):
        if isinstance(line, Jump):
            yes, no = (labels[name] - index - 1 if name else 0 for name in (line.yes, line.no))
            out += struct.pack("=HBBI", line.code, yes, no, line.k)
        else:
            out += struct.pack("=HBBI", line[0], 0, 0, line[1])
    return out


def _headers() -> list[Line]:
    """Leaves the TCP header's offset in X and M[0]; other packets are dropped."""
    return [
        (_LD_B, 0),
        (_RSH_K, 4),
        Jump(_JEQ, 6, "ipv6", ""),
        Jump(_JEQ, 4, "", "drop"),
        (_LD_B, 9),
        Jump(_JEQ, 6, "", "drop"),
        (_LD_H, 6),
        Jump(_JSET, 0x1FFF, "drop", ""),
        (_LD_B, 0),
        (_AND_K, 0x0F),
        (_LSH_K, 2),
        Jump(_JEQ, 0, "drop", "tcp"),
        "ipv6",
        (_LD_B, 6),
        Jump(_JEQ, _TCP, "ipv6-tcp", ""),
        Jump(_JEQ, _HOP_BY_HOP, "", "drop"),
        (_LD_H, 40),  # what follows, and the length 0: one header of eight bytes
        Jump(_JEQ, _TCP << 8, "", "drop"),
        (_LD_IMM, 48),
        Jump(_JEQ, 48, "tcp", "drop"),
        "ipv6-tcp",
        (_LD_IMM, 40),
        "tcp",
        (_TAX, 0),
        (_ST, 0),
    ]


def _payload_offset() -> list[Line]:
    """Offset of the payload into A: TCP header's offset + its data offset."""
    return [
        (_LDXM, 0),
        (_LD_IB, 12),
        (_RSH_K, 2),
        (_AND_K, 0x3C),
        (_ADD_X, 0),
    ]


def _sample_tokens(rate: int) -> list[Line]:
    """Which of the server's tokens pass; the payload's offset is in X, the length in A."""
    if rate == 1:
        return [Jump(_JEQ, 0, "pass", "pass")]
    dice: list[Line] = [
        (_LD_W, _ANCILLARY + _AD_RANDOM),
        Jump(_JGE_K, 0x100000000 // rate, "drop", "pass"),
    ] if rate else []  # fmt: skip
    return [
        (_SUB_X, 0),
        Jump(_JGE_K, 5, "", "pass"),
        (_LD_IW, 0),
        Jump(_JEQ, _HTTP, "pass", ""),
        (_LD_LEN, 0),
        (_SUB_K, 4),
        (_TAX, 0),
        (_LD_IW, 0),
        Jump(_JEQ, _EMPTY_LINE, "pass", "" if rate else "drop"),
        *dice,
    ]


def _from_server(port: int, rate: int) -> list[Line]:
    return [
        (_LD_IH, 0),
        Jump(_JEQ, port, "", "drop"),
        (_LD_IB, 13),
        Jump(_JSET, _FLAGS if rate else _END, "pass", ""),
        *_payload_offset(),
        (_TAX, 0),
        (_LD_LEN, 0),
        Jump(_JGT_X, 0, "", "drop"),
        *_sample_tokens(rate),
        "client",
        (_LD_IB, 13),
        Jump(_JSET, _FLAGS if rate else _RESET, "pass", ""),
    ]


def program(port: int, *, rate: int, requests_alone: bool = False) -> bytes:
    """The filter for a port.

    Args:
        port: of serving.
        rate: one of so many of the server's tokens passes; 0 = none of them.
        requests_alone: nothing passes but what clients send.
    """
    lines: list[Line] = [
        *_headers(),
        (_LD_IH, 2),
        Jump(_JEQ, port, "" if requests_alone else "client", "drop" if requests_alone else ""),
        *([] if requests_alone else _from_server(port, rate)),
        *_payload_offset(),
        (_TAX, 0),
        (_LD_LEN, 0),
        Jump(_JGT_X, 0, "pass", "drop"),
        "pass",
        (_RET, SNAP if rate else 1),
        "drop",
        (_RET, 0),
    ]
    return assemble(lines)


def attach(tap: socket.socket, code: bytes) -> None:
    """Attach the filter for good: it can be neither replaced nor removed, by nobody.

    Raises:
        OSError: the kernel refuses the program, or a filter is locked already.
    """
    buffer = ctypes.create_string_buffer(code, len(code))
    record = struct.pack("HL", len(code) // 8, ctypes.addressof(buffer))
    tap.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, record)
    lock(tap)


def lock(tap: socket.socket) -> None:
    """Keep the filter that it has for good."""
    tap.setsockopt(socket.SOL_SOCKET, SO_LOCK_FILTER, 1)
