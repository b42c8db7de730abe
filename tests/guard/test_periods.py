"""The promise of 250 ms, as sums of the periods that processes really have (docs/guard.md)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rose_agent.guard.loop import TICK_SECONDS
from rose_agent.host.enforcement import enforcer
from rose_agent.tap import parser
from rose_core.guard.freezing import Grace
from rose_core.guard.gate import GateLimits, ReplicaFacts, judge
from rose_core.guard.ladder import LadderLimits
from rose_core.guard.whole import WholePhase
from rose_core.guard.whole import judge as judge_whole
from rose_core.telemetry.signal import ServingSignal, SignalLimits
from rose_core.wire.sync import SignalSource

PROMISE = 250
TICK, LOOK, BEAT = (
    round(1e3 * seconds) for seconds in (TICK_SECONDS, enforcer.TICK_SECONDS, parser._CALM_SECONDS)
)
PERMIT, HOST_STALE = (
    limit // 1_000_000 for limit in (LadderLimits().permit_ns, LadderLimits().host_stale_ns)
)
TAP_STALE = SignalLimits().tap_stale_ns // 1_000_000
GRACE = Grace().iteration_ns // 1_000_000
SUMS = {
    "guard": (PERMIT, LOOK, GRACE),
    "engine host": (HOST_STALE, TICK),
    "tap": (TAP_STALE, LOOK, GRACE),
    "interface": (BEAT, TICK, LOOK, GRACE),
}


@pytest.mark.parametrize("dead", SUMS)
def test_whatever_dies_the_tree_is_stopped_within_the_promise(dead: str) -> None:
    # What is left is for the kernel to stop the tree.
    assert sum(SUMS[dead]) <= PROMISE - 10


def test_an_engine_over_several_gpus_may_end_its_iteration_whatever_dies() -> None:
    assert HOST_STALE + TICK + GRACE <= PROMISE - 10


def test_one_late_tick_or_heartbeat_lapses_nothing() -> None:
    assert 2 * TICK < PERMIT <= 150
    assert BEAT + TICK < TAP_STALE


def test_the_page_has_these_sums() -> None:
    page = (Path(__file__).parents[2] / "docs/guard.md").read_text()
    rows = re.findall(r"^\| (\w[\w ]*\w)(?:,[^|]*)? \|[^|]*\| ([\d +]+) \|$", page, re.MULTILINE)
    found = {name: tuple(map(int, figures.split(" + "))) for name, figures in rows}
    assert found == SUMS


def test_no_permit_outlasts_what_it_was_judged_by() -> None:
    """So a tap that dies is acted upon at its deadline, whenever the guard looks again."""
    until = 10**9
    received = ServingSignal(SignalSource.WIRE_TAP, 0, empty_since_ns=0, believed_until_ns=until)
    facts = ReplicaFacts(signal=received)
    verdict = judge(facts, GateLimits(), now_ns=until - 1)
    assert (verdict.open, verdict.until_ns) == (True, until)
    assert judge_whole(facts, WholePhase.ASLEEP).until_ns == until
    unbounded = ReplicaFacts(signal=ServingSignal(SignalSource.WIRE_TAP, 0, empty_since_ns=0))
    assert judge(unbounded, GateLimits(), now_ns=until - 1).until_ns == 0
