"""Follows one slot: keeps its engine at the head of its run and says what is attested.

One follower per engine process. It watches the head, asks ``decide`` what to do, does it through
``plugin`` and ``rose_weights.receive.client``, and writes ``weights.json``, from which engine host,
guard and router learn which version may be used. Whatever fails, the version before goes on
serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from rose_agent.errors import WrongAnswers, WrongDigest
from rose_agent.weightsync import metrics, records
from rose_agent.weightsync.decide import (
    QUARANTINE_REASONS,
    SOFT_REASONS,
    Engine,
    Head,
    Progress,
    Step,
    SyncAction,
    decide,
    failed,
    lag,
    name_of,
    succeeded,
)
from rose_agent.weightsync.plugin import Plugin
from rose_agent.weightsync.probe import ProbedCommit, TruthMeter
from rose_core.delta import Manifest, faults
from rose_core.delta.probe import LIMIT
from rose_core.identity import BASE_LABEL, published
from rose_core.wire.sync import WeightSource
from rose_engines.errors import CommitRefused, EngineError, EngineUnavailable
from rose_engines.node.rundir import SlotDir, WeightsFile, read_json, write_json
from rose_engines.weights.calls import Committed, Staged
from rose_weights.errors import UnknownRun, WeightsError
from rose_weights.receive.client import WeightsClient
from rose_wire.errors import WireError

_RECONNECT_SECONDS = 1.0

_log = logging.getLogger(__name__)

_HISTORY = 20
# How often what is served is reported to the store; it forgets after three times that.
_REPORT_SECONDS = 60.0
# Tries to commit what lies staged before it is given up and staged anew.
_COMMIT_ATTEMPTS = 50


class Heads:
    """Keeps the head of one run known; a store that is away costs nothing but news.

    Between us and the store stands a relay, and between them what may lose a connection without a
    word. A watch that has been silent for long is begun anew: it begins with the head, so whatever
    was lost costs this silence.

    Args:
        source: endpoint and run.
        silence_seconds: a watch that has brought nothing for so long is begun anew.
        on_change: called whenever ``head`` or ``error`` may have changed.

    Attributes:
        head: None until it is known.
        none_published: the store's last answer is that the run has no version; frozen
            weights have no store and never a version.
        error: why nothing newer can be known now; empty while the watch goes on.
    """

    def __init__(
        self, source: WeightSource, silence_seconds: float, on_change: Callable[[], None]
    ) -> None:
        self._source = source
        self._silence = silence_seconds
        self._on_change = on_change
        self._encoded = ("", 0.0)
        self.head: Head | None = None
        self.none_published = source.frozen
        self.error = ""

    @property
    def label(self) -> str:
        """The head's label; empty until it is known."""
        return str(self.head.version) if self.head else ""

    def encode_seconds(self, version: str) -> float | None:
        """What encoding a version took its publisher; None unless it is the head, and known."""
        head, seconds = self._encoded
        return seconds if head == version and seconds else None

    async def watch(self, store: WeightsClient) -> None:
        """Watch until the store is lost, then rest a while; ``error`` says why."""
        try:
            while True:
                description = await store.describe(self._source.run)
                if description.head is None:
                    self.none_published = self.head is None
                    self._set_error(f"run {self._source.run} has no published version yet")
                if not await self._follow(store):
                    break
            self._set_error("the store ended the watch")
        except (WeightsError, WireError) as error:
            if isinstance(error, UnknownRun):  # no publisher has opened it
                self.none_published = self.head is None
            self._set_error(f"weight store {self._source.endpoint}: {error}")
        await asyncio.sleep(_RECONNECT_SECONDS)

    async def _follow(self, store: WeightsClient) -> bool:
        """Note every head that a watch brings; True when it was silent and is to be renewed."""
        async with contextlib.aclosing(store.watch(self._source.run)) as heads:
            while True:
                try:
                    async with asyncio.timeout(self._silence):
                        info = await anext(heads, None)
                except TimeoutError:
                    return True
                if info is None:
                    return False
                self.none_published = False
                self.head = Head(info.version, info.digest)
                self._encoded = (str(info.version), info.encode_seconds)
                self._set_error("")

    def _set_error(self, error: str) -> None:
        self.error = error
        self._on_change()


@dataclass(frozen=True)
class Options:
    """What all followers share.

    Attributes:
        token: bearer token of the installation, for its relay.
        relay: ``host:port`` of the installation's relay; empty = there is none.
        store_token: what every other store is shown.
        attest_every_seconds: recompute the live digest that often.
        probe_limit: mean difference of the fixed prompt's log-probs, in nats, from which an engine
            is quarantined; 0 = it is not asked.
        silence_seconds: a watch of the head that has brought nothing for so long is begun anew.
        most_bytes: of one version; a larger one is refused by name, or it would take the memory of
            all slots of the node. 0 = no limit.
    """

    token: str = ""
    relay: str = ""
    store_token: str = ""
    attest_every_seconds: float = 600.0
    probe_limit: float = LIMIT
    silence_seconds: float = 30.0
    most_bytes: int = 0
    clock: Callable[[], float] = time.monotonic

    def token_for(self, endpoint: str) -> str:
        """What to show there: the installation's token never leaves the cluster."""
        return self.token if self.relay and endpoint == self.relay else self.store_token


@dataclass(frozen=True)
class FollowedRun:
    """Which of an engine's adapters a follower is about, where it holds those of several runs.

    Attributes:
        adapter: the run's name; empty where the engine follows one alone.
        first: what it reports of the slot is of this run.
        runs: all that the engine is to hold, for the follower of the first: it takes away
            those of others.
    """

    adapter: str = ""
    first: bool = True
    runs: tuple[str, ...] = ()


class Follower:
    """One engine process and its run.

    Args:
        slot: the slot's part of the run directory.
        source: endpoint and run.
        engine_started_ns: which process of the slot this is.
        follows: which of its adapters.
    """

    def __init__(
        self,
        slot: SlotDir,
        source: WeightSource,
        engine_started_ns: int,
        options: Options,
        follows: FollowedRun | None = None,
    ) -> None:
        self._slot = slot
        self._source = source
        self._started_ns = engine_started_ns
        self._options = options
        self._follows = follows or FollowedRun()
        self._others_gone = not self._follows.runs
        self._path = slot.weights_of("" if self._follows.first else self._follows.adapter)
        self._plugin = Plugin(slot, self._follows.adapter, first=self._follows.first)
        self._heads = Heads(source, options.silence_seconds, self._note_head)
        self._changed = asyncio.Event()
        self._progress = Progress()
        self._reported: tuple[float, str] = (0.0, "")
        self._commits = 0
        self._truth = TruthMeter(
            slot,
            self._plugin.gate,
            self._changed.set,
            options.probe_limit,
            run=self._follows.adapter,
        )
        self._failures: tuple[str, ...] = ()
        self._written = _previous(self._path, engine_started_ns)
        self._disowned = False
        self._history = self._written.history
        self._fetched = self._written.fetched_bytes

    async def run(self) -> None:
        """Follow until cancelled."""
        try:
            while True:
                if self._source.frozen:
                    await self._rest(await self._round(None))
                else:
                    await self._rounds()
        finally:
            await self._truth.close()
            await self._plugin.close()
            self._plugin.gate.close()

    async def _rounds(self) -> None:
        """Follow until the store is lost.

        Each connection reads the node's certificate and whom it believes as it is dialled, and both
        are renewed during the life of an engine.
        """
        store = WeightsClient(
            self._source.endpoint,
            token=self._options.token_for(self._source.endpoint),
            holder=self._slot.uid,
            rest=self._plugin.gate.pause_after,
        )
        watcher = asyncio.create_task(self._heads.watch(store))
        watcher.add_done_callback(lambda _: self._changed.set())
        try:
            while not watcher.done():
                self._changed.clear()
                await self._rest(await self._round(store))
        finally:
            watcher.cancel()
            await asyncio.wait({watcher})
            self._truth.follow(store, None)
            await store.close()

    async def _rest(self, seconds: float) -> None:
        """Wait for news, at most so long."""
        # Not wait_for: in Python 3.11 it loses a cancellation that comes with the news.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _round(self, store: WeightsClient | None) -> float:
        """Look, decide, act; returns how long to wait for news. Frozen weights have no store."""
        engine = await self._look() if await self._drop_other_runs() else None
        if complaint := self._truth.complaint():
            self._fail(WrongAnswers(complaint))
        now = self._options.clock()
        step = decide(
            engine,
            self._heads.head,
            self._progress,
            now,
            self._options.attest_every_seconds,
            none_published=self._heads.none_published,
        )
        self._write(engine, step.error)
        if store is not None:
            await self._report(store, now)
            self._truth.follow(store, self._probe_subject())
        if step.action is SyncAction.WAIT or engine is None:
            return step.wait_seconds
        try:
            if step.action is SyncAction.ATTEST:
                await self._attest(engine)
                faults.at("sync.attested")
            elif store is not None:
                await self._pull(store, step, engine.codecs)
            self._progress = succeeded(self._options.clock())
        except (EngineError, WeightsError, WireError, WrongDigest, OSError) as error:
            self._fail(error)
        self._write(await self._look(), "")
        return 0.0 if self._progress.retry_at <= self._options.clock() else 0.05

    async def _drop_other_runs(self) -> bool:
        """Take away what the engine and the disk hold of runs that nobody follows any more.

        Returns:
            False while the engine does not answer.
        """
        if self._others_gone:
            return True
        try:
            self._others_gone = await self._plugin.unbind_others(self._follows.runs)
        except EngineUnavailable:
            return False
        if self._others_gone:
            await asyncio.to_thread(_forget_others, self._slot, self._follows.runs)
        return True

    async def _look(self) -> Engine | None:
        """What is live; None while the engine does not answer."""
        try:
            engine = await self._plugin.read_engine()
        except EngineUnavailable:
            return None
        before = self._written
        named = name_of(engine, self._source.run)
        same = (before.version, before.digest) == (named, engine.digest)
        if self._progress == Progress() and before.attested:
            if same:
                # An earlier weight-sync has attested these very weights on this very process.
                self._progress = succeeded(self._options.clock())
            self._disowned = not same  # its run may have been taken away since, and come back
        return engine

    async def _attest(self, engine: Engine) -> None:
        try:
            attested = await self._plugin.attest()
        except CommitRefused as refused:
            if refused.reason != "DigestMismatch":
                raise
            raise WrongDigest(refused.message) from refused  # ranks hold different copies
        if attested.digest != engine.digest:
            raise WrongDigest(
                f"live weights of {attested.version} have digest {attested.digest}, "
                f"the manifest says {engine.digest}"
            )

    async def _report(self, store: WeightsClient, now: float) -> None:
        """Tell the store what is served, attested; a trainer may be waiting for it."""
        at, reported = self._reported
        version = published(self._written.version) if self._written.attested else None
        if version is None or (reported == self._written.version and now < at + _REPORT_SECONDS):
            return
        try:
            await store.report_attested(version, self._written.digest)
        except (WeightsError, WireError) as error:
            _log.debug("%s: %s was not reported: %s", self._slot.uid, version, error)
            return
        self._reported = (now, self._written.version)

    def _probe_subject(self) -> ProbedCommit | None:
        """What is to be probed: what engine host and router may use."""
        version = published(self._written.version) if self._written.attested else None
        return ProbedCommit(version, self._written.digest, self._commits) if version else None

    async def _pull(self, store: WeightsClient, step: Step, codecs: tuple[int, ...]) -> None:
        folder = self._slot.bundle_of(self._follows.adapter)
        began = self._options.clock()
        manifest = await store.pull(
            self._source.run,
            folder,
            have=step.have,
            digest=step.digest,
            codecs=codecs,
            most_bytes=self._options.most_bytes,
        )
        pulled = self._options.clock() - began
        metrics.PULL_SECONDS.observe(pulled)
        metrics.FETCHED_BYTES.inc(manifest.block_bytes)
        self._fetched += manifest.block_bytes
        try:
            await self._commit(manifest, folder, pulled)
        except CommitRefused as error:
            if error.reason not in {"Busy", "NotStaged"}:
                # Blocks that arrived are kept for the next attempt unless they are to blame.
                await _discard(folder)
            raise
        await _discard(folder)

    async def _commit(self, manifest: Manifest, folder: Path, pulled: float) -> None:
        staged = await self._plugin.stage(folder)
        metrics.STAGE_SECONDS.observe(staged.seconds)
        faults.at("sync.staged")
        began = self._options.clock()
        committed = await self._commit_when_open(staged.version)
        took = self._options.clock() - began
        faults.at("sync.committed")
        if committed.digest != manifest.digest:
            raise WrongDigest(
                f"{committed.version} was committed with digest {committed.digest}, "
                f"the manifest says {manifest.digest}"
            )
        metrics.COMMITS.inc()
        metrics.RECOMPUTED_TOKENS.inc(committed.recomputed_tokens)
        self._commits += 1
        metrics.COMMIT_PAUSE_SECONDS.observe(committed.pause_microseconds / 1e6)
        self._history = (*self._history, committed.version)[-_HISTORY:]
        self._record(manifest, staged, committed, pulled, took)
        _log.info(
            "%s: %s is live: %d elements changed, %d us pause",
            *(self._slot.uid, committed.version, committed.changed_elements),
            committed.pause_microseconds,
        )

    def _record(
        self, manifest: Manifest, staged: Staged, committed: Committed, pulled: float, took: float
    ) -> None:
        """A line for people who ask later what this commit was; without it nothing is lost."""
        pause = committed.pause_microseconds / 1e6
        base, target = manifest.base, manifest.target
        same = base is not None and base.incarnation == target.incarnation
        record = records.CommitRecord(
            at=time.time(),
            version=committed.version,
            base=str(base or ""),
            elements=manifest.elements,
            changed=committed.changed_elements,
            block_bytes=manifest.block_bytes,
            pull_seconds=pulled,
            stage_seconds=staged.seconds,
            pause_seconds=pause,
            confirm_seconds=max(0.0, took - pause),
            fenced_requests=committed.fenced_requests,
            merged=target.sequence - base.sequence if base is not None and same else None,
            lag=lag(committed.version, self._heads.head),
            failures=self._failures,
            full=base is None,
            encode_seconds=self._heads.encode_seconds(committed.version),
            retracted_requests=committed.retracted_requests,
            recomputed_tokens=committed.recomputed_tokens,
        )
        self._failures = ()
        try:
            records.append(self._slot.folder / records.FILE, record)
        except OSError as error:
            _log.warning("%s: the commit was not recorded: %s", self._slot.uid, error)

    async def _commit_when_open(self, version: str) -> Committed:
        """Commit what is staged; a gate that closes again and again costs only time."""
        for _ in range(_COMMIT_ATTEMPTS - 1):
            try:
                return await self._plugin.commit(version)
            except CommitRefused as error:
                if error.reason not in SOFT_REASONS:
                    raise
        return await self._plugin.commit(version)

    def _fail(self, error: Exception) -> None:
        reason = error.reason if isinstance(error, CommitRefused) else type(error).__name__
        if reason in QUARANTINE_REASONS and not self._progress.quarantined:
            metrics.QUARANTINES.inc()
        metrics.FAILURES.labels(reason=reason).inc()
        self._failures = (*self._failures, reason)[-_HISTORY:]
        _log.warning("%s: %s", self._slot.uid, error)
        self._progress = failed(self._progress, reason, str(error), self._options.clock())

    def _note_head(self) -> None:
        """Look again: something is new about the head."""
        self._write(None, "")
        self._changed.set()

    def _write(self, engine: Engine | None, error: str) -> None:
        """Replace ``weights.json`` when it would say something new."""
        known = self._live_weights(engine)
        served = known.version if known.attested else ""
        content = WeightsFile(
            version=known.version,
            digest=known.digest,
            attested=known.attested,
            head=self._heads.label,
            lag=lag(served, self._heads.head),
            error=error or self._progress.error or self._heads.error,
            history=self._history,
            engine_started_ns=self._started_ns,
            broken=engine is not None and (engine.broken or self._beyond_repair(engine)),
            fetched_bytes=self._fetched,
        )
        if content == self._written:
            return
        try:
            # The engine host reads it as another user; the folder is closed to everybody else.
            write_json(self._path, content, mode=0o644)
        except OSError as problem:
            _log.warning("%s: cannot write %s: %s", self._slot.uid, self._path.name, problem)
            return
        self._written = content

    def _beyond_repair(self, engine: Engine) -> bool:
        """Whether its own checkpoint is wrong in memory: only a start brings that back.

        Nobody has published it. And a weight-sync that starts anew would attest what is there now.
        """
        own = engine.label == BASE_LABEL and self._heads.none_published
        return own and self._progress.quarantined

    def _live_weights(self, engine: Engine | None) -> WeightsFile:
        """Version, digest and whether they are attested, of what is live."""
        if self._progress.quarantined or (engine is not None and engine.broken):
            return WeightsFile()
        if self._progress.attested_at is not None and engine is not None:
            named = name_of(engine, self._source.run)
            if engine.label == BASE_LABEL and self._heads.head and self._progress.failures:
                # No turn begins with it any more, and what is published does not come: not synced.
                return WeightsFile()
            return WeightsFile(named, engine.digest, attested=bool(named))
        if self._disowned and self._progress.attested_at is None:
            return WeightsFile()
        return self._written


def _previous(path: Path, engine_started_ns: int) -> WeightsFile:
    """What an earlier weight-sync has written about this process; empty for another process."""
    before = read_json(path, WeightsFile)
    same = before is not None and before.engine_started_ns == engine_started_ns
    return before if before is not None and same else WeightsFile()


def _forget_others(slot: SlotDir, runs: Collection[str]) -> None:
    """Nothing is left on disk of runs that the engine holds no more."""
    kept = {slot.weights, *map(slot.weights_of, runs)}
    for path in slot.every_weights():
        if path not in kept:
            path.unlink(missing_ok=True)
    kept = {slot.bundle_of(run) for run in ("", *runs)}
    for path in slot.bundles.glob("next*"):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


async def _discard(folder: Path) -> None:
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
