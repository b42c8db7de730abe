"""``rose demo``: the main job on real parts, with a live table and a report at the end.

Set-up and measurement are in ``stack`` and ``measure``, everything that is judged in ``statistics``
and ``verdicts``. Whatever happens, what was started is ended: at the end, on a signal, and by the
reaper when this process is killed; ``--keep`` leaves the cluster.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec

from rose_core.accounting.breakdown import CostBreakdown, money
from rose_demo.agents import play_on
from rose_demo.errors import AlreadyRunning, DemoError
from rose_demo.measure import measure
from rose_demo.options import KINDS, SERVING_KIND, Options, parse
from rose_demo.reaper import Reaper
from rose_demo.records import Recording
from rose_demo.report import costs, costs_markdown, page, summary
from rose_demo.stack import Stack
from rose_demo.table import Screen
from rose_demo.trace import read_trace
from rose_demo.verdicts import Findings, judge
from rose_dev.cluster.node import Node, require_root
from rose_dev.environments import SetupFailed
from rose_dev.errors import DevelopmentError

FAILED = 2
INTERRUPTED = 130


def log(line: str) -> None:
    """One line of progress."""
    print(line, flush=True)


def write(recording: Recording, findings: Findings, out: Path) -> None:
    """Write report, summary and the recording itself into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.html").write_text(page(recording, findings))
    result = msgspec.json.encode(summary(recording, findings))
    (out / "summary.json").write_bytes(msgspec.json.format(result, indent=1))
    (out / "costs.md").write_text(costs_markdown(costs(recording, findings.attainments)))
    (out / "recording.json").write_bytes(msgspec.json.encode(recording))


def conclusion(findings: Findings, out: Path, found: CostBreakdown | None = None) -> list[str]:
    """Last lines of the run."""
    lines = []
    for verdict in findings.verdicts:
        lines.append(f"{verdict.result:<9} {verdict.promise}")
        lines += [f"          {check.result:<9} {check.text}" for check in verdict.checks]
    if found is not None and found.factors is not None:
        lines.append(
            f"a correct answer cost {money(found.factors.total)} of a GPU-hour: {found.correct} of "
            f"{found.accepted} accepted, bill {money(found.bill.total)}"
        )
    return [*lines, f"report: {out / 'report.html'}"]


def run(options: Options, node: Node, scratch: Path) -> int:
    """Set up, measure, judge, clean up.

    Raises:
        DemoError, DevelopmentError: a part did not come up.
    """
    stack = Stack(node, options, scratch, log)
    stack.refuse_to_share()
    with Reaper() as reaper, _cluster(stack):
        stack.up()
        stack.wait_for_parts()
        try:
            recording = _measured(stack, reaper)
            # Written before the agents play: whatever becomes of them, the measurement is there.
            write(recording, judge(recording), options.out)
            played = asyncio.run(play_on(stack))
            recording = msgspec.structs.replace(recording, agents=played)
        finally:
            stack.save_logs(options.out / "logs")
    findings = judge(recording)
    write(recording, findings, options.out)
    found = costs(recording, findings.attainments)
    log("\n".join(conclusion(findings, options.out, found)))
    return findings.exit_code


def _measured(stack: Stack, reaper: Reaper) -> Recording:
    """Wait for the slot, then measure."""
    stack.wait_for_slot()
    screen = Screen(sys.stdout, plain=stack.options.plain or not sys.stdout.isatty())
    return asyncio.run(measure(stack, reaper, screen))


@contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Holds the machine's demo; the lock goes with the process, however it ends.

    Raises:
        AlreadyRunning: another demo holds it.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            message = f"another demo runs on this machine ({file.read().strip()}); they would share"
            message += " its node and its cores, so wait for its end or stop it"
            raise AlreadyRunning(message) from None
        file.truncate(0)
        file.write(f"process {os.getpid()}\n")
        file.flush()
        yield


@contextmanager
def _cluster(stack: Stack) -> Iterator[None]:
    """Brings the node down at the end, undisturbed by further signals."""
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        if stack.options.keep:
            log(f"[demo] left running: KUBECONFIG={stack.node.kubeconfig}; end it: rose dev down")
        else:
            stack.node.down(log=log)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main(argv: list[str]) -> int:
    """Run the demo.

    Returns:
        0 every promise kept, 1 one broken or unproven, 2 a part did not come up, 130 interrupted.
    """
    options = parse(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        require_root()
        read_trace(options.trace)  # before minutes of set-up
        node = Node()
        with only_one(node.place.run.with_suffix(".demo.lock")):
            for kind in (SERVING_KIND, KINDS[options.rollout_engine]):
                kind.environment.install()
            with tempfile.TemporaryDirectory(prefix="rose-demo-") as scratch:
                return run(options, node, Path(scratch))
    except (DemoError, DevelopmentError, SetupFailed) as error:
        print(f"rose demo: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("rose demo: interrupted; everything it started has been ended", file=sys.stderr)
        return INTERRUPTED
