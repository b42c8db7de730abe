"""MPS: whether a GPU may be shared through it, with which share, and how a client is ended.

MPS runs the kernels of several processes side by side; the owner of serving opts in, because it
must be a client of the same server and then shares its faults. What must be true before an engine
may start, first rule first:

| refusal | when |
|---|---|
| ``MpsUnavailable`` | no daemon answers in the pipe directory, or one too old to tell a FAULT |
| ``MpsFault`` | a server is in FAULT: a client crashed a GPU for all on it; they leave first |
| ``MpsServingOutside`` | no serving process is a client: the owner has not opted in |
| ``MpsWrongUser`` | the server is another user's, or cannot be seen to serve every user |

and after it started, before its permit opens:

| refusal | when |
|---|---|
| ``MpsNotAClient`` | the server does not list the engine: it runs outside, with the whole GPU |
| ``MpsShareNotGiven`` | it sees more multiprocessors than its share, or does not say how many |

Shares and priority are fixed when a client connects. So the live alternative to resizing is two
engines *parked* at two shares, of which the permit opens one (``rose_core.guard.lanes``). Serving
is never limited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

BELOW_NORMAL = 1
# Multiprocessors are handed out in pairs on recent GPUs; the share is rounded up to them.
SM_STEP = 2


class MpsRefusal(StrEnum):
    """Why MPS is not used; the same word as in the capability's condition."""

    NONE = ""
    UNAVAILABLE = "MpsUnavailable"
    FAULT = "MpsFault"
    SERVING_OUTSIDE = "MpsServingOutside"
    WRONG_USER = "MpsWrongUser"
    NOT_A_CLIENT = "MpsNotAClient"
    SHARE_NOT_GIVEN = "MpsShareNotGiven"


class ServerState(StrEnum):
    """What ``get_server_status`` answers."""

    INITIALIZING = "INITIALIZING"
    ACTIVE = "ACTIVE"
    FAULT = "FAULT"


@dataclass(frozen=True)
class MpsServer:
    """One MPS server.

    Attributes:
        uid: user it belongs to; a server that serves every user is root's, but so is one that
            serves root alone.
        clients: their process ids, as the daemon's pid namespace has them.
        multi_user: it serves every user; None = cannot be seen.
    """

    pid: int
    state: ServerState
    uid: int
    clients: frozenset[int] = frozenset()
    multi_user: bool | None = None


@dataclass(frozen=True)
class MpsSeen:
    """A node's MPS as it was found.

    Attributes:
        servers: None = no daemon answers.
        serving_pids: processes of the serving pod.
        silence: why no daemon answers, where that is known.
    """

    servers: tuple[MpsServer, ...] | None
    serving_pids: frozenset[int]
    silence: str = ""


@dataclass(frozen=True)
class Finding:
    """The answer to "may it?"."""

    refusal: MpsRefusal = MpsRefusal.NONE
    message: str = ""
    server: MpsServer | None = None


def may_share(seen: MpsSeen, engine_uid: int) -> Finding:
    """Whether an engine of this user may become a client beside serving."""
    if seen.servers is None:
        why = f" ({seen.silence})" if seen.silence else ""
        text = f"no MPS control daemon answers here{why}; run `rose mps` (chart: mps.enabled)"
        return Finding(MpsRefusal.UNAVAILABLE, text)
    if is_faulty(seen.servers):
        text = "the MPS server is in FAULT; restart serving, every client on that GPU has to leave"
        return Finding(MpsRefusal.FAULT, text)
    shared = [server for server in seen.servers if server.clients & seen.serving_pids]
    if not shared:
        text = "serving is no client of the node's daemon; mount its directory into the serving pod"
        return Finding(MpsRefusal.SERVING_OUTSIDE, text)
    return _admits(shared[0], engine_uid)


def is_faulty(servers: Sequence[MpsServer]) -> bool:
    """A client has crashed a GPU for all that share it; a server does not say which GPU."""
    return any(server.state is ServerState.FAULT for server in servers)


def _admits(server: MpsServer, engine_uid: int) -> Finding:
    """Whether a server takes this user's processes; others it would let wait for ever."""
    if server.multi_user or server.uid == engine_uid:
        return Finding(server=server)
    mode = "cannot be seen to serve" if server.multi_user is None else "does not serve"
    text = (
        f"server {server.pid} of user {server.uid} {mode} user {engine_uid}, whose processes would "
        "wait until serving ends; it takes a daemon that knows -multiuser-server, started as root"
    )
    return Finding(MpsRefusal.WRONG_USER, text)


@dataclass(frozen=True)
class MpsClient:
    """What an engine said and was seen as after its start.

    Attributes:
        pids: of its tree, as the daemon's pid namespace has them.
        multiprocessors: how many it sees; None = it does not say.
    """

    pids: frozenset[int]
    multiprocessors: int | None


def is_limited(
    client: MpsClient, server: MpsServer, whole: int | None, share_percent: int
) -> Finding:
    """Whether an engine that started got its share and no more.

    Args:
        client: the engine.
        server: the server it should be a client of.
        whole: multiprocessors of the GPU; None = the driver does not tell.
        share_percent: what it was started with.
    """
    if not client.pids & server.clients:
        text = f"server {server.pid} does not list the engine: it has the whole GPU"
        return Finding(MpsRefusal.NOT_A_CLIENT, text)
    if whole is None:
        text = "the driver does not tell how many multiprocessors the GPU has"
        return Finding(MpsRefusal.SHARE_NOT_GIVEN, text)
    most = expected_multiprocessors(whole, share_percent)
    if client.multiprocessors is None or client.multiprocessors > most:
        found = "nothing" if client.multiprocessors is None else client.multiprocessors
        text = f"the engine sees {found} of {whole} multiprocessors; {share_percent} % are {most}"
        return Finding(MpsRefusal.SHARE_NOT_GIVEN, text)
    return Finding(server=server)


def expected_multiprocessors(whole: int, share_percent: int) -> int:
    """Most multiprocessors that a client of this share may see."""
    exact = whole * share_percent / 100
    return min(whole, -(-int(-(-exact // 1)) // SM_STEP) * SM_STEP)


def client_environment(pipe: str, log: str, share_percent: int) -> Mapping[str, str]:
    """What makes a process a limited client; read once, when it first uses the GPU."""
    return {
        "CUDA_MPS_PIPE_DIRECTORY": pipe,
        "CUDA_MPS_LOG_DIRECTORY": log,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share_percent),
        "CUDA_MPS_CLIENT_PRIORITY": str(BELOW_NORMAL),
    }


class EndStep(StrEnum):
    """What is done next to end a client."""

    TERMINATE = "TerminateClient"
    WAIT = "Wait"
    KILL = "Kill"


def next_end_step(
    *, listed: bool, ordered: bool, waited_s: float, deadline_s: float = 2.0
) -> EndStep:
    """How an MPS client is ended: killing one with work under way can hang all the others.

    Args:
        listed: the server lists it as a client.
        ordered: ``terminate_client`` was sent.
        waited_s: since then.
        deadline_s: a server that does not let go by then is left to the kill.
    """
    if not listed:
        return EndStep.KILL
    if not ordered:
        return EndStep.TERMINATE
    return EndStep.WAIT if waited_s < deadline_s else EndStep.KILL
