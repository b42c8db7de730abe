"""What the guard reports of a replica's load, by whichever source it is seen."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import aiohttp
import pytest

from rose_agent.guard.flight.recorder import Recorder
from rose_agent.guard.replicas.outcomes import Outcomes
from rose_agent.guard.replicas.pools import Pools
from rose_agent.guard.replicas.replica import GuardedReplica
from rose_agent.guard.sync.report import replica_report
from rose_agent.metrics import REGISTRY
from rose_agent.pods.model import ServingPod
from rose_agent.signals.reader import DirectReaders
from rose_core.guard.crossover import Cycles, Schedule
from rose_core.guard.following import LeaderLease
from rose_core.guard.gate import GateLimits, closed
from rose_core.guard.reasons import GateReason
from rose_core.identity import PodUid
from rose_core.telemetry.dialects import Figures
from rose_core.telemetry.events import Arrived, Health
from rose_core.telemetry.verify import SignalVerification
from rose_core.wire.sync import GroupPlace, PoolPolicy, SignalSource

POD = PodUid("pod")

S = 1_000_000_000
POOL = "chat/watched"
LOADS = SignalSource.LOADS


@pytest.fixture
async def replica() -> AsyncIterator[GuardedReplica]:
    """A replica that began at zero, on a clock of the test's own."""
    async with aiohttp.ClientSession() as session:
        pod = ServingPod(POD, "chat", "pod", POOL, "127.0.0.1", 9)
        made = GuardedReplica.create(
            pod,
            PoolPolicy(POOL, "Observe", {"a": "b"}, 9),
            outcomes=Outcomes(
                "pod",
                Pools().state(POOL),
                Recorder(),
                lambda _: None,
                0,
                cycles=Cycles(Schedule(), lambda: 1.0),
            ),
            gate=GateLimits(),
            readers=DirectReaders(session),
        )
        made.book.began_ns = 0
        yield made


def reported_at(replica: GuardedReplica, at_s: int) -> int | None:
    """The busy share reported at this second."""
    verdict = closed(GateReason.SIGNAL_MISSING)
    return replica_report(replica, verdict, at_s * S, host_alive=False).busy_permille


def answers(replica: GuardedReplica, seconds: range, running: int) -> None:
    """The engine's load page once a second."""
    for second in seconds:
        figures = Figures(running=running, waiting=0, activity=(second if running else 0,))
        replica.note_figures(LOADS, figures, second * S)


def arrive(replica: GuardedReplica, at_s: int) -> None:
    """The tap is alive, verified, and knows what is under way."""
    replica.verification = SignalVerification(verified=True)
    beat = Health(
        POD,
        at_s * S,
        problem="",
        lost_ns=0,
        opaque=False,
        in_flight=len(replica.book.live),
        counts={},
        packets=0,
    )
    replica.take(beat, at_s * S)
    replica.book.blind_ns = 0


async def test_one_pod_of_a_group_is_refused_by_name_whatever_else_is_known_of_it(
    replica: GuardedReplica,
) -> None:
    verdict = closed(GateReason.SIGNAL_MISSING)
    alone = replica_report(replica, verdict, 100 * S, host_alive=True)
    assert alone.refusal == "SignalMissing"
    replica.pod = dataclasses.replace(replica.pod, group_size=2)
    assert replica_report(replica, verdict, 100 * S, host_alive=True).refusal == "MultiNodeReplica"


async def test_a_pod_whose_place_in_its_group_is_known_is_reported_with_it(
    replica: GuardedReplica,
) -> None:
    silent = closed(GateReason.LEADER_SILENT)
    leads, follows = GroupPlace("llama/0", 0, 2), GroupPlace("llama/0", 1, 2)
    replica.pod = dataclasses.replace(replica.pod, group_size=2, place=leads)
    reported = replica_report(replica, silent, 100 * S, host_alive=True)
    assert (reported.place, reported.refusal) == (leads, "SignalMissing")
    # That nothing shows its requests is no fault of a follower's.
    replica.pod = dataclasses.replace(replica.pod, place=follows)
    reported = replica_report(replica, silent, 100 * S, host_alive=True)
    assert reported.place == follows
    assert reported.refusal != "SignalMissing"
    replica.reader.machines = 3  # its engine knows better
    reported = replica_report(replica, silent, 100 * S, host_alive=True)
    assert reported.refusal == "MultiNodeReplica"


async def test_a_follower_withholds_nothing_by_its_own_nodes_clock(replica: GuardedReplica) -> None:
    replica.outcomes.cycles, replica.lent = Cycles(Schedule(10.0), lambda: 0.0), True
    withheld = [
        replica.facts(15 * S, stop_pressed=False, following=words).withheld
        for words in (None, LeaderLease())
    ]
    assert withheld == [True, False]


async def test_without_the_tap_a_busy_engine_is_reported_as_busy(replica: GuardedReplica) -> None:
    answers(replica, range(100, 111), running=1)
    assert reported_at(replica, 110) is None, "nothing to compare with yet"
    answers(replica, range(111, 121), running=2)
    assert reported_at(replica, 120) == 1000
    answers(replica, range(121, 131), running=0)
    assert reported_at(replica, 130) == 100, "it has worked since the look before, and then no more"
    labels = {"pool": POOL, "replica": "chat/pod"}
    assert REGISTRY.get_sample_value("rose_guard_replica_busy_seconds_total", labels) == 11.0


async def test_an_engine_that_does_not_answer_is_neither_busy_nor_idle(
    replica: GuardedReplica,
) -> None:
    answers(replica, range(100, 111), running=0)
    assert reported_at(replica, 110) is None
    assert reported_at(replica, 120) is None


async def test_what_two_sources_count_is_not_subtracted(replica: GuardedReplica) -> None:
    answers(replica, range(100, 111), running=1)
    reported_at(replica, 110)
    arrive(replica, 120)
    assert reported_at(replica, 120) is None, "the tap has just taken over"
    replica.take(Arrived(POD, 1, 120 * S, "/generate"), 120 * S)
    arrive(replica, 125)
    assert reported_at(replica, 125) == 1000


async def test_memory_that_nobody_borrowed_is_reported_of_the_pool(replica: GuardedReplica) -> None:
    replica.outcomes.pool.unlent_reserved_ns = 1_500_000_999
    reported = replica_report(replica, closed(GateReason.SIGNAL_MISSING), 100 * S, host_alive=True)
    assert reported.unlent_reserved_milliseconds == 1500
