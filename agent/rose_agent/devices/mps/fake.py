"""A stand-in for ``nvidia-cuda-mps-control``: same invocation, same commands, no GPU.

    -f [-multiuser-server] run the daemon in the foreground, on ``control`` in the pipe directory
    --help                 names the options
    (commands on stdin)    send each line to the daemon and print what it answers

What a real server learns from its clients comes here by commands that NVIDIA's has not:
``fake_connect PID [PERCENT]``, ``fake_leave PID`` and ``fake_fault``; ``fake_terminated`` lists
whose work was ended by command. A server that is not for every user takes clients of its first
client's user; NVIDIA's lets the others wait. The grammar of everything else is NVIDIA's:
``get_server_list``, ``get_server_status``, ``get_client_list``, ``start_server``,
``terminate_client``, ``get_default_active_thread_percentage`` and its setter,
``get_active_thread_percentage``, ``quit``; with ``-p 3`` the grammar of protocol 3 instead
(``_answer3``: ``server list``, ``client list``, ``client terminate``, ``-q`` as arguments).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rose_agent.devices.mps import control3 as mps3
from rose_agent.devices.mps.asking import MOST, ask, control_socket
from rose_agent.devices.mps.control import MULTI_USER
from rose_agent.os.processes import proc_text

_NAME = "default"  # of the one server
_CSV = "--format=csv,noheader"


def _lives(pid: int) -> bool:
    try:
        stat = proc_text(pid, "stat")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@dataclass
class FakeDaemon:
    """State of one daemon; its server is this very process.

    Attributes:
        clients: pid -> active thread percentage it connected with.
        real: those that are processes; such a client leaves when its process ends.
        multi_user: takes clients of every user; otherwise of ``user`` alone.
    """

    pid: int = field(default_factory=os.getpid)
    started: bool = False
    faulted: bool = False
    percentage: float = 100.0
    clients: dict[int, float] = field(default_factory=dict)
    real: set[int] = field(default_factory=set)
    terminated: list[int] = field(default_factory=list)
    multi_user: bool = True
    user: int | None = None
    ended: bool = False
    protocol: int = 2

    def answer(self, line: str) -> str:
        """Carry out one command; returns what is printed."""
        for pid in [pid for pid in self.real if not _lives(pid)]:
            self.real.discard(pid)
            self.do_fake_leave(str(pid))
        command, *operands = line.split() or [""]
        if self.protocol == 3 and not command.startswith("fake_") and command != "quit":
            return f"{_answer3(self, [command, *operands])}\n"
        handler = getattr(self, f"do_{command}", None)
        if handler is None:
            return f'Unknown command "{command}"\n'
        try:
            text: str = handler(*operands)
        except (TypeError, ValueError):
            return f"Invalid argument of {command}\n"
        return f"{text}\n" if text else ""

    def do_get_server_list(self) -> str:
        """Servers, one pid per line."""
        return str(self.pid) if self.started else ""

    def do_start_server(self, _flag: str, _uid: str) -> str:
        """``start_server -uid UID``."""
        self.started = True
        return ""

    def do_get_server_status(self, pid: str) -> str:
        """``ACTIVE`` or ``FAULT``."""
        if not self._serves(pid):
            return f"Server {pid} not found"
        return "FAULT" if self.faulted else "ACTIVE"

    def do_get_client_list(self, pid: str) -> str:
        """Clients of a server, one pid per line."""
        if not self._serves(pid):
            return f"Server {pid} not found"
        return "\n".join(map(str, sorted(self.clients)))

    def do_get_default_active_thread_percentage(self) -> str:
        """Tell the share that clients get which are yet to come."""
        return str(self.percentage)

    def do_set_default_active_thread_percentage(self, percentage: str) -> str:
        """Set the share that clients get which are yet to come."""
        self.percentage = float(percentage)
        return str(self.percentage)

    def do_get_active_thread_percentage(self, pid: str) -> str:
        """Tell a server's share, if it is this daemon's server."""
        return str(self.percentage) if self._serves(pid) else f"Server {pid} not found"

    def do_terminate_client(self, server: str, client: str) -> str:
        """End a client's work."""
        if not self._serves(server) or self.clients.pop(int(client), None) is None:
            return f"Failed to terminate client {client} of server {server}"
        self.terminated.append(int(client))
        self._recover()
        return ""

    def do_quit(self, *_operands: str) -> str:
        """End."""
        self.ended = True
        return ""

    def do_fake_connect(self, pid: str, percentage: str = "") -> str:
        """A process uses the GPU through this pipe directory."""
        if self.faulted:
            return "Failed: the server is in FAULT"
        if not self._takes(pid):
            return f"Failed: the server is user {self.user}'s"
        self.started = True
        own = float(percentage) if percentage else self.percentage
        self.clients[int(pid)] = min(own, self.percentage)
        self.real |= {int(pid)} if _lives(int(pid)) else set()
        return ""

    def do_fake_leave(self, pid: str) -> str:
        """A client's process has ended."""
        self.clients.pop(int(pid), None)
        self._recover()
        return ""

    def do_fake_fault(self) -> str:
        """A client crashes the GPU."""
        self.faulted = True
        return ""

    def do_fake_terminated(self) -> str:
        """Clients that were ended by command."""
        return "\n".join(map(str, self.terminated))

    def _takes(self, pid: str) -> bool:
        if self.multi_user:
            return True
        try:
            user = Path(f"/proc/{pid}").stat().st_uid
        except OSError:
            return True
        self.user = user if self.user is None or not self.clients else self.user
        return user == self.user

    def _serves(self, pid: str) -> bool:
        return self.started and int(pid) == self.pid

    def _recover(self) -> None:
        """A server in FAULT takes new clients once every old one has left."""
        if not self.clients:
            self.faulted = False


def serve(place: Path, *, multi_user: bool, protocol: int = 2) -> int:
    """Answer the control program at ``place`` until it gets ``quit``.

    Args:
        place: path of the control socket; an older one there is replaced.
        multi_user: one server for clients of all users.
        protocol: of the shell it speaks, 2 or 3.

    Returns:
        Exit code.
    """
    daemon = FakeDaemon(multi_user=multi_user, protocol=protocol)
    place.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        # Bound under another name and renamed: a client sees either nothing or a listener.
        making = place.with_name(".control")
        making.unlink(missing_ok=True)
        listener.bind(str(making))
        making.chmod(0o666)  # clients are other users
        listener.listen(8)
        making.replace(place)
        while not daemon.ended:
            connection, _ = listener.accept()
            # Who gave up waiting takes nobody else's daemon away.
            with contextlib.suppress(ConnectionError), connection:
                _reply(daemon, connection)
    place.unlink(missing_ok=True)
    return 0


def _answer3(daemon: FakeDaemon, operands: list[str]) -> str:
    """Carry out ``MODULE VERB ...`` of protocol 3; returns what is printed.

    One server named ``default``. As NVIDIA's, ``namespace set`` is refused while clients are
    attached.
    """
    match operands:
        case ["server", "list", *flags]:
            return _table("NAME UID PID STATUS PIPE-DIRECTORY", flags, _servers(daemon))
        case ["client", "list", *flags]:
            return _table("PID SERVER DEVICE _NAMESPACE CMD", flags, _clients(daemon, flags))
        case ["client", "terminate", pid]:
            return daemon.do_terminate_client(str(daemon.pid), pid)
        case ["namespace", "set", *_]:
            return "Failed: the server has active clients" if daemon.clients else ""
        case _:
            return f"Invalid command: {' '.join(operands)}"


def _servers(daemon: FakeDaemon) -> list[str]:
    status = "Fault" if daemon.faulted else "Ready"
    row = f"{_NAME},0,{daemon.pid},{status},/run/nvidia-mps/{_NAME},GPU-a,GPU-b,-"
    return [row] if daemon.started else []


def _clients(daemon: FakeDaemon, flags: list[str]) -> list[str]:
    named = [flag for flag in flags if flag.startswith("--server=")]
    if named and named != [f"--server={_NAME}"]:
        return []
    return [f"{pid},{_NAME},0,default,python -c a,b" for pid in sorted(daemon.clients)]


def _table(head: str, flags: list[str], rows: list[str]) -> str:
    if _CSV in flags:
        return "\n".join(rows)
    # The table is as wide as its head: numbers are cut, which is why nobody may read it.
    return "\n".join([head, *(f"{row[:3]}..." for row in rows)])


def _reply(daemon: FakeDaemon, connection: socket.socket) -> None:
    line = connection.recv(MOST).decode()
    if line:
        connection.sendall(daemon.answer(line.strip()).encode())


def main(argv: list[str]) -> int:
    """Act as ``nvidia-cuda-mps-control`` would, without a GPU.

    Returns:
        Exit code.
    """
    if argv == ["--help"]:
        sys.stdout.write(f"[-f] [{MULTI_USER}] [-p 3 [{mps3.MULTI_USER[1]}]]\n")
        return 0
    if argv[:1] == ["-f"]:
        multi_user = MULTI_USER in argv or any(flag in argv for flag in mps3.MULTI_USER)
        place = Path(control_socket())
        return serve(place, multi_user=multi_user, protocol=3 if mps3.speaks_protocol3(argv) else 2)
    return ask(argv)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
