"""Whom a leader's guard answers, by certificates; and how long its followers take to stop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rose_agent.guard.groups import groups
from rose_agent.guard.groups.groups import FollowerLink, FollowerLoad
from rose_agent.guard.groups.leading import Leading
from rose_agent.metrics import REGISTRY
from rose_core.guard.certificate import FIRST_STOP_S
from rose_core.guard.following import LOST_STOP_NS, STOP_WAIT_NS
from rose_core.guard.gate import GateVerdict
from rose_core.guard.reasons import GateReason
from rose_core.identity import PodUid
from rose_core.telemetry.events import Arrived
from rose_core.wire.leading import LeaderQuestion, LeaderUpdate
from rose_core.wire.sync import FollowerPod, ReplicaGroup, SyncReply
from rose_dev.cluster.pki import Authority
from rose_dev.waiting import until
from rose_wire import rpc, tls
from rose_wire.errors import Refused, WireError
from rose_wire.services import FOLLOW
from tests.agent import test_guard
from tests.agent.pair import identity

LEADER, POD, OTHER = PodUid("leader-pod"), test_guard.POD, PodUid("other-pod")
OPEN = GateVerdict(open=True, reason=GateReason.IDLE, duty=1.0)
SHUT = GateVerdict(open=False, reason=GateReason.SERVING_BUSY)
MS = 1_000_000
TOKEN = "word"


@dataclass
class Town:
    """A leader's guard on loopback, and nodes with certificates."""

    root: Path
    authority: Authority
    node: str = "leader"
    verdict: GateVerdict | None = OPEN
    now_ns: int = 0
    stops: list[tuple[PodUid, int]] = field(default_factory=list)
    address: str = ""
    credentials: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.leading = Leading(
            self.node,
            lambda _uid, _now: self.verdict,
            lambda: 3,
            lambda uid, after: self.stops.append((uid, after)),
            lambda: self.now_ns,
        )

    def of(self, node: str) -> Path:
        if node not in self.credentials:
            self.credentials[node] = identity(self.authority, self.root, node)
        return self.credentials[node]

    def group(self, node: str = "follower", leads: str = "") -> ReplicaGroup:
        return ReplicaGroup(LEADER, leads or self.node, self.address, (FollowerPod(POD, node),))

    @contextlib.asynccontextmanager
    async def serves(self) -> AsyncIterator[None]:
        own = self.of(self.node)
        server = rpc.Server(token=TOKEN, credentials=tls.server_credentials(own, own / tls.BUNDLE))
        self.leading.serve_on(server)
        self.address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
        self.leading.match([self.group()])
        try:
            yield
        finally:
            await server.stop(0)

    async def ask(self, node: str, question: LeaderQuestion, token: str = TOKEN) -> LeaderUpdate:
        folder = self.of(node)
        credentials = tls.client_credentials(folder / tls.BUNDLE, folder)
        channel = rpc.connect(self.address, credentials=credentials, name="leader", own=True)

        async def one() -> AsyncIterator[LeaderQuestion]:
            yield question

        try:
            async with asyncio.timeout(20):
                async for word in rpc.converse(channel, FOLLOW, one(), token=token):
                    return word
        finally:
            await channel.close()
        raise AssertionError("the stream ended without a word")

    @contextlib.asynccontextmanager
    async def follows(
        self, load: Callable[[], FollowerLoad], group: ReplicaGroup | None = None
    ) -> AsyncIterator[FollowerLink]:
        """A follower's real link to it."""
        reported = group or self.group()
        link = FollowerLink(
            reported,
            reported.followers[0].pod,
            name="pod",
            load=load,
            on_update=lambda _: None,
            token=TOKEN,
            identity=self.of("follower"),
        )
        task = asyncio.create_task(link.run())
        try:
            yield link
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    found = Town(tmp_path, Authority(tmp_path / "pki"))
    async with found.serves():
        yield found


ASKED = LeaderQuestion(LEADER, POD, 17)


async def test_a_follower_hears_how_the_leaders_gate_stands(town: Town) -> None:
    word = await town.ask("follower", ASKED)
    assert (word.open, word.reason, word.number, word.term) == (True, "Idle", 17, 3)
    assert word.lease_ns == 140 * MS
    town.verdict = SHUT
    word = await town.ask("follower", ASKED)
    assert (word.open, word.reason, word.lease_ns) == (False, "ServingBusy", 0)
    town.verdict = None  # the leader's pod is gone
    assert not (await town.ask("follower", ASKED)).open


async def test_nobody_else_is_answered(town: Town) -> None:
    with pytest.raises(Refused, match="certificate names stranger"):
        await town.ask("stranger", ASKED)
    with pytest.raises(Refused, match="does not follow pod leader-pod"):
        await town.ask("follower", LeaderQuestion(LEADER, OTHER, 1))
    with pytest.raises(Refused, match="does not follow pod other-pod"):
        await town.ask("follower", LeaderQuestion(OTHER, POD, 1))
    with pytest.raises(Refused, match="bearer token"):
        await town.ask("follower", ASKED, token="guess")
    foreign = Town(town.root / "abroad", Authority(town.root / "abroad" / "pki"))
    foreign.address = town.address
    with pytest.raises(WireError):  # a certificate of another authority
        await foreign.ask("follower", ASKED)


async def test_a_node_that_does_not_lead_answers_nobody(town: Town) -> None:
    town.leading.match([town.group(leads="elsewhere")])
    with pytest.raises(Refused):
        await town.ask("follower", ASKED)
    town.leading.match([])
    with pytest.raises(Refused):
        await town.ask("follower", ASKED)


async def test_a_stream_that_is_opened_anew_is_believed_at_once(town: Town) -> None:
    first = [await town.ask("follower", ASKED) for _ in range(3)]
    assert [word.sequence for word in first] == [1, 2, 3]  # each of a stream of its own


async def test_a_stop_counts_until_the_follower_says_that_it_stands(town: Town) -> None:
    computing = FollowerLoad(lent=True, computing=True)
    async with town.follows(lambda: computing) as link:
        await until(lambda: town.leading.computing_until_ns(LEADER) > town.now_ns)
        assert town.leading.has_lent_follower(LEADER)
        town.leading.note(LEADER, OPEN, 0, own=False)
        await until(lambda: link.state.is_open)
        town.verdict, arrived_ns, town.now_ns = SHUT, 1, 2 * MS
        town.leading.note(LEADER, SHUT, arrived_ns, own=True)
        assert town.leading.takes_stop(LEADER, 5 * MS)  # the leader's own engine
        await until(lambda: not link.state.is_open)
        assert town.stops == []
        town.now_ns = 30 * MS + arrived_ns
        link.note_stopped()
        await until(lambda: bool(town.stops))
    assert town.stops == [(LEADER, 30 * MS)]
    assert not town.leading.takes_stop(LEADER, 5 * MS)


async def test_an_opened_gate_is_asked_for_and_told_of_without_waiting_for_the_next_question(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "ASK_NS", 10**12)
    monkeypatch.setattr(groups, "_SILENT_SECONDS", 1e3)
    town.verdict = SHUT
    async with town.follows(lambda: FollowerLoad(lent=True, computing=link.state.is_open)) as link:
        await until(lambda: link.state.reason is GateReason.SERVING_BUSY)
        town.verdict = OPEN
        town.leading.note(LEADER, OPEN, 0, own=False)
        await until(lambda: link.state.is_open)
        await until(lambda: town.leading.computing_until_ns(LEADER) > town.now_ns)


async def test_a_follower_that_is_lost_counts_as_what_any_death_may_take(town: Town) -> None:
    computing = FollowerLoad(lent=True, computing=True)
    async with town.follows(lambda: computing):
        await until(lambda: town.leading.computing_until_ns(LEADER) > town.now_ns)
        town.leading.note(LEADER, OPEN, 0, own=False)
        town.verdict = SHUT
        town.leading.note(LEADER, SHUT, 1, own=False)
    town.now_ns = STOP_WAIT_NS + 1
    town.leading.note(LEADER, SHUT, 0, own=False)
    assert town.stops == [(LEADER, LOST_STOP_NS)]
    await until(lambda: not town.leading.has_lent_follower(LEADER))


def word_age() -> float | None:
    """As the follower's guard shows it."""
    return REGISTRY.get_sample_value("rose_guard_leader_word_age_seconds", {"replica": "pod"})


def is_known() -> bool:
    """Whether the follower's guard shows its replica's state as known."""
    return bool(REGISTRY.get_sample_value("rose_guard_signal_known", {"pod": "pod"}))


async def test_a_leader_that_has_moved_is_followed_and_the_old_one_no_more(
    town: Town, short_dir: Path
) -> None:
    place: dict[str, Any] = {"group": "llama/0", "index": 1, "size": 2}
    own = town.of("follower")
    moved = Town(town.root / "moved", town.authority, node="elsewhere", verdict=SHUT)
    moved.root.mkdir()
    async with (
        moved.serves(),
        test_guard.guarding(short_dir, token=TOKEN, identity=own, **place) as (guard, permit),
    ):

        def assign(*groups: ReplicaGroup) -> None:
            grants, pools = (test_guard.GRANT,), (test_guard.POLICY,)
            guard.on_reply(SyncReply(1, True, grants, pools, groups=groups), time.monotonic())

        def reason() -> GateReason:
            guard.step_all()
            return guard.slots[test_guard.KEY.uid].verdict.reason

        guard.on_tap_lost(time.monotonic_ns())
        assert reason() is GateReason.LEADER_SILENT
        assert is_known(), "nothing on its own node has to say what it does"
        assert (dict(guard.tap._watches), dict(guard.pollers)) == ({}, {}), "nor is asked"
        assign(town.group())
        await until(lambda: permit.until_ns > 0)
        assert word_age() is not None
        guard.on_reply(SyncReply(1, False), time.monotonic())  # an operator that has just begun
        since_ns = permit.until_ns
        await until(lambda: permit.until_ns > since_ns)
        assign(moved.group())  # the old one goes on to say that its gate is open
        assert (permit.until_ns, reason()) == (0, GateReason.LEADER_SILENT)
        await until(lambda: reason() is GateReason.SERVING_BUSY)
        assert permit.until_ns == 0
        await until(lambda: not town.leading.has_lent_follower(LEADER))
        moved.verdict = OPEN
        await until(lambda: permit.until_ns > 0)
        assign()
        assert (permit.until_ns, reason()) == (0, GateReason.LEADER_SILENT)
        assert word_age() is None


async def test_what_computes_load_a_follower_counts_as_load_the_leader(
    town: Town, short_dir: Path
) -> None:
    led, root = Town(town.root / "led", town.authority, node="node"), short_dir
    led.root.mkdir()
    place: dict[str, Any] = {"group": "llama/0", "index": 0, "size": 2}
    computing = FollowerLoad(lent=True, computing=True)
    async with test_guard.guarding(root, token=TOKEN, **place) as (guard, permit):
        led.leading = guard.leading
        async with led.serves():
            follower = (FollowerPod(OTHER, "follower"),)
            group = ReplicaGroup(POD, "node", led.address, follower)
            policies, began_s = (test_guard.POLICY,), time.monotonic()
            guard.on_reply(SyncReply(1, True, (), policies, groups=(group,)), began_s)
            assert permit.until_ns == 0, "no slot load the leader itself"
            replica = guard.replicas[POD]
            experience = replica.outcomes.experience
            now_ns = 0

            def counts() -> bool:
                nonlocal now_ns
                guard.match()
                now_ns = time.monotonic_ns()
                return replica.lent and experience.open_time.is_open(now_ns)

            async with led.follows(lambda: computing, group) as link:
                await until(counts)
                # At that very moment: on a busy machine the gate may have lapsed meanwhile.
                guard.on_tap([Arrived(POD, 1, now_ns, "/generate")], now_ns)
                await until(lambda: link.state.reason is GateReason.SERVING_BUSY)
                assert experience.lessons.envelope.longest_stop_s == FIRST_STOP_S
                link.note_stopped()

                def learned() -> bool:
                    guard.step_all()  # of one that was too late to say so as well
                    return experience.lessons.envelope.longest_stop_s != FIRST_STOP_S

                await until(learned)
            await until(lambda: not guard.leading.has_lent_follower(POD))
            guard.match()
            assert not replica.lent
