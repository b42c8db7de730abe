"""``rose mps``: run the node's MPS control daemon, check it, or end one of its clients.

Without ``--check`` or ``--end`` the daemon runs in the foreground until SIGTERM, for a DaemonSet
that is replaced by hand: its end is the end of every client, serving included.

``--check`` answers whether an engine may share serving's GPU now, by the decisions of
``rose_core``; with ``--client`` also whether that process got its share. ``--end PID`` ends it in
the only safe order: ``terminate_client``, wait until the server has let go, SIGKILL.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rose_agent.devices.access import driver_neighbours, located
from rose_agent.devices.mps import control3 as mps3
from rose_agent.devices.mps.control import (
    ANSWER_SECONDS,
    MULTI_USER,
    PROGRAM,
    ROOT,
    MpsControl,
    Pipes,
    knows,
)
from rose_agent.errors import MpsError
from rose_agent.os import kernel
from rose_core.devices.mps import (
    EndStep,
    Finding,
    MpsClient,
    MpsSeen,
    MpsServer,
    is_limited,
    may_share,
    next_end_step,
)
from rose_wire.flags import VerbParser, above_zero, add_log_level, complaint

_POLL_SECONDS = 0.05

_log = logging.getLogger(__name__)


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
    servers: tuple[MpsServer, ...] | None = None
    silence = ""
    try:
        servers = control.servers()
    except MpsError as error:
        silence = str(error)
    seen = MpsSeen(servers, frozenset({question.serving}), silence)
    found = may_share(seen, question.engine_uid)
    if found.server is None or question.client is None:
        return found
    client = MpsClient(frozenset({question.client}), question.seen)
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
        server = next((each for each in control.servers() if pid in each.clients), None)
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


def parser() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = VerbParser(
        prog="rose mps", description="Run the node's MPS control daemon in the foreground."
    )
    add = made.add_argument
    add("--root", type=Path, default=ROOT, help="folder of its pipe, log and shared memory")
    add("--program", default=PROGRAM, help="the control program")
    add("--protocol", type=int, choices=[2, 3], default=2, help="3 needs a driver from r615 on")
    add(
        "--answer-seconds",
        type=above_zero,
        default=ANSWER_SECONDS,
        help="a daemon that takes longer to answer counts as none",
    )
    add("--check", action="store_true", help="say whether an engine may share a GPU now")
    add("--serving", type=int, default=0, metavar="PID", help="with --check: serving's process")
    add("--engine-uid", type=int, default=0, help="with --check: the engine's user")
    add("--client", type=int, metavar="PID", help="with --check: did this engine get its share?")
    add("--seen", type=int, help="with --client: multiprocessors it sees")
    add("--of", type=int, default=0, help="with --client: multiprocessors of the GPU")
    add("--share", type=int, default=30, help="with --client: percent it was started with")
    add("--end", type=int, metavar="PID", help="terminate this client, then kill it")
    add_log_level(made)
    return made


def main(argv: list[str]) -> int:
    """Entry of the verb.

    Returns:
        0 done, or yes; 1 no, or the daemon could not be started or asked.
    """
    arguments = parser().parse_args(argv)
    logging.basicConfig(level=arguments.log_level, format="%(levelname)s %(name)s %(message)s")
    first, *rest = arguments.program.split()
    program = [located(first), *rest]
    try:
        pipes = Pipes(arguments.root)
        control = MpsControl(pipes, program, arguments.answer_seconds)
        if arguments.check:
            return _check(arguments, control)
        if arguments.end is not None:
            return 0 if end(control, arguments.end) else 1
        return _run(program, pipes.create(), control, arguments.protocol)
    except FileNotFoundError as error:
        sys.stderr.write(f"rose mps: {error.filename}: no such program; --program names it\n")
        return 1
    except (MpsError, OSError) as error:
        sys.stderr.write(f"rose mps: {complaint(error, argv)}\n")
        return 1


def _check(arguments: argparse.Namespace, control: MpsControl) -> int:
    question = Question(
        arguments.serving,
        arguments.engine_uid,
        arguments.client,
        arguments.seen,
        arguments.of,
        arguments.share,
    )

    found = check(control, question)
    sys.stdout.write(f"{found.refusal.value}: {found.message}\n" if found.refusal else "ok\n")
    return 1 if found.refusal else 0


def _run(program: list[str], pipes: Pipes, control: MpsControl, protocol: int) -> int:
    # Serving and each engine are different users; only root may start a server for all of them.
    many = MULTI_USER if protocol == 2 else mps3.MULTI_USER[1]
    mode = [] if protocol == 2 else [*mps3.PROTOCOL]
    if os.geteuid() == 0 and knows(program, many):
        mode += [many]
    else:
        _log.warning("this daemon serves one user at a time: engines must be serving's user")
    links = Path(tempfile.mkdtemp(prefix="rose-mps-"))
    # The program is the platform's. It ends with this process, however that ends: nobody else
    # would end it in order, and the next one finds its socket in use.
    daemon = subprocess.Popen(
        [*program, "-f", *mode],
        env=pipes.environment(driver_neighbours(links)),
        preexec_fn=partial(kernel.die_with_parent, signal.SIGTERM),  # noqa: PLW1509  # one thread here
    )
    ordered = False

    def stop(_number: int, _frame: object) -> None:
        # Clients first lose their server in an orderly way; a killed daemon would leave it behind.
        nonlocal ordered
        ordered = True
        try:
            control.quit()
        except MpsError as error:
            _log.warning("%s", error)
            daemon.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    _log.info("MPS: pipe directory %s", pipes.pipe)
    code = daemon.wait()
    shutil.rmtree(links, ignore_errors=True)
    # Ends with 1 when a server had to be forced, which is no failure of an order to end.
    return 0 if ordered else code
