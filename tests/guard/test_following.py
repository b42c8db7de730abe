"""A follower's gate opens under the leader's lease alone, whatever the network does to updates."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_core.guard.following import (
    ASK_NS,
    LOST_STOP_NS,
    MAX_LEASE_NS,
    STOP_WAIT_NS,
    GroupStop,
    LeaderLease,
    answer,
)
from rose_core.guard.gate import GateLimits, judge
from rose_core.guard.reasons import GateReason
from rose_core.telemetry.signal import ServingSignal
from rose_core.wire.leading import LeaderUpdate
from tests.guard.worlds import MS, NOW, S, facts

UNSEEN = ServingSignal(None, None)  # what a follower's own node sees of requests


def update(
    number: int, sequence: int, *, is_open: bool = True, boot: str = "a", term: int = 1
) -> LeaderUpdate:
    reason = GateReason.IDLE if is_open else GateReason.SERVING_BUSY
    lease = MAX_LEASE_NS if is_open else 0
    return LeaderUpdate(boot, term, sequence, number, is_open, reason.value, lease)


def opened(now_ns: int = NOW) -> LeaderLease:
    """A follower that asked at NOW and was answered at once."""
    state, number = LeaderLease(next_number=7).ask(NOW)
    return state.apply(update(number, 1), now_ns)


def gate(state: LeaderLease, now_ns: int) -> tuple[bool, GateReason]:
    verdict = judge(facts(UNSEEN, following=state), GateLimits(), now_ns)
    return verdict.open, verdict.reason


def test_a_word_counts_from_the_question_and_not_from_when_it_came() -> None:
    state = opened(now_ns=NOW + 100 * MS)
    verdict = judge(facts(UNSEEN, following=state), GateLimits(), NOW + 100 * MS)
    assert (verdict.open, verdict.reason, verdict.until_ns) == (
        True,
        GateReason.IDLE,
        NOW + MAX_LEASE_NS,
    )
    assert gate(state, NOW + MAX_LEASE_NS - 1)[0]
    assert gate(state, NOW + MAX_LEASE_NS) == (False, GateReason.LEADER_SILENT)
    assert gate(opened(now_ns=NOW + MAX_LEASE_NS), NOW + MAX_LEASE_NS) == (
        False,
        GateReason.LEADER_SILENT,
    )


def test_nobody_has_spoken_yet() -> None:
    assert gate(LeaderLease(), NOW) == (False, GateReason.LEADER_SILENT)


def test_a_closing_word_closes_at_once_for_the_leaders_reason() -> None:
    shut = opened().apply(update(0, 2, is_open=False), NOW + 10 * MS)
    assert gate(shut, NOW + 10 * MS) == (False, GateReason.SERVING_BUSY)
    assert gate(shut, NOW + 10 * MS + MAX_LEASE_NS) == (False, GateReason.LEADER_SILENT)


def test_what_was_answered_before_it_closed_opens_nothing_afterwards() -> None:
    state, number = opened().ask(NOW + ASK_NS)
    shut = state.apply(update(0, 3, is_open=False), NOW + ASK_NS + MS)
    late = shut.apply(update(number, 2), NOW + ASK_NS + 2 * MS)
    assert gate(late, NOW + ASK_NS + 2 * MS) == (False, GateReason.SERVING_BUSY)


@pytest.mark.parametrize(
    "late",
    [
        update(0, 9),  # nobody asked
        update(99, 9),  # no question of ours
        update(7, 9),  # answered already
        update(8, 1),  # an old sequence
        update(8, 9, term=0),  # an operator that was deposed
        update(7, 1, boot="b"),  # another process, which answers an old question
    ],
)
def test_other_words_extend_nothing(late: LeaderUpdate) -> None:
    state, _ = opened().ask(NOW + ASK_NS)
    assert state.apply(late, NOW + ASK_NS).until_ns == NOW + MAX_LEASE_NS


def test_a_restarted_leader_is_heard_once_it_answers() -> None:
    state, number = opened().ask(NOW + ASK_NS)
    assert (
        state.apply(update(number, 1, boot="b"), NOW + ASK_NS).until_ns
        == NOW + ASK_NS + MAX_LEASE_NS
    )


def test_an_opened_gate_is_asked_for_at_once() -> None:
    assert opened().apply(update(0, 2), NOW).eager
    assert not opened().apply(update(0, 2), NOW).ask(NOW)[0].eager


def test_a_clock_that_went_backwards_holds_no_word() -> None:
    assert gate(opened(), NOW - 1) == (False, GateReason.LEADER_SILENT)


def test_the_followers_own_bars_come_first() -> None:
    barred = facts(UNSEEN, following=opened(), memory_pressure=True)
    assert judge(barred, GateLimits(), NOW).reason is GateReason.MEMORY_PRESSURE


def test_no_lease_is_longer_than_a_permit_or_than_the_leaders_own() -> None:
    def reported(until_ns: int, *, is_open: bool = True) -> LeaderUpdate:
        return answer(is_open=is_open, reason=GateReason.SLACK, until_ns=until_ns, now_ns=NOW)

    assert reported(0).lease_ns == MAX_LEASE_NS
    assert reported(NOW + 10 * MS).lease_ns == 10 * MS
    assert reported(NOW + S).lease_ns == MAX_LEASE_NS
    assert (reported(NOW).open, reported(NOW).lease_ns) == (False, 0)
    assert (reported(0, is_open=False).open, reported(0, is_open=False).lease_ns) == (False, 0)
    longer = msgspec.structs.replace(update(7, 1), lease_ns=S)
    state, _ = LeaderLease(next_number=7).ask(NOW)
    assert state.apply(longer, NOW).until_ns == NOW + MAX_LEASE_NS


# --- any network: words and questions are lost, doubled, late, out of order; processes restart

FATES = st.lists(st.integers(0, 400), max_size=3)  # milliseconds until each copy arrives
EVENTS = st.lists(
    st.tuples(
        st.integers(1, 60),  # milliseconds until it happens
        st.sampled_from(["ask", "ask", "ask", "turn", "restart", "refollow"]),
        FATES,
        FATES,
    ),
    min_size=20,
    max_size=80,
)


class Network:
    """Leader and follower in virtual time, each with a clock of its own."""

    def __init__(self, offset_ns: int) -> None:
        self.offset_ns = offset_ns  # of the leader's clock
        self.now_ns = NOW
        self.state = LeaderLease(next_number=1000)
        self.leader_open, self.boot, self.sequence, self.starts = True, "boot0", 0, 0
        self.given_ns: list[int] = []  # when the leader gave an open word
        self.flying: list[tuple[int, LeaderUpdate | tuple[int, list[int]]]] = []

    def send(self, thing: LeaderUpdate | tuple[int, list[int]], fates: list[int]) -> None:
        self.flying += [(self.now_ns + late * MS, thing) for late in fates]

    def speak(self, number: int, fates: list[int]) -> None:
        self.sequence += 1
        reason = GateReason.IDLE if self.leader_open else GateReason.SERVING_BUSY
        reported = answer(
            is_open=self.leader_open,
            reason=reason,
            until_ns=0,
            now_ns=self.now_ns + self.offset_ns,
        )
        if reported.open:
            self.given_ns.append(self.now_ns)
        marks = {"boot": self.boot, "term": 1, "sequence": self.sequence, "number": number}
        self.send(msgspec.structs.replace(reported, **marks), fates)

    def do(self, event: str, there: list[int], back: list[int]) -> None:
        if event == "ask":
            self.state, number = self.state.ask(self.now_ns)
            self.send((number, back), there)
        elif event == "turn":
            self.leader_open = not self.leader_open
            self.speak(0, back)
        elif event == "restart":
            self.starts += 1
            self.boot, self.sequence = f"boot{self.starts}", 0
        else:
            self.state = LeaderLease(next_number=1000 * (len(self.given_ns) + 2) + self.now_ns)

    def until(self, then_ns: int) -> None:
        while due := sorted((one for one in self.flying if one[0] <= then_ns), key=lambda x: x[0]):
            at_ns, thing = due[0]
            self.flying.remove(due[0])
            self.now_ns = max(self.now_ns, at_ns)
            if isinstance(thing, tuple):
                self.speak(*thing)
            else:
                self.state = self.state.apply(thing, self.now_ns)
                if not thing.open:
                    assert not gate(self.state, self.now_ns)[0]
            self.check()
        self.now_ns = then_ns
        self.check()

    def check(self) -> None:
        verdict = judge(facts(UNSEEN, following=self.state), GateLimits(), self.now_ns)
        if verdict.open:
            assert verdict.until_ns <= max(self.given_ns) + MAX_LEASE_NS
            assert verdict.until_ns <= self.now_ns + MAX_LEASE_NS


@given(events=EVENTS, offset_s=st.integers(-500, 500))
@settings(max_examples=300, deadline=None)
def test_no_permit_outlasts_the_last_open_word_in_any_network(
    events: list[tuple[int, str, list[int], list[int]]], offset_s: int
) -> None:
    network = Network(offset_s * S)
    for pause, event, there, back in events:
        network.until(network.now_ns + pause * MS)
        network.do(event, there, back)
    network.until(network.now_ns + S)
    assert not gate(network.state, network.now_ns)[0]


@given(st.lists(st.integers(0, 70), min_size=10, max_size=40))
def test_a_gate_that_is_open_stays_open_over_any_round_trip_within_75_ms(late: list[int]) -> None:
    state, heard_ns = LeaderLease(), 0
    for turn, millis in enumerate(late):
        asked_ns = NOW + turn * ASK_NS
        state, number = state.ask(asked_ns)
        heard_ns = max(heard_ns, asked_ns + millis * MS)  # a stream keeps the order
        assert turn == 0 or gate(state, heard_ns)[0]
        state = state.apply(update(number, turn + 1), heard_ns)


# --- how long such a replica takes to stop


def test_the_last_engine_to_stand_counts() -> None:
    stop = GroupStop(NOW, {"own", "b"})
    stop.note("own", 5 * MS)
    assert stop.after_ns(NOW + 5 * MS) is None
    stop.note("b", 12 * MS)
    stop.note("stranger", S)
    assert stop.after_ns(NOW + 12 * MS) == 12 * MS


def test_who_never_says_so_counts_as_lost() -> None:
    stop = GroupStop(NOW, {"b"})
    assert stop.after_ns(NOW + STOP_WAIT_NS - 1) is None
    assert stop.after_ns(NOW + STOP_WAIT_NS) == LOST_STOP_NS
    assert replace(stop, worst_ns=S).after_ns(NOW + STOP_WAIT_NS) == S
