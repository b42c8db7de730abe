"""What a host knows of one sandbox.

Its ``etag`` names a moment between two of its agent's acts and turns, as HTTP's does a version of a
page. Whoever tells of a turn may name the moment in which the model was asked: a host that hears of
it after the agent has acted on the reply binds these tokens to no later files.

Next step: ``saving`` saves it, ``host`` runs it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rose_core.sandboxes import policy
from rose_core.sandboxes.outside import EgressEffect
from rose_core.sandboxes.policy import BoundaryAction, Decision
from rose_core.sandboxes.tunnels import TunnelLimits, may_open
from rose_core.sandboxes.turns import SandboxClock, SandboxPhase
from rose_sandbox import metrics
from rose_sandbox.answers import SessionStatus
from rose_sandbox.egress import Egress
from rose_sandbox.errors import HeardLate, TooManyTunnels
from rose_sandbox.runtimes.runtime import Handle, SandboxSpec
from rose_weights.store.records import Command, OwnedSession


@dataclass(frozen=True)
class BoundTokens:
    """What a moment of a sandbox goes with.

    Attributes:
        ids: of the session so far.
        versions: weight versions that sampled them.
        history: the router's session, which a restore gives back to it.
        prompt: how many of the ids the model was last given; None: whoever says them does not say.
    """

    ids: tuple[int, ...] = ()
    versions: tuple[str, ...] = ()
    history: bytes = b""
    prompt: int | None = None


@dataclass
class Box:
    """A session's sandbox on this host.

    Attributes:
        spec, handle: of the runtime.
        owned: the session's records.
        clock: where its trajectory stands.
        effects: that left it.
        commands: with a name, that have been run.
        ids, versions, history: of the turn that began last.
        decision, unsaved, seconds: of the last boundary.
        forced: the next boundary saves all: what the inspector compares with is no record.
        boundary: the task of the last boundary.
        egress: its proxy.
        acts: commands, files and connections of its agent that have begun, and turns.
        acted_at: when the last of them began that is no turn, a connection ended, or its life began
            here.
        bound_at: ``acts`` when the turn that ``ids`` are of began, or the record was made.
        received: what the model was given at the newest turn that the host has heard of, also late.
        closing: the last turn, where nobody asked the model for it.
        lock: whoever changes it.
        waking: whoever brings it back.
        tunnels: connections into it.
        connections: the same, and those out of it by its proxy.
        gone: set when it ends here.
        ends_at: when it is ended and forgotten, if nobody has done so.
    """

    spec: SandboxSpec
    handle: Handle
    owned: OwnedSession
    clock: SandboxClock = field(default_factory=SandboxClock)
    effects: tuple[EgressEffect, ...] = ()
    commands: dict[str, Command] = field(default_factory=dict)
    ids: tuple[int, ...] = ()
    versions: tuple[str, ...] = ()
    history: bytes = b""
    decision: Decision = field(default=Decision(BoundaryAction.NONE, policy.SaveReason.UNCHANGED))
    unsaved: str = ""
    seconds: float = 0.0
    forced: bool = False
    boundary: asyncio.Task[None] | None = None
    egress: Egress | None = None
    acts: int = 0
    acted_at: float = 0.0
    bound_at: int = 0
    received: tuple[int, ...] = ()
    closing: int | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waking: asyncio.Lock = field(default_factory=asyncio.Lock)
    tunnels: int = 0
    connections: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    ends_at: float = math.inf

    @property
    def etag(self) -> str:
        """This moment: of no other act, turn or life of the sandbox."""
        return f"{self.owned.fence}.{self.acts}"

    def begin_turn(
        self,
        now: float,
        wait: policy.ModelWait | None,
        tokens: BoundTokens,
        *,
        is_asked: bool = True,
    ) -> None:
        """The agent waits for the model, which these tokens were given to.

        Args:
            now: of the host's clock.
            wait: until the reply.
            tokens: of the turn.
            is_asked: the model was; else this is a moment that somebody wants saved.

        Raises:
            OutOfTurn: it waits already; the turn counts as heard of.
        """
        if is_asked:
            self.received = tokens.ids
        self.clock = self.clock.begin_wait(now, wait)
        self.closing = None if is_asked else self.clock.turn
        self.acts += 1
        self.bind(tokens)

    def bind(self, tokens: BoundTokens) -> None:
        """What is saved now goes with these tokens."""
        self.ids, self.versions, self.history = tokens.ids, tokens.versions, tokens.history
        self.bound_at = self.acts

    def act(self, now: float) -> None:
        """Note that its agent does something."""
        self.acts += 1
        self.acted_at = now

    def are_all(self, whole: BoundTokens) -> bool:
        """Whether these are all tokens of the session, as far as the host has heard of turns.

        Of several replicas of a router each says what it knows. One that missed the newest turn
        knows another prompt than that turn's, and so does one from before a step back.
        """
        if whole.prompt is None:  # a router from before: what goes on from the newest turn
            return whole.ids[: len(self.received)] == self.received
        return whole.ids[: whole.prompt] == self.received

    def go_with(self, whole: BoundTokens) -> BoundTokens:
        """What this moment goes with, where no turn is asked for: all tokens of the session.

        Where the agent has acted since its last turn, that turn's go with older files. So what is
        saved is bound to none if nobody knows them all.
        """
        if self.are_all(whole):
            return whole
        return BoundTokens() if self.has_acted else self.tokens

    def closes_without(self, whole: BoundTokens) -> bool:
        """Whether it was suspended at the session's end by somebody who did not know its tokens."""
        closed = self.clock.phase is SandboxPhase.SUSPENDED and self.closing == self.clock.turn
        return closed and not self.has_acted and self.ids != whole.ids and self.are_all(whole)

    @property
    def tokens(self) -> BoundTokens:
        """Of the turn that began last."""
        return BoundTokens(self.ids, self.versions, self.history)

    def check_moment(self, if_match: str, ids: tuple[int, ...]) -> None:
        """Check that nothing has happened since a moment; empty: whoever asks knows of none.

        Raises:
            HeardLate: the agent has acted, or another turn has begun. The turn of these tokens has
                no record, and is the newest that the host has heard of.
        """
        if if_match not in {"", self.etag}:
            # A replica whose host was away says at the session's end what it gave the model last.
            # Where that is how the newest turn begins, it is of a turn before that one.
            if self.received[: len(ids)] != ids:
                self.received = ids
            raise HeardLate(
                f"session {self.owned.session} is at {self.etag} and was at {if_match} when the "
                "model was asked: what its agent did since is saved with the next turn"
            )

    async def wait_for_record(self, within: float | None = None) -> None:
        """Wait for the last boundary, for this many seconds at most; None: to its end.

        Raises:
            Fenced: another host has the session.
        """
        if self.boundary is None:
            return
        done, _ = await asyncio.wait({self.boundary}, timeout=within)
        for boundary in done:
            if not boundary.cancelled():  # one was, whose place another save took
                boundary.result()

    def still(self, now: float) -> float:
        """Seconds since its agent can have done anything last."""
        return 0.0 if self.connections else now - self.acted_at

    @contextmanager
    def connected(self, clock: Callable[[], float]) -> Iterator[None]:
        """Through a connection its agent may act unseen while the block lasts, wherever it runs."""
        self.connections += 1
        try:
            yield
        finally:
            self.connections -= 1
            self.acted_at = clock()

    @contextmanager
    def tunneled(self, limits: TunnelLimits, clock: Callable[[], float]) -> Iterator[None]:
        """Count one more connection into it, while the block lasts.

        Raises:
            TooManyTunnels: it has as many as are allowed.
        """
        if not may_open(limits, self.tunnels):
            raise TooManyTunnels(
                f"session {self.owned.session} has {self.tunnels} tunnels, and no more are "
                "allowed: close one"
            )
        self.tunnels += 1
        self.act(clock())
        metrics.TUNNELS.inc()
        try:
            with self.connected(clock):
                yield
        finally:
            self.tunnels -= 1
            metrics.TUNNELS.dec()

    @property
    def has_acted(self) -> bool:
        """Whether its agent has acted since the turn that its tokens are of."""
        return self.acts != self.bound_at

    def status(self, session: str) -> SessionStatus:
        """What callers hear of it."""
        return SessionStatus(
            session,
            self.clock.turn,
            str(self.clock.phase),
            self.clock.recoverable_to,
            str(self.decision.action),
            str(self.decision.reason),
            self.unsaved,
            self.seconds,
            self.owned.written,
        )


def key_of(session: str) -> str:
    """A runtime's key for a session, whatever its name is made of."""
    return f"box-{hashlib.sha256(session.encode()).hexdigest()[:20]}"
