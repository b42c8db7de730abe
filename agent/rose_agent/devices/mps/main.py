"""``rose mps``: run the node's MPS control daemon, check it, or end one of its clients.

Without ``--check`` or ``--end`` the daemon runs in the foreground until SIGTERM, for a DaemonSet
that is replaced by hand: its end is the end of every client, serving included.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rose_agent.devices.access import beside_the_driver, located
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
from rose_agent.devices.mps.tasks import Question, check, end
from rose_agent.errors import MpsError
from rose_wire.flags import above_zero, add_log_level, complaint

_log = logging.getLogger(__name__)


def parser() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = argparse.ArgumentParser(
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
    first, *words = arguments.program.split()
    program = [located(first), *words]
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
    daemon = subprocess.Popen(  # the program is the platform's
        [*program, "-f", *mode], env=pipes.environment(beside_the_driver(links))
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
