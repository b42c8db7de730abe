"""The stand-in's second grammar (protocol 3): the same daemon, asked by module and verb.

One server named ``default``. As NVIDIA's, ``namespace set`` is refused while clients are attached.
"""

from __future__ import annotations

from typing import Protocol

NAME = "default"
_CSV = "--format=csv,noheader"


class Daemon(Protocol):
    """What of the stand-in's state is shown."""

    pid: int
    started: bool
    faulted: bool
    clients: dict[int, float]

    def do_terminate_client(self, server: str, client: str) -> str:
        """End a client's work."""
        ...


def answer(daemon: Daemon, words: list[str]) -> str:
    """Carry out ``MODULE VERB ...``; returns what is printed."""
    match words:
        case ["server", "list", *flags]:
            return _table("NAME UID PID STATUS PIPE-DIRECTORY", flags, _servers(daemon))
        case ["client", "list", *flags]:
            return _table("PID SERVER DEVICE NAMESPACE CMD", flags, _clients(daemon, flags))
        case ["client", "terminate", pid]:
            return daemon.do_terminate_client(str(daemon.pid), pid)
        case ["namespace", "set", *_]:
            return "Failed: the server has active clients" if daemon.clients else ""
        case _:
            return f"Invalid command: {' '.join(words)}"


def _servers(daemon: Daemon) -> list[str]:
    status = "Fault" if daemon.faulted else "Ready"
    row = f"{NAME},0,{daemon.pid},{status},/run/nvidia-mps/{NAME},GPU-a,GPU-b,-"
    return [row] if daemon.started else []


def _clients(daemon: Daemon, flags: list[str]) -> list[str]:
    named = [flag for flag in flags if flag.startswith("--server=")]
    if named and named != [f"--server={NAME}"]:
        return []
    return [f"{pid},{NAME},0,default,python -c a,b" for pid in sorted(daemon.clients)]


def _table(head: str, flags: list[str], rows: list[str]) -> str:
    if _CSV in flags:
        return "\n".join(rows)
    # The table is as wide as its head: numbers are cut, which is why nobody may read it.
    return "\n".join([head, *(f"{row[:3]}..." for row in rows)])
