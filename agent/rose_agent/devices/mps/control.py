"""The MPS control daemon of a node: start it, ask it, end a client through it.

One daemon serves all GPUs of a node at one path, because a pod template cannot know which GPU its
pod will get, and a process with ranks on several GPUs has one pipe directory. Since Volta a fault
stays on the GPUs that the faulty client shared. Commands go to ``nvidia-cuda-mps-control`` on its
standard input, one per line, as NVIDIA documents them; answers come back as text, and the exit code
says only whether a daemon was there. A daemon that was started with protocol 3 is asked in that
grammar (``mps3``).

| daemon of driver | knows |
|---|---|
| 535 | no ``get_server_status``, so a FAULT cannot be seen: not used; writes no pid file |
| 550 | everything that is asked here, one user at a time |
| some later ones | ``-multiuser-server`` |

``fake`` speaks both grammars without a GPU, and ``asking`` is how it is asked.
Next step: ``mps_tasks`` checks and ends clients, ``mps_verb`` runs a daemon.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rose_agent.devices.mps import control3 as mps3
from rose_agent.errors import MpsError
from rose_core.devices.mps import MpsServer, ServerState

PROGRAM = "nvidia-cuda-mps-control"
MULTI_USER = "-multiuser-server"
ANSWER_SECONDS = 5.0
# Where the chart, pods that opt in and engines find the daemon.
ROOT = Path("/run/rose-mps")
_NUMBER = re.compile(r"^\d+$")
# The control program ends with 0 whatever the daemon answered.
_REFUSALS = ("cannot", "failed", "invalid", "not found", "unknown command")
_PEER = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED


@dataclass(frozen=True)
class Pipes:
    """Directories of the node's daemon."""

    root: Path = ROOT

    @property
    def pipe(self) -> Path:
        """Mounted into serving pods that opt in, and into engines."""
        return self.root / "pipe"

    @property
    def log(self) -> Path:
        """The daemon's and the servers' logs."""
        return self.root / "log"

    @property
    def shm(self) -> Path:
        """``/dev/shm`` of the daemon and of all its clients, through which they share memory."""
        return self.root / "shm"

    def create(self) -> Pipes:
        """Make them; returns itself.

        Raises:
            OSError: they cannot be made.
        """
        self.root.mkdir(mode=0o755, parents=True, exist_ok=True)
        for folder in (self.pipe, self.log, self.shm):
            folder.mkdir(exist_ok=True)
            # A server is its clients' user, and makes files in all three.
            folder.chmod(0o1777)
        return self

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """For the daemon, which shows every GPU that it can see."""
        return {
            **{name: value for name, value in inherited.items() if name != "CUDA_VISIBLE_DEVICES"},
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.log),
        }


def knows(program: Sequence[str], option: str) -> bool:
    """Whether a control program knows an option: its help names it, or its file holds the word.

    What a control program does not know it takes for an order to a daemon, and ends.

    Raises:
        OSError: there is no such program.
    """
    found = shutil.which(program[0])
    if found is None:
        raise FileNotFoundError(2, "no such program", program[0])
    helped = subprocess.run(  # the program is the platform's
        [*program, "--help"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    text = helped.stdout + helped.stderr
    return option in text or option.encode() in Path(found).read_bytes()


class MpsControl:
    """Asks the node's daemon.

    Args:
        pipes: its directories.
        program: the control program and arguments that come before its own.
        answer_seconds: longest time of an answer; a daemon that takes longer counts as none.
    """

    def __init__(
        self,
        pipes: Pipes,
        program: Sequence[str] = (PROGRAM,),
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._pipes = pipes
        self._program = tuple(program)
        self._answer_seconds = answer_seconds

    @property
    def protocol(self) -> int:
        """2 or 3, as the daemon was started; 2 when that cannot be seen."""
        argv = _daemon_file(self._pipes.pipe, "cmdline") or ()
        given = _daemon_file(self._pipes.pipe, "environ") or ()
        return 3 if mps3.speaks_protocol3(argv, given) else 2

    def ask(self, command: str) -> tuple[str, ...]:
        """Send one command in the grammar of protocol 2.

        Returns:
            The answer's lines.

        Raises:
            MpsError: no daemon answers, or it refuses; says what it said.
        """
        return self._run((), command)

    def _run(self, arguments: Sequence[str], command: str = "") -> tuple[str, ...]:
        asked = command or " ".join(arguments)
        try:
            done = subprocess.run(  # the program is the platform's
                [*self._program, *arguments],
                input=f"{command}\n" if command else "",
                env=self._pipes.environment(os.environ),
                capture_output=True,
                text=True,
                timeout=self._answer_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            limit = f"{self._answer_seconds:g} s"
            message = f"MPS at {self._pipes.pipe}: {asked}: no answer within {limit}"
            raise MpsError(message) from error
        except OSError as error:
            raise MpsError(f"MPS at {self._pipes.pipe}: {asked}: {error}") from error
        lines = tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
        output = " ".join((*lines, done.stderr.strip())).strip()
        refused = any(piece in output.lower() for piece in _REFUSALS)
        if done.returncode != 0 or refused:
            raise MpsError(f"MPS at {self._pipes.pipe}: {asked}: {output or 'no answer'}")
        return lines

    def servers(self) -> tuple[MpsServer, ...]:
        """Every server with its state and clients.

        Raises:
            MpsError: no daemon answers, in a way that is not understood, or it cannot tell the
                state of its servers.
        """
        if self.protocol == 3:
            return mps3.servers(self._run, multi_user=_multi_user(self._pipes.pipe))
        numbers = self._numbers("get_server_list")
        if not numbers:
            # Said before anybody opts in, and not after.
            self._status(0)
        return tuple(self._server(pid) for pid in numbers)

    def terminate(self, server: int, client: int) -> None:
        """End a client's work on the GPU; its process is then safe to kill.

        Raises:
            MpsError: the daemon refused.
        """
        if self.protocol == 3:
            mps3.terminate(self._run, client)
        else:
            self.ask(f"terminate_client {server} {client}")

    def quit(self, seconds: int = 10) -> None:
        """End the daemon and its servers.

        Raises:
            MpsError: no daemon answers.
        """
        if self.protocol == 3:
            mps3.quit_all(self._run)
        else:
            self.ask(f"quit -t {seconds}")

    def _server(self, pid: int) -> MpsServer:
        status = self._status(pid)
        try:
            state = ServerState(status[-1])
        except (IndexError, ValueError) as error:
            raise MpsError(f"MPS server {pid} has the unknown status {status}") from error
        clients = frozenset(self._numbers(f"get_client_list {pid}"))
        return MpsServer(pid, state, _uid(pid), clients, _multi_user(self._pipes.pipe))

    def _status(self, pid: int) -> tuple[str, ...]:
        """Words of a server's state; none for a server that there is not.

        Raises:
            MpsError: the daemon is too old to tell.
        """
        try:
            return self.ask(f"get_server_status {pid}")
        except MpsError as error:
            if "unknown command" in str(error).lower():
                text = (
                    "the daemon does not know get_server_status, so that a FAULT could not be "
                    "seen; it needs driver 550 or later"
                )
                raise MpsError(text) from error
            if pid == 0 and "not found" in str(error).lower():
                return ()
            raise

    def _numbers(self, command: str) -> tuple[int, ...]:
        lines = self.ask(command)
        wrong = [line for line in lines if not _NUMBER.match(line)]
        if wrong:
            raise MpsError(f"MPS at {self._pipes.pipe}: {command}: not understood: {wrong[0]}")
        return tuple(map(int, lines))


def _multi_user(pipe: Path) -> bool | None:
    """Whether the daemon's servers take every user; None when its command line cannot be seen."""
    argv = _daemon_file(pipe, "cmdline")
    if argv is None:
        return None
    return MULTI_USER in argv or any(flag in argv for flag in mps3.MULTI_USER)


def _daemon_file(pipe: Path, name: str) -> tuple[str, ...] | None:
    """Words of a file of the daemon's in ``/proc``; None when it cannot be seen."""
    pid = _daemon_pid(pipe / "control")
    if not pid:
        return None
    try:
        text = Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return None
    return tuple(piece.decode(errors="replace") for piece in text.split(b"\0"))


def _daemon_pid(control: Path) -> int | None:
    """Who listens on the control socket, as the kernel says; None when nobody does.

    Its pid file says less: older daemons write none, and one that has ended leaves it behind.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(str(control))
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        except OSError:
            return None
    return int(_PEER.unpack(peer)[0]) or None


def _uid(pid: int) -> int:
    """User of a process; -1 when it cannot be seen, which fits nobody."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return -1
