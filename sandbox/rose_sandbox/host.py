"""The sandboxes of one host: turns, records, restores and forks.

What a turn's record needs is decided in ``rose_core.sandboxes``; this carries it out:

| step of a boundary | if the host dies after it |
|---|---|
| inspector looks, runtime cuts | the record before stands |
| record published | the turn is recoverable, also elsewhere |
| reply released | - |

Only one boundary of a sandbox runs at a time; those of different sandboxes are ordered by their
expected reply. A host that is fenced ends its sandbox and says ``Fenced``; it asks the store every
``RENEW_SECONDS``, so that an agent that has a while to compute does not act beside its successor.
Next step: ``http`` offers it to callers elsewhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

from rose_core.sandboxes import outside, policy
from rose_core.sandboxes.networks import Network
from rose_core.sandboxes.outside import EgressEffect
from rose_core.sandboxes.policy import BoundaryAction, Decision, HostPressure, ModelWait
from rose_core.sandboxes.tunnels import TunnelLimits
from rose_core.sandboxes.turns import HOLD_SECONDS, SandboxPhase
from rose_sandbox import fork_children, metrics
from rose_sandbox.admission import Admission, memory_pressure
from rose_sandbox.answers import Forked, Restored, SessionStatus
from rose_sandbox.box import BoundTokens, Box, key_of
from rose_sandbox.egress import Egress
from rose_sandbox.errors import (
    AlreadyThere,
    CannotCheckpoint,
    CommandDiffers,
    SandboxError,
    UnknownSandbox,
    UnknownTurn,
)
from rose_sandbox.inspector.inspector import Inspector
from rose_sandbox.recorded import (
    check_tokens,
    read_effect,
    read_result,
    written_effect,
    written_result,
    written_spec,
)
from rose_sandbox.running_commands import RunningCommands
from rose_sandbox.runtimes.runtime import ExecResult, Handle, Limits, Runtime, SandboxSpec
from rose_sandbox.saving import Saver
from rose_sandbox.tunnel import Tunnel
from rose_weights.errors import Fenced, UnknownVersion, WeightsError
from rose_weights.store.records import Command, OwnedSession, PublishedTurn, Records, TurnRecord

LOG = logging.getLogger(__name__)

COMMAND_SECONDS = 600.0
"""A command's limit where the caller gives none: the longest build in the recorded traces."""
MOST_CHILDREN = 64
"""Of one fork: the largest group that trainers' recipes use."""
RENEW_SECONDS = 5.0
"""How often a host asks whether its sessions are still its own: one small read for each."""
_MOST_FENCED = 1024


class Host:
    """Runs sandboxes, one for each session.

    Args:
        runtime, inspector: of this machine.
        records: of the run.
        owner: this host's name in records.
        scratch: folder for parts on their way.
        egress: hosts (shell patterns) that sandboxes may reach through the proxy; none: no network.
        pressure: what else happens on the machine.
        clock: monotonic seconds.
        renew_seconds: how often the host asks whether its sessions are still its own.
        tunnels: how many connections of callers elsewhere there may be, for how long.
    """

    def __init__(
        self,
        runtime: Runtime,
        inspector: Inspector,
        records: Records,
        *,
        owner: str,
        scratch: Path,
        egress: Sequence[str] = (),
        pressure: Callable[[], HostPressure] | None = None,
        clock: Callable[[], float] = time.monotonic,
        renew_seconds: float = RENEW_SECONDS,
        tunnels: TunnelLimits = TunnelLimits(),  # noqa: B008 - frozen
    ) -> None:
        self._runtime, self._inspector, self._records = runtime, inspector, records
        self._owner, self._scratch, self._allowed = owner, scratch, tuple(egress)
        self._pressure = pressure or memory_pressure
        self._now = clock
        self._boxes: dict[str, Box] = {}
        self._admission = Admission(self._pressure, clock)
        self._saver = Saver(
            runtime,
            inspector,
            records,
            scratch=scratch,
            pressure=self._pressure,
            clock=clock,
            resume=self._resume,
        )
        self._renew_seconds = renew_seconds
        self.tunnel_limits = tunnels
        self._renewing: asyncio.Task[None] | None = None
        self._fenced: dict[str, str] = {}
        self._named = RunningCommands()
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        scratch.mkdir(parents=True, exist_ok=True)

    async def create(
        self,
        session: str,
        *,
        image: str = "base",
        limits: Limits = Limits(),  # noqa: B008 - frozen
        environment: Mapping[str, str] | None = None,
        folder: str = "/home",
        networks: tuple[Network, ...] | None = None,
    ) -> SessionStatus:
        """Start a session's sandbox, as ``SandboxSpec``.

        Raises:
            AlreadyThere: the session has one here, or has records: restore it, or end it.
            UnknownImage, BadPath: as ``Runtime.create``.
        """
        async with self._alone(session):
            if session in self._boxes:
                raise AlreadyThere(f"session {session} has a sandbox here; end it or restore it")
            seen = await self.fence(session)
            if await asyncio.to_thread(self._records.turns, session):
                raise AlreadyThere(f"session {session} has records; restore or forget it")
            key, given = key_of(session), dict(environment or {})
            spec = SandboxSpec(key, image, limits, given, folder, networks)
            await self._end_leftover(session)
            handle = await self._runtime.create(spec)

            def take() -> OwnedSession:
                owned = self._records.claim(session, self._owner, seen)
                # Turn 0, the bare image: what leaves the sandbox before turn 1 has a record too.
                self._records.publish(owned, PublishedTurn(0, (), written_spec(spec)))
                return owned

            owned, watching = await self._take(handle, take)
            box = Box(spec, handle, owned)
            await self._begin(session, box, watching)
            return box.status(session)

    async def exec(
        self,
        session: str,
        command: str,
        within: float = COMMAND_SECONDS,
        *,
        name: str | None = None,
        shell: str | None = "main",
    ) -> ExecResult:
        """Run a command in a sandbox, whose agent acts.

        Args:
            session: whose.
            command: for the shell.
            within: seconds.
            name: of the command in the trajectory; run once: asked again, its result is told again.
            shell: that lives on between commands; None: a fresh one.

        A cancelled call kills its command. One with a name runs on, and whoever asks for it again
        is told how it ended.

        Raises:
            CommandDiffers: another command has been run under that name.
        """
        doing = self._exec(session, command, within, name, shell)
        return await (doing if name is None else self._named.run(doing))

    async def _exec(
        self, session: str, command: str, within: float, name: str | None, shell: str | None
    ) -> ExecResult:
        async with self._acting(session) as box:
            digest = hashlib.sha256(command.encode()).hexdigest()
            known = box.commands.get(name) if name is not None else None
            if known is not None:
                if known.digest != digest:
                    raise CommandDiffers(
                        f"{name} of session {session} was another command; take a new name, or go "
                        "back to the turn before it"
                    )
                return read_result(known.result)
            made = await self._runtime.exec(box.handle, command, within, session=shell)
            if name is not None:
                box.commands[name] = Command(name, digest, written_result(made))
            return made

    async def read_file(self, session: str, path: str) -> bytes:
        """A file's bytes."""
        box = await self._running(session)
        return await self._runtime.read_file(box.handle, path)

    async def write_file(self, session: str, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a file."""
        async with self._acting(session) as box:
            await self._runtime.write_file(box.handle, path, data, mode)

    async def connect(self, session: str, port: int) -> socket.socket:
        """A TCP connection to a server in the sandbox; a non-blocking socket."""
        box = await self._reached(session)
        box.act(self._now())
        return await self._runtime.connect(box.handle, port)

    @asynccontextmanager
    async def tunnel(self, session: str, port: int) -> AsyncIterator[Tunnel]:
        """The same for callers elsewhere, of whom the host knows nothing.

        Raises:
            TooManyTunnels: the sandbox has as many as are allowed.
        """
        box = await self._reached(session)
        with box.tunneled(self.tunnel_limits, self._now):
            yield Tunnel(await self._runtime.connect(box.handle, port), box.gone)

    async def state(self, session: str) -> SessionStatus:
        """Where a session stands."""
        return self._box(session).status(session)

    async def moment(self, session: str) -> tuple[str, float]:
        """The ``etag`` for ``turn_began``, and seconds since its agent can have acted last."""
        box = self._box(session)
        return box.etag, box.still(self._now())

    def sessions(self) -> tuple[str, ...]:
        """Those with a sandbox here."""
        return tuple(sorted(self._boxes))

    async def end(self, session: str, *, forget: bool = False) -> None:
        """End a session's sandbox; its records stay unless ``forget``. Ended is no error.

        Raises:
            Fenced: it lives at another host by now, which ``forget`` does not take it from.
        """
        async with self._alone(session):
            box = self._boxes.get(session)
            if box is not None:
                await self._drop(session, box)
            if not forget:
                return
            if box is None and session in self._fenced:
                raise Fenced(self._fenced[session])
            if box is None:
                seen = await self.fence(session)
                owned = await asyncio.to_thread(self._records.claim, session, self._owner, seen)
            else:
                owned = box.owned
            try:
                await asyncio.to_thread(self._records.forget, owned)
            except Fenced as error:
                self._remember(session, error)
                raise
            await self._end_leftover(session)

    def end_after(self, session: str, seconds: float) -> None:
        """End and forget a session's sandbox then, soon after, whoever asked for it being gone."""
        self._box(session).ends_at = self._now() + seconds

    async def _end_leftover(self, session: str) -> None:
        """What runs here of a session, also what an earlier process of this host left behind."""
        if (box := self._boxes.get(session)) is not None:
            await self._drop(session, box)
        else:
            await self._runtime.end(Handle(key_of(session)))

    async def fence(self, session: str) -> int:
        """Under which a session's records are held, here or elsewhere; 0: it has none."""
        return await asyncio.to_thread(self._records.fence, session)

    async def turn_began(
        self,
        session: str,
        ids: Sequence[int] | None = (),
        *,
        weight_versions: Sequence[str] = (),
        wait: ModelWait | None = None,
        history: bytes = b"",
        if_match: str = "",
        is_asked: bool = True,
    ) -> SessionStatus:
        """The agent asks the model: a boundary. Its checkpoint begins in the background.

        Args:
            session: whose.
            ids: all token ids of the session so far; None: nobody asks the model, and says them.
            weight_versions: that sampled them.
            wait: until the reply, as the router expects it.
            history: the router's session up to here, which a restore gives back to it.
            if_match: the ``etag`` that the session had when no reply to this turn was there yet;
                empty: its agent cannot have acted since.
            is_asked: the model is; else somebody wants this moment saved.

        Raises:
            OutOfTurn: the session waits for the model already.
            HeardLate: the agent has acted, or another turn has begun: nothing is saved for this.
        """
        box = self._box(session)
        given = BoundTokens(tuple(ids or ()), tuple(weight_versions), history)
        box.check_moment(if_match, given.ids)
        # A boundary that nobody waited for is this one's now.
        if box.clock.phase is SandboxPhase.ACTING:
            await self._settle(box)
        async with box.lock:
            self._box(session)  # it may have ended meanwhile
            box.check_moment(if_match, given.ids)
            bound = given if ids is not None else box.go_with(given)
            box.begin_turn(self._now(), wait, bound, is_asked=is_asked)
            box.boundary = asyncio.create_task(self._boundary(session, box))
        return box.status(session)

    async def tokens_ready(self, session: str) -> SessionStatus:
        """The model has answered; returns when the agent may act on it.

        Raises:
            Fenced: another host has the session; this answer belongs to nobody here.
        """
        box = self._box(session)
        asked = self._now()
        try:  # held, but not for ever: the caller sees in recoverable_to that it was let go
            await box.wait_for_record(HOLD_SECONDS)
        finally:
            metrics.HELD_SECONDS.inc(self._now() - asked)
        self._box(session)  # it may have ended meanwhile
        if box.clock.phase is not SandboxPhase.ACTING:
            box.clock = box.clock.ready(self._now())
        await self._awake(box)
        return box.status(session)

    async def checkpoint(self, session: str, ids: Sequence[int] = ()) -> SessionStatus:
        """A boundary that is waited for: a turn that takes no time.

        Without ``ids`` it goes with those of the last turn, or with none if its agent has acted on.

        Raises:
            CannotCheckpoint: something cannot be saved; the sandbox lives on.
        """
        await self.turn_began(session, ids or None, is_asked=False)
        box = self._box(session)
        await box.wait_for_record()
        self._box(session)  # it may have ended meanwhile
        if box.clock.phase is not SandboxPhase.ACTING:
            box.clock = box.clock.ready(self._now())
        if box.unsaved:
            raise CannotCheckpoint(box.unsaved, f"session {session}: {box.unsaved}")
        return box.status(session)

    async def ended(self, session: str, whole: BoundTokens = BoundTokens()) -> SessionStatus:  # noqa: B008 - frozen
        """No more turns will come: its memory is freed until somebody needs the sandbox again.

        One that cannot be saved runs on; ``unsaved`` says why.
        """
        with suppress(CannotCheckpoint):
            return await self.suspend(session, whole)
        return await self.state(session)

    async def suspend(self, session: str, whole: BoundTokens = BoundTokens()) -> SessionStatus:  # noqa: B008 - frozen
        """Save a sandbox and free its memory; the next call that needs it brings it back.

        Args:
            session: whose.
            whole: all tokens of the session; without them what its agent did since its last turn
                is bound to none.
        """
        box = self._box(session)
        await self._settle(box)
        async with self._ended_if_fenced(session, box), box.lock:
            if box.clock.phase is SandboxPhase.ACTING:
                box.begin_turn(self._now(), None, box.go_with(whole), is_asked=False)
            elif box.closes_without(whole):  # of several replicas any may be the first
                await self._saver.publish_again(box, whole)
            if box.clock.phase is SandboxPhase.WAITING:
                suspending = Decision(BoundaryAction.SUSPEND, policy.SaveReason.LONG_WAIT)
                await self._saver.save(box, suspending)
            # Not saved, and a command has come meanwhile.
            if box.clock.phase is not SandboxPhase.ACTING:
                box.clock = box.clock.ready(self._now())
        if box.unsaved:
            raise CannotCheckpoint(box.unsaved, f"session {session}: {box.unsaved}")
        return box.status(session)

    async def resume(self, session: str) -> SessionStatus:
        """Bring a suspended sandbox back; one that runs is no error."""
        box = self._box(session)
        async with box.lock:
            await self._awake(box)
        return box.status(session)

    async def restore(
        self,
        session: str,
        turn: int | None = None,
        *,
        flag: bool = False,
        tokens: str = "",
        over: int | None = None,
    ) -> Restored:
        """Give a session back as it was at the end of a turn, here, wherever it was before.

        Args:
            session: whose; the host that has it is fenced.
            turn: None: the newest one that is recoverable.
            flag: tell effects that cannot be repeated rather than refuse.
            tokens: digest of the ids that the caller goes on from; empty: it takes the record's.
            over: the fence under which the caller saw it (``fence``); None: the one it has as this
                begins. A host that slept in between does not take it from who has it by then.

        Raises:
            Fenced: another host has taken it over since; nothing has changed.
            UnknownTurn: there is no record of it; the text says of which there are.
            EffectsCrossed: what cannot be repeated lies between.
            TokensDiffer: the record is bound to other tokens.
            CannotRestore: the parts do not give a sandbox back; the records are as they were.
        """
        async with self._alone(session):
            now = await self.fence(session)
            seen = now if over is None else over
            if now != seen:
                raise Fenced(f"session {session} was seen under fence {seen} and is under {now}")
            record = await self._record(session, turn)
            check_tokens(record, tokens)
            ids = await asyncio.to_thread(self._records.ids, record)
            history = await asyncio.to_thread(self._records.history, record)
            happened = await self._happened(session)
            crossing = outside.cross(happened, record.turn, flag=flag)
            await self._end_leftover(session)
            ((handle, spec),) = await self._saver.bring(record, [key_of(session)])
            noted = tuple(written_effect(one) for one in happened)

            def take() -> OwnedSession:
                owned = self._records.claim(session, self._owner, seen)
                self._records.back(owned, record.turn, noted)
                return owned

            owned, watching = await self._take(handle, take)
            going_on = BoundTokens(ids, record.weight_versions, history)
            box = fork_children.revive(record, going_on, Box(spec, handle, owned))
            box.effects = happened
            await self._begin(session, box, watching)
            metrics.RESTORES.labels("restore").inc()
            status = box.status(session)
            return Restored(status, ids, record.weight_versions, crossing, history)

    async def fork(
        self, session: str, n: int, turn: int | None = None, *, name: str = ""
    ) -> Forked:
        """Sessions and sandboxes that go on from a turn; the parent may run, be away or be gone.

        Args:
            session: the parent.
            n: children, 1 to ``MOST_CHILDREN``.
            turn: None: the newest recoverable one.
            name: of the fork, which is made once: asked again, the same children are told again.

        Returns:
            The children's sessions, and what they go on from. All of them, or none; of a fork with
            a name those stay that were made, since another caller may know of them already.

        Raises:
            AlreadyThere: the fork of that name was another one, or a child's name is taken.
            Fenced: another host makes the fork of that name; ask again.
            UnknownTurn: there is no record of it.
            CannotRestore: the record does not give a sandbox back.
        """
        if not 1 <= n <= MOST_CHILDREN:
            raise ValueError(f"n is {n}; a fork has 1 to {MOST_CHILDREN} children")
        if not name:
            record = await self._record(session, turn)
            stem, taken = f"{session}.{record.turn}", frozenset(self._boxes)
            new = await asyncio.to_thread(fork_children.new_names, self._records, stem, n, taken)
            made = await self._make(session, record, dict.fromkeys(new))
            return replace(made, here=made.sessions)
        names = fork_children.names_of(session, name, n)
        async with self._alone(session):
            at, missing = await asyncio.to_thread(
                fork_children.find_missing, self._records, session, names, turn
            )
            record = await self._record(session if missing else names[0], at)
            for one in missing:
                await self._end_leftover(one)
            made = await self._make(session, record, missing)
            here = tuple(one for one in names if one in self._boxes)
            return replace(made, sessions=names, here=here)

    async def _make(self, session: str, record: TurnRecord, names: fork_children.Taken) -> Forked:
        """Children of a record, each with the fence that it is taken under (``fork_children``)."""
        ids = await asyncio.to_thread(self._records.ids, record)
        history = await asyncio.to_thread(self._records.history, record)
        given = Forked(tuple(names), record.turn, ids, record.weight_versions, history)
        if not names:
            return given
        brought = await self._saver.bring(record, [key_of(name) for name in names])
        made = await asyncio.gather(
            *(
                self._child(name, (session, record, fence), given, *one)
                for (name, fence), one in zip(names.items(), brought, strict=True)
            ),
            return_exceptions=True,
        )
        errors = [one for one in made if isinstance(one, BaseException)]
        if errors:
            gone = fork_children.find_ending(names, made, self._boxes)
            await asyncio.gather(*(self.end(name, forget=True) for name in gone))
            raise errors[0]
        metrics.RESTORES.labels("fork").inc(len(names))
        return given

    async def _child(
        self,
        name: str,
        parent: tuple[str, TurnRecord, int | None],
        given: Forked,
        handle: Handle,
        spec: SandboxSpec,
    ) -> None:
        session, record, fence = parent

        def take() -> OwnedSession:
            owned = self._records.claim(name, self._owner, fence)
            self._records.adopt(owned, record, (session, record.turn))
            return owned

        owned, watching = await self._take(handle, take)
        going_on = BoundTokens(given.ids, given.weight_versions, given.history)
        box = fork_children.revive(record, going_on, Box(spec, handle, owned))
        await self._begin(name, box, watching)

    async def close(self) -> None:
        """End boundaries and commands, and let go; sandboxes and records stay."""
        await self._named.close()
        for box in tuple(self._boxes.values()):
            await self._settle(box)
            if box.egress is not None:
                await box.egress.close()
        await self._admission.close()
        if self._renewing is not None:
            self._renewing.cancel()
            with suppress(asyncio.CancelledError):
                await self._renewing
        await self._inspector.close()
        await self._runtime.close()
        await asyncio.to_thread(self._records.close)

    async def _boundary(self, session: str, box: Box) -> None:
        async with (
            self._admission.place(session, box.clock.expected, box.clock.unsaved_since),
            self._ended_if_fenced(session, box),
            box.lock,
        ):
            if self._boxes.get(session) is box and box.clock.phase is SandboxPhase.WAITING:
                await self._saver.save_what_changed(box)

    @asynccontextmanager
    async def _ended_if_fenced(self, session: str, box: Box) -> AsyncIterator[None]:
        try:
            yield
        except Fenced as error:
            await self._lose(session, box, error)
            raise

    async def _lose(self, session: str, box: Box, error: Fenced) -> None:
        """Another host has the session: what runs here belongs to nobody."""
        if self._boxes.get(session) is box:
            self._remember(session, error)
            try:
                await self._drop(session, box)
            except (SandboxError, WeightsError, OSError) as failed:
                LOG.warning("session %s: not ended yet, tried again: %s", session, failed)

    def _remember(self, session: str, error: Fenced) -> None:
        """For those who ask for it here still."""
        self._fenced[session] = str(error)
        if len(self._fenced) > _MOST_FENCED:
            del self._fenced[next(iter(self._fenced))]

    async def renew(self) -> None:
        """End the sandboxes whose sessions another host has taken over, or whose time is over.

        And those that could not be ended when they ought to have been.
        """
        for session, box in tuple(self._boxes.items()):
            try:
                await self._renew_one(session, box)
            except Exception as error:  # noqa: BLE001 - whatever it is, the others are asked for too
                LOG.warning("session %s: looked at again later: %s", session, error)

    async def _renew_one(self, session: str, box: Box) -> None:
        if box.clock.phase is SandboxPhase.ENDED:
            return await self._drop(session, box)
        if self._now() >= box.ends_at:
            LOG.info("session %s: its time is over", session)
            return await self.end(session, forget=True)
        try:
            await asyncio.to_thread(self._records.check, box.owned)
        except Fenced as error:
            LOG.warning("session %s: %s", session, error)
            await self._lose(session, box, error)
        except WeightsError as error:
            # A store that is away takes no record either, of this host or of another one.
            LOG.warning("session %s: whose it is cannot be asked: %s", session, error)

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._renew_seconds)
            await self.renew()

    async def _record(self, session: str, turn: int | None) -> TurnRecord:
        try:
            return await asyncio.to_thread(self._records.read, session, turn)
        except UnknownVersion as error:
            raise UnknownTurn(str(error)) from error

    async def _happened(self, session: str) -> tuple[EgressEffect, ...]:
        box = self._boxes.get(session)
        newest = await self._record(session, None)
        noted = tuple(read_effect(one) for one in newest.effects)
        return tuple(dict.fromkeys((*noted, *(box.effects if box is not None else ()))))

    def _alone(self, session: str) -> asyncio.Lock:
        """For one that begins, gives back or ends a session's sandbox: its key is always the same.

        The host does not hear that a caller has given it up, who may ask again meanwhile.
        """
        return self._changing.setdefault(session, asyncio.Lock())

    async def _take(
        self, handle: Handle, take: Callable[[], OwnedSession]
    ) -> tuple[OwnedSession, asyncio.Task[None]]:
        """Make a new sandbox's session this host's, while the inspector looks at the sandbox.

        Raises:
            WeightsError: as ``take``; the sandbox has ended.
        """
        watching = asyncio.create_task(self._watch(handle))
        try:
            return await asyncio.to_thread(take), watching
        except WeightsError:
            await asyncio.gather(watching, return_exceptions=True)
            await self._inspector.forget(handle.key)
            await self._runtime.end(handle)
            raise

    async def _begin(self, session: str, box: Box, watching: asyncio.Task[None]) -> None:
        box.acted_at = self._now()
        self._boxes[session] = box
        metrics.SANDBOXES.set(len(self._boxes))
        self._fenced.pop(session, None)
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew_for_ever())
        await watching
        await self._let_out(box)

    # Inspector and proxy belong to the processes: set anew with every life of them.

    async def _watch(self, handle: Handle) -> None:
        await self._inspector.watch(handle.key, await self._runtime.facts(handle))

    async def _let_out(self, box: Box) -> None:
        if not self._allowed or box.spec.networks == ():
            return
        facts = await self._runtime.facts(box.handle)
        if facts.init is not None or facts.door is not None:
            during = partial(box.connected, self._now)
            box.egress = Egress(self._allowed, partial(self._left, box), box.spec.networks, during)
            await box.egress.open(facts)

    async def _left(self, box: Box, effect: EgressEffect) -> None:
        """Write an effect down before it happens."""
        seen = replace(effect, turn=box.clock.turn + 1)
        box.effects = (*box.effects, seen)
        if seen.kind is not outside.Repeatability.READ:
            await asyncio.to_thread(self._records.note, box.owned, written_effect(seen))

    @asynccontextmanager
    async def _acting(self, session: str) -> AsyncIterator[Box]:
        """The box of an agent that acts, alone: its reply is there, whether it was told or not.

        It waits for the record of its turn, as ``tokens_ready`` does: what a command changes must
        not become part of the turn before it.
        """
        while True:
            if self._box(session).clock.phase is not SandboxPhase.ACTING:
                await self.tokens_ready(session)
            box = self._box(session)
            async with box.lock:
                if box.clock.phase is SandboxPhase.WAITING:
                    continue  # a turn began while another command ran, and nobody has looked yet
                # Whoever held the lock may have suspended it: a session ended, its grader comes.
                await self._awake(box)
                box.act(self._now())
                yield box
                return

    async def _running(self, session: str) -> Box:
        """The box of a sandbox that is read beside its commands."""
        box = self._box(session)
        if box.clock.phase is SandboxPhase.SAVING and box.decision.action is BoundaryAction.SUSPEND:
            async with box.lock:  # its processes are on their way out
                pass
        await self._awake(box)
        return box

    async def _reached(self, session: str) -> Box:
        """The box of a sandbox that is connected to: an act, as ``_acting``, but beside others."""
        box = self._box(session)
        if box.clock.phase is not SandboxPhase.ACTING:
            await self.tokens_ready(session)
        if box.clock.phase is SandboxPhase.SAVING:  # a command waits for its lock
            await box.wait_for_record()
        return await self._running(session)

    async def _awake(self, box: Box) -> None:
        async with box.waking:  # whoever comes beside finds it awake
            if box.clock.phase is not SandboxPhase.SUSPENDED:
                return
            began = self._now()
            await self._resume(box)
            self._saver.costs = self._saver.costs.resumed(self._now() - began)
            box.clock = box.clock.resumed()

    async def _resume(self, box: Box) -> None:
        if box.egress is not None:
            await box.egress.close()
        box.handle = await self._runtime.resume(box.handle)
        await self._watch(box.handle)
        await self._let_out(box)

    async def _settle(self, box: Box) -> None:
        """Its boundary is over: one that cuts is waited for, one that waits for its turn is not."""
        boundary = box.boundary
        if boundary is None or boundary.done() or boundary is asyncio.current_task():
            return
        if box.clock.phase is not SandboxPhase.SAVING:
            boundary.cancel()
        try:
            await boundary
        except (asyncio.CancelledError, Fenced):
            pass
        except (SandboxError, WeightsError, OSError) as error:
            # Told to who waits for its reply; whoever comes after it goes on, or ends the sandbox.
            LOG.warning("sandbox %s: its boundary failed: %s", box.spec.key, error)

    async def _drop(self, session: str, box: Box) -> None:
        """End a sandbox; one that cannot be ended stays known, and ``renew`` tries it again."""
        if self._boxes.get(session) is not box:
            return
        del self._boxes[session]
        metrics.SANDBOXES.set(len(self._boxes))
        try:
            await self._settle(box)
            await self._close(box)
        except BaseException:  # also where its caller goes away: it may run still
            self._boxes.setdefault(session, box)
            metrics.SANDBOXES.set(len(self._boxes))
            raise

    async def _close(self, box: Box) -> None:
        box.clock = box.clock.ended()
        box.gone.set()
        if box.egress is not None:
            await box.egress.close()
        await self._inspector.forget(box.spec.key)
        await self._runtime.end(box.handle)
        shutil.rmtree(self._scratch / box.spec.key, ignore_errors=True)

    def _box(self, session: str) -> Box:
        box = self._boxes.get(session)
        if box is not None and box.clock.phase is not SandboxPhase.ENDED:
            return box
        if session in self._fenced:
            raise Fenced(self._fenced[session])
        raise UnknownSandbox(f"session {session} has no sandbox here; create or restore it")
