"""``rose weight-sync``: bring weights to every engine of this node.

Looks at the run directory twice a second and keeps one follower per engine process: a slot that
appears, an engine that is restarted and a changed weight source each start a new one. Where an
engine holds adapters of several runs, each run has a follower of its own; what the engine holds of
a run that nobody follows any more is taken away.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rose_agent.metrics import REGISTRY
from rose_agent.weightsync import metrics
from rose_agent.weightsync.follower import FollowedRun, Follower, Options
from rose_core.delta.probe import LIMIT
from rose_core.wire.host import EnsureEngine
from rose_core.wire.sync import WeightSource
from rose_engines.node.rundir import EngineFile, RunDir, SlotDir, read_json
from rose_wire import faults, flags, observability
from rose_wire.daemon import stop_signal
from rose_wire.flags import VerbParser

_log = logging.getLogger(__name__)
_SCAN_SECONDS = 0.5


@dataclass(frozen=True)
class FollowedSlot:
    """What one follower follows; anything else needs another one."""

    slot: SlotDir
    source: WeightSource
    engine_started_ns: int
    follows: FollowedRun = field(default_factory=FollowedRun)


def subjects(rundir: RunDir) -> frozenset[FollowedSlot]:
    """Every engine process of the node whose order and record can be read."""
    found = set()
    for slot in rundir.all_slots():
        order = read_json(slot.slot, EnsureEngine)
        record = read_json(slot.engine, EngineFile)
        if order is not None and record is not None:
            source = order.weights
            if not order.engine.shares_adapters:
                found.add(FollowedSlot(slot, source, record.started_ns))
                continue
            for run in source.runs:
                first = run == source.run
                follows = FollowedRun(run, first=first, runs=source.runs if first else ())
                own = msgspec.structs.replace(source, run=run, others=())
                found.add(FollowedSlot(slot, own, record.started_ns, follows))
    return frozenset(found)


@dataclass
class Followers:
    """The followers of a node."""

    rundir: RunDir
    options: Options
    tasks: dict[FollowedSlot, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self) -> None:
        """Scan until cancelled."""
        try:
            while True:
                await self.scan()
                await asyncio.sleep(_SCAN_SECONDS)
        finally:
            await self._end(set(self.tasks))

    async def scan(self) -> None:
        """Start and end followers so that they match the run directory."""
        wanted = await asyncio.to_thread(subjects, self.rundir)
        crashed = {subject for subject, task in self.tasks.items() if task.done()}
        await self._end((set(self.tasks) - wanted) | crashed)
        for subject in wanted - set(self.tasks):
            follower = Follower(
                subject.slot,
                subject.source,
                subject.engine_started_ns,
                self.options,
                subject.follows,
            )
            self.tasks[subject] = asyncio.create_task(follower.run())
        metrics.FOLLOWED.set(len(self.tasks))

    async def _end(self, gone: set[FollowedSlot]) -> None:
        tasks = [self.tasks.pop(subject) for subject in gone]
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                _log.error("a follower ended: %s", outcome, exc_info=outcome)


def parser() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = VerbParser(prog="rose weight-sync", description=__doc__)
    made.add_argument(
        "--rundir", type=Path, default=Path("/run/rose"), help="run directory of the node"
    )
    made.add_argument(
        "--http-port", type=flags.port, default=9104, help="metrics and health; 0 = any"
    )
    made.add_argument(
        "--token-file", type=Path, help="the installation's bearer token, shown to --relay alone"
    )
    made.add_argument("--relay", type=flags.target, help="host:port of the installation's relay")
    made.add_argument(
        "--store-token-file", type=Path, help="credential of this cluster (rose tenant grant)"
    )
    made.add_argument(
        "--attest-seconds", type=flags.amount, default=600.0, help="0 = once per engine"
    )
    made.add_argument(
        "--probe-limit",
        type=flags.amount,
        default=LIMIT,
        help="quarantine an engine whose log-probs of the fixed prompt differ by more nats than "
        "this on average; 0 = do not ask",
    )
    made.add_argument(
        "--version-gibibytes",
        type=flags.count,
        default=0,
        help="largest version that a slot fetches: it lies in memory until its engine has taken "
        "it; 0 = no limit",
    )
    flags.add_log_level(made)
    return made


async def serve(arguments: argparse.Namespace) -> int:
    """Run until SIGTERM or SIGINT.

    Returns:
        Exit code.
    """
    faults.arm()
    options = Options(
        token=flags.token(arguments.token_file),
        relay=arguments.relay or "",
        store_token=flags.token(arguments.store_token_file),
        attest_every_seconds=arguments.attest_seconds,
        probe_limit=arguments.probe_limit,
        most_bytes=arguments.version_gibibytes << 30,
    )
    followers = Followers(RunDir(arguments.rundir).create(), options)
    stop = stop_signal()
    pages, port = await observability.serve(
        REGISTRY,
        host="0.0.0.0",  # noqa: S104  # the kubelet probes by the node's address
        port=arguments.http_port,
    )
    _log.info("ready: pages on port %d", port)
    task, stopping = asyncio.create_task(followers.run()), asyncio.create_task(stop.wait())
    # Who follows nothing any more must not look healthy: the kubelet starts another.
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    broken = task.done()
    for pending in (task, stopping):
        pending.cancel()
    outcomes = await asyncio.gather(task, stopping, return_exceptions=True)
    await pages.cleanup()
    if broken:
        _log.error("following ended: %s", outcomes[0])
    return int(broken)


def main(argv: list[str]) -> int:
    """Entry of the verb.

    Returns:
        0 ended as asked, 1 failed.
    """
    arguments = parser().parse_args(argv)
    logging.basicConfig(
        level=arguments.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        return asyncio.run(serve(arguments))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"rose weight-sync: {flags.complaint(error, argv)}\n")
        return 1
