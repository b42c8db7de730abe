"""System calls the tap gives up: no process of it can reach the network or start a program.

The opener makes packet and netlink sockets only; the parser makes Unix sockets only (to hear taps
inside pods) and takes what it is handed. Neither may execute, trace, or read another process's
memory. Of BPF the parser may use maps that it is handed, and only the opener may load a program.
Together with the dropped capabilities this holds also where the parser cannot leave its
network namespace, as in a pod's own tap.
"""

from __future__ import annotations

import logging
import platform
import socket

from rose_agent.os import bpf, bpf_maps, kernel

_log = logging.getLogger(__name__)
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_LD_W, _JEQ, _JGE, _RET = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ERRNO with EPERM
_X32 = 0x40000000
# AUDIT_ARCH, and the numbers of: socket; execve, execveat, ptrace, process_vm_readv, _writev.
_MACHINES = {
    "x86_64": (0xC000003E, 41, (59, 322, 101, 310, 311)),
    "aarch64": (0xC00000B7, 198, (221, 281, 117, 270, 271)),
}
OPENER = frozenset({socket.AF_UNIX, socket.AF_PACKET, socket.AF_NETLINK})
PARSER = frozenset({socket.AF_UNIX})
# Readers of serving pods (``rose_agent.signals.confined``) speak HTTP and ZMTP with them.
READER = frozenset({socket.AF_UNIX, socket.AF_INET, socket.AF_INET6})


def program(families: frozenset[int], machine: str, commands: frozenset[int] | None) -> bytes:
    """The filter that lets sockets of these families be made, and no program be started.

    Args:
        families: of sockets.
        machine: as ``platform.machine`` says.
        commands: of the call ``bpf`` that it lets be made; None = every one.

    Raises:
        KeyError: the machine's system call numbers are not known.
    """
    architecture, make_socket, refused = _MACHINES[machine]
    of_bpf: list[bpf.Line] = [
        (_LD_W, _FIRST_ARGUMENT),
        *(bpf.Jump(_JEQ, command, "allow", "") for command in sorted(commands or ())),
        (_RET, _ALLOW if commands is None else _REFUSE),
    ]
    return bpf.assemble(
        [
            (_LD_W, _ARCHITECTURE),
            bpf.Jump(_JEQ, architecture, "", "refuse"),
            (_LD_W, _NUMBER),
            bpf.Jump(_JGE, _X32, "refuse", ""),
            *(bpf.Jump(_JEQ, number, "refuse", "") for number in refused),
            bpf.Jump(_JEQ, bpf_maps.CALLS[machine], "bpf", ""),
            bpf.Jump(_JEQ, make_socket, "", "allow"),
            (_LD_W, _FIRST_ARGUMENT),
            *(bpf.Jump(_JEQ, family, "allow", "") for family in sorted(families)),
            "refuse",
            (_RET, _REFUSE),
            "bpf",
            *of_bpf,
            "allow",
            (_RET, _ALLOW),
        ]
    )


def confine(families: frozenset[int], commands: frozenset[int] | None = frozenset()) -> None:
    """Install the filter; where machine or kernel cannot, log that and go on without."""
    try:
        kernel.forbid(program(families, platform.machine(), commands))
    except (KeyError, OSError) as error:
        _log.warning("system calls stay unfiltered: %r", error)
