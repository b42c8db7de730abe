"""The MPS control daemon of one GPU: start it, ask it, end a client through it.

Each GPU has a daemon of its own with its own pipe directory (``ROOT/GPU-uuid``), so that a fault
stays on that GPU and no client reaches another GPU's server. Commands go to
``nvidia-cuda-mps-control`` on its standard input, one per line, as NVIDIA documents them; answers
come back as text. A daemon that was started with protocol 3 is asked in that grammar (``mps3``).
``python -m rose_agent.devices.fake_mps`` speaks both without a GPU.
Next step: ``mps_tasks`` checks and ends clients, ``mps_verb`` runs a daemon.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rose_agent.devices import mps3
from rose_agent.devices.errors import MpsError
from rose_core.devices.mps import Server, ServerState

PROGRAM = "nvidia-cuda-mps-control"
MULTI_USER = "-multiuser-server"
PID_FILE = "nvidia-cuda-mps-control.pid"
ANSWER_SECONDS = 5.0
_NUMBER = re.compile(r"^\d+$")


@dataclass(frozen=True)
class Pipes:
    """Directories of one GPU's daemon."""

    root: Path
    gpu: str

    @property
    def pipe(self) -> Path:
        """Mounted into serving pods that opt in, and into engines."""
        return self.root / self.gpu / "pipe"

    @property
    def log(self) -> Path:
        """The daemon's and the server's logs."""
        return self.root / self.gpu / "log"

    def create(self) -> Pipes:
        """Make them; returns itself.

        Raises:
            OSError: they cannot be made.
        """
        for folder in (self.pipe, self.log):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        return self

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """For the daemon, which shows its GPU alone."""
        return {
            **inherited,
            "CUDA_VISIBLE_DEVICES": self.gpu,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self.log),
        }


class MpsControl:
    """Asks one GPU's daemon.

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
        words = _daemon_file(self._pipes.pipe, "cmdline") or ()
        given = _daemon_file(self._pipes.pipe, "environ") or ()
        return 3 if mps3.speaks(words, given) else 2

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
            message = f"MPS of {self._pipes.gpu}: {asked}: no answer within {limit}"
            raise MpsError(message) from error
        except OSError as error:
            raise MpsError(f"MPS of {self._pipes.gpu}: {asked}: {error}") from error
        lines = tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
        said = " ".join((*lines, done.stderr.strip())).strip()
        refused = any(word in said.lower() for word in ("cannot", "failed", "invalid", "not found"))
        if done.returncode != 0 or refused:
            raise MpsError(f"MPS of {self._pipes.gpu}: {asked}: {said or 'no answer'}")
        return lines

    def servers(self) -> tuple[Server, ...]:
        """Every server with its state and clients.

        Raises:
            MpsError: no daemon answers, or in a way that is not understood.
        """
        if self.protocol == 3:
            return mps3.servers(self._run, multi_user=_multi_user(self._pipes.pipe))
        return tuple(self._server(pid) for pid in self._numbers("get_server_list"))

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

    def _server(self, pid: int) -> Server:
        status = self.ask(f"get_server_status {pid}")
        try:
            state = ServerState(status[-1])
        except (IndexError, ValueError) as error:
            raise MpsError(f"MPS server {pid} has the unknown status {status}") from error
        clients = frozenset(self._numbers(f"get_client_list {pid}"))
        return Server(pid, state, _uid(pid), clients, _multi_user(self._pipes.pipe))

    def _numbers(self, command: str) -> tuple[int, ...]:
        lines = self.ask(command)
        wrong = [line for line in lines if not _NUMBER.match(line)]
        if wrong:
            raise MpsError(f"MPS of {self._pipes.gpu}: {command}: not understood: {wrong[0]}")
        return tuple(map(int, lines))


def _multi_user(pipe: Path) -> bool | None:
    """Whether the daemon's servers take every user; None when its command line cannot be seen."""
    words = _daemon_file(pipe, "cmdline")
    if words is None:
        return None
    return MULTI_USER in words or any(flag in words for flag in mps3.MULTI_USER)


def _daemon_file(pipe: Path, name: str) -> tuple[str, ...] | None:
    """Words of a file of the daemon's in ``/proc``; None when it cannot be seen."""
    try:
        pid = int((pipe / PID_FILE).read_text())
        text = Path(f"/proc/{pid}/{name}").read_bytes()
    except (OSError, ValueError):
        return None
    return tuple(word.decode(errors="replace") for word in text.split(b"\0"))


def _uid(pid: int) -> int:
    """User of a process; -1 when it cannot be seen, which fits nobody."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return -1
