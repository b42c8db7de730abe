"""What people and scripts do with a running MPS daemon: check it, end one client.

``rose mps --check`` answers whether an engine may share serving's GPU now, by the decisions of
``rose_core``; with ``--client`` also whether that process got its share. ``--end PID`` ends it
in the only safe order: ``terminate_client``, wait until the server has let go, SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from rose_agent.devices.mps.control import MpsControl
from rose_agent.errors import MpsError
from rose_core.devices.mps import (
    Client,
    EndStep,
    Finding,
    MpsSeen,
    Server,
    is_limited,
    may_share,
    next_end_step,
)

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Question:
    """What ``--check`` is asked.

    Attributes:
        serving: a process of the serving pod, in the node's pid namespace.
        client: an engine's process that should be limited; None = may one start?
        seen, whole: multiprocessors that it sees, and those of the GPU.
    """

    serving: int
    engine_uid: int = 0
    client: int | None = None
    seen: int | None = None
    whole: int = 0
    share_percent: int = 30


def check(control: MpsControl, question: Question) -> Finding:
    """Ask the daemon, and decide."""
    servers: tuple[Server, ...] | None = None
    silence = ""
    try:
        servers = control.servers()
    except MpsError as error:
        silence = str(error)
    seen = MpsSeen(servers, frozenset({question.serving}), silence)
    found = may_share(seen, question.engine_uid)
    if found.server is None or question.client is None:
        return found
    client = Client(frozenset({question.client}), question.seen)
    return is_limited(client, found.server, question.whole, question.share_percent)


def end(
    control: MpsControl,
    pid: int,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """End a client; returns whether the server let go of it before it was killed.

    Raises:
        MpsError: no daemon answers; nothing was killed.
    """
    ordered_s: float | None = None
    while True:
        server = next((one for one in control.servers() if pid in one.clients), None)
        waited_s = clock() - ordered_s if ordered_s is not None else 0.0
        step = next_end_step(
            listed=server is not None, ordered=ordered_s is not None, waited_s=waited_s
        )
        if step is EndStep.KILL:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return server is None
        if step is EndStep.TERMINATE and server is not None:
            ordered_s = clock()
            with contextlib.suppress(MpsError):  # it may have left between the two questions
                control.terminate(server.pid, pid)
        sleep(_POLL_SECONDS)
