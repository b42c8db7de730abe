"""The MPS control program's second grammar, protocol 3 (drivers from r615 on): module and verb.

    server list --format=csv,noheader                NAME,UID,PID,STATUS,PIPE,DEVICES,...
    client list --server=NAME --format=csv,noheader  PID,SERVER,...
    client terminate PID
    -q

One daemon has any number of named servers. Only the first columns are read: the later ones hold
commas of their own (devices, command lines). Tables are never read, because they shorten numbers.
The daemon decides which protocol is spoken; its command line says which. Next step: ``mps``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from rose_agent.errors import MpsError
from rose_core.devices.mps import MpsServer, ServerState

PROTOCOL = ("-p", "3")
MULTI_USER = ("-m", "--multiuser")
_CSV = "--format=csv,noheader"
_STATES = {
    "ready": ServerState.ACTIVE,
    "active": ServerState.ACTIVE,
    "initializing": ServerState.INITIALIZING,
    "starting": ServerState.INITIALIZING,
    "fault": ServerState.FAULT,
}
_VARIABLE = "CUDA_MPS_PROTOCOL_VERSION"

Run = Callable[[Sequence[str]], tuple[str, ...]]


def speaks_protocol3(argv: Sequence[str], environment: Sequence[str] = ()) -> bool:
    """Whether a daemon with this command line and environment speaks protocol 3."""
    values = [entry.partition("=")[2] for entry in environment if entry.startswith(f"{_VARIABLE}=")]
    if values:
        return values[-1] == "3"
    pairs = itertools.pairwise(argv)
    by_flag = any(flag in {"-p", "--protocol"} and value == "3" for flag, value in pairs)
    return by_flag or "--protocol=3" in argv or "-p3" in argv


def servers(run: Run, *, multi_user: bool | None) -> tuple[MpsServer, ...]:
    """Every server with its state and clients.

    Args:
        run: sends one command.
        multi_user: the daemon takes every user's processes; None = not known.

    Raises:
        MpsError: an answer is not understood.
    """
    return tuple(_server(run, line, multi_user) for line in run(("server", "list", _CSV)))


def terminate(run: Run, client: int) -> None:
    """End a client's work.

    Raises:
        MpsError: the daemon refused.
    """
    run(("client", "terminate", str(client)))


def quit_all(run: Run) -> None:
    """End the daemon and its servers.

    Raises:
        MpsError: no daemon answers.
    """
    run(("-q",))


def _server(run: Run, line: str, multi_user: bool | None) -> MpsServer:
    try:
        name, uid, pid, status = line.split(",")[:4]
        state = _STATES[status.strip().lower()]
        number, user = int(pid), int(uid)
    except (ValueError, KeyError) as error:
        raise MpsError(f"MPS server list: not understood: {line}") from error
    listed = run(("client", "list", f"--server={name}", _CSV))
    return MpsServer(number, state, user, frozenset(map(_pid, listed)), multi_user)


def _pid(line: str) -> int:
    first = line.partition(",")[0].strip()
    if not first.isdigit():
        raise MpsError(f"MPS client list: not understood: {line}")
    return int(first)
