"""A boundary's record: what changed is cut and published; and sandboxes brought back from records.

What is saved is decided in ``rose_core.sandboxes.policy``; this carries it out. Next step: ``host``
says when.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from rose_core.sandboxes import policy
from rose_core.sandboxes.policy import (
    BoundaryAction,
    Decision,
    HostPressure,
    SaveCosts,
    decide,
)
from rose_core.sandboxes.turns import SandboxPhase
from rose_sandbox import metrics
from rose_sandbox.box import BoundTokens, Box
from rose_sandbox.errors import CannotCheckpoint, SandboxError
from rose_sandbox.inspector.inspector import Effects, Inspector
from rose_sandbox.recorded import read_spec, written_effect, written_spec
from rose_sandbox.runtimes.runtime import CheckpointParts, Handle, Kind, Part, Runtime, SandboxSpec
from rose_weights.errors import Damaged, Fenced, Incomplete, WeightsError
from rose_weights.store.records import PublishedTurn, Records, SavedPart, TurnRecord, mapped

LOG = logging.getLogger(__name__)


class Saver:
    """Saves sandboxes of one host, and brings them back.

    Args:
        runtime, inspector, records: as of ``Host``.
        scratch: folder for parts on their way.
        pressure: what else happens on the machine.
        clock: monotonic seconds.
        resume: brings back a sandbox that was suspended without a record.

    Attributes:
        costs: of saving, suspending and resuming, as they went so far.
    """

    def __init__(
        self,
        runtime: Runtime,
        inspector: Inspector,
        records: Records,
        *,
        scratch: Path,
        pressure: Callable[[], HostPressure],
        clock: Callable[[], float],
        resume: Callable[[Box], Awaitable[None]],
    ) -> None:
        self._runtime, self._inspector, self._records = runtime, inspector, records
        self._scratch, self._pressure, self._now = scratch, pressure, clock
        self._resume = resume
        self.costs = SaveCosts()

    async def save_what_changed(self, box: Box) -> None:
        """Save a boundary as the policy says, by what the inspector saw.

        A look that outlasts a held reply leaves its turn to the next one, unless too much has no
        record already: then the agent waits for the end of this one.
        Whatever it dies of, the agent goes on, and the next boundary saves all.

        Raises:
            Fenced: another host has the session.
        """
        if policy.is_starved(box.clock.unsaved(self._now()), self.costs):
            box.decision = Decision(BoundaryAction.NONE, policy.SaveReason.LATE)
            box.clock = box.clock.saving()
        try:
            facts = await self._runtime.facts(box.handle)
            effects = await self._inspector.effects(box.spec.key, facts)
            if box.forced:
                effects = replace(effects, unknown=(*effects.unknown, "a record failed"))
            if box.clock.phase is SandboxPhase.ACTING:
                # The look took longer than a reply is held: the next boundary has it.
                metrics.TURNS.labels("failed", policy.SaveReason.LATE).inc()
                return
            turn = policy.TurnBoundary(box.clock.turn, box.clock.saved)
            pressure = replace(self._pressure(), serving_burns=False)  # admitted
            wait = box.clock.wait if box.clock.ready_at is None else None
            made = decide(turn, effects, wait, self.costs, pressure)
            self.costs = policy.learn_from(made, wait, self.costs, pressure)
            await self.save(box, made)
        except Fenced:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is must not hold the agent for ever
            LOG.warning("sandbox %s: turn %d is not saved: %s", box.spec.key, box.clock.turn, error)
            box.unsaved, box.forced = str(error) or type(error).__name__, True
            suspending = (
                box.clock.phase is SandboxPhase.SAVING
                and box.decision.action is BoundaryAction.SUSPEND
            )
            box.clock = box.clock.abandon(suspending=suspending)
            metrics.TURNS.labels("failed", box.decision.reason).inc()

    async def save(self, box: Box, decision: Decision) -> None:
        """Carry a decision out: cut, publish. What fails by name is in ``unsaved``.

        Raises:
            Fenced: another host has the session.
        """
        began = self._now()
        if box.clock.phase is not SandboxPhase.SAVING:
            box.clock = box.clock.saving()
        box.decision, box.unsaved = decision, ""
        try:
            await self._store(box, decision)
        except CannotCheckpoint as error:
            box.unsaved = error.what
            box.clock = box.clock.failed()
        except Fenced:
            raise
        except (SandboxError, WeightsError, OSError) as error:
            box.unsaved = str(error)
            # A suspended sandbox has no processes to go on with: it is brought back at once. Where
            # a suspend failed nobody knows whether it is one; to resume one that runs is nothing.
            if decision.action is BoundaryAction.SUSPEND:
                box.forced = True
                await self._resume(box)
            box.clock = box.clock.failed()
        self._count(box, self._now() - began)

    async def _store(self, box: Box, decision: Decision) -> None:
        """Cut or suspend, publish what was cut, and move the clock on."""
        _check_moment(box)
        async with self._folder() as folder:
            suspends = decision.action is BoundaryAction.SUSPEND
            if suspends:  # its parts stay where ``resume`` looks for them
                kept = self._scratch / box.spec.key
                shutil.rmtree(kept, ignore_errors=True)
                kept.mkdir()
                parts = await self._runtime.suspend(box.handle, kept)
            else:
                parts = await self._cut(box, decision, folder)
                _check_moment(box)
            box.forced = True
            await self._publish_whole(box, parts, folder)
            box.forced = False
        box.clock = box.clock.suspended() if suspends else box.clock.stored()

    def _count(self, box: Box, seconds: float) -> None:
        """What the boundary took, for the decisions to come and for the metrics."""
        box.seconds = seconds
        if box.clock.phase is SandboxPhase.SUSPENDED:
            self.costs = self.costs.suspended(seconds)
        elif not box.unsaved:
            self.costs = self.costs.saved(seconds)
        saved = "failed" if box.unsaved else box.decision.action
        metrics.TURNS.labels(saved, box.decision.reason).inc()
        metrics.CHECKPOINT_SECONDS.inc(seconds)

    async def _publish_whole(self, box: Box, parts: CheckpointParts, folder: Path) -> None:
        try:
            await self._publish(box, parts)
        except (Incomplete, Damaged) as error:
            # What an earlier record holds is lost there; the sandbox has all of it still.
            LOG.warning("sandbox %s: saved in full: %s", box.spec.key, error)
            if parts.files is None or parts.processes is None:
                box.decision = Decision(BoundaryAction.FULL, policy.SaveReason.LOST)
                (again := folder / "again").mkdir()
                parts = await self._runtime.checkpoint(box.handle, Kind.FULL, again)
                await self._inspector.saved(box.spec.key)
            await self._publish(box, parts)

    async def _cut(self, box: Box, decision: Decision, folder: Path) -> CheckpointParts:
        if decision.action is BoundaryAction.NONE:
            return CheckpointParts(box.spec)
        kind = Kind(decision.action.value)
        parts = await self._runtime.checkpoint(box.handle, kind, folder)
        # From here until there is a record, the inspector's mark is ahead of what is saved.
        box.forced = True
        await self._inspector.saved(box.spec.key)
        if kind is Kind.FULL:
            return parts
        # Half a cut is whole only while the other half stood still: what changed since is seen now.
        facts = await self._runtime.facts(box.handle)
        since: Effects = await self._inspector.effects(box.spec.key, facts)
        other = since.processes if kind is Kind.FILES else since.files
        if not (since.unknown or other):
            return parts
        box.decision = Decision(BoundaryAction.FULL, policy.SaveReason.CHANGED)
        parts = await self._runtime.checkpoint(box.handle, Kind.FULL, folder)
        await self._inspector.saved(box.spec.key)
        return parts

    async def publish_again(self, box: Box, tokens: BoundTokens) -> None:
        """Publish the record of a suspended sandbox once more, as one that goes with these tokens.

        Raises:
            Fenced: another host has the session.
            WeightsError: the record stands as it was.
        """
        before = box.tokens
        box.bind(tokens)
        try:
            await self._publish(box, CheckpointParts(box.spec))
        except BaseException:  # also where its caller goes away: the record is the old one
            box.bind(before)
            raise

    async def _publish(self, box: Box, parts: CheckpointParts) -> None:
        turn = PublishedTurn(
            box.clock.turn,
            box.ids,
            written_spec(box.spec),
            None,
            None,
            box.versions,
            tuple(written_effect(one) for one in box.effects),
            tuple(box.commands.values()),
            box.owned.last.parent if box.owned.last is not None else None,
            box.history or None,
        )

        def publish() -> None:
            with ExitStack() as opened:
                halves = {
                    name: opened.enter_context(mapped(part.path))
                    for name, part in (("files", parts.files), ("processes", parts.processes))
                    if part is not None
                }
                whole = replace(turn, files=halves.get("files"), processes=halves.get("processes"))
                self._records.publish(box.owned, whole)

        before = box.owned.written
        await asyncio.to_thread(publish)
        metrics.RECORD_BYTES.inc(box.owned.written - before)
        if (made := box.owned.last) is not None:
            parts_of = (one.size for one in (made.files, made.processes) if one is not None)
            metrics.STATE_BYTES.inc(sum(parts_of))

    async def bring(
        self, record: TurnRecord, keys: Sequence[str]
    ) -> list[tuple[Handle, SandboxSpec]]:
        """Sandboxes of a record, whose parts are read once. All of them, or none.

        Raises:
            CannotRestore: the parts do not give a sandbox back.
        """
        specs = [read_spec(record.spec, key) for key in keys]
        async with self._folder() as folder:
            reading = [
                asyncio.create_task(self._part(part, folder / f"{name}.tar"))
                for name, part in (("files", record.files), ("processes", record.processes))
            ]
            # To the end of both, also where one fails: then the folder goes that they write into.
            await asyncio.gather(*reading, return_exceptions=True)
            files, processes = [one.result() for one in reading]
            saved = replace(specs[0], key=str(record.spec["key"]))
            parts = CheckpointParts(saved, files, processes)
            handles = await self._runtime.restore_all(parts, specs)
            return list(zip(handles, specs, strict=True))

    async def _part(self, part: SavedPart | None, path: Path) -> Part | None:
        if part is None:
            return None
        await asyncio.to_thread(self._records.part_into, part, path)
        return Part(path, part.size)

    @asynccontextmanager
    async def _folder(self) -> AsyncIterator[Path]:
        """For parts on their way; gone when the block ends."""
        made = Path(tempfile.mkdtemp(dir=self._scratch))
        try:
            yield made
        finally:
            await asyncio.to_thread(shutil.rmtree, made, ignore_errors=True)


def _check_moment(box: Box) -> None:
    """Commands wait for the record of their turn, and so do connections, but not for ever.

    Raises:
        CannotCheckpoint: one has begun: what it does is of no moment that the tokens are of.
    """
    if box.has_acted:
        session = box.owned.session
        raise CannotCheckpoint("a connection", f"session {session}: one began before its record")
