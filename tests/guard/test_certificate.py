"""What the next request is promised, who shuts a gate for it, and that a shut one opens again."""

from __future__ import annotations

import random

import pytest

from rose_core.guard.certificate import (
    CHUNK_DIVISORS,
    FIRST_STOP_S,
    RELEARN,
    Envelope,
    LastTimes,
    TtftCertificate,
    certify,
)
from rose_core.guard.experience import Experience, Lessons
from rose_core.guard.gate import GateLimits, judge
from rose_core.guard.reasons import GateReason
from rose_core.guard.slack import LatencyObjective
from rose_core.guard.trial import added
from rose_core.stats import mixture_sequence
from rose_core.telemetry.book import FinishedRequest
from rose_core.telemetry.events import EndKind
from rose_core.wire.sync import Trial
from tests.guard.costs import MOVING, most_hits, moving
from tests.guard.worlds import MS, NOW, S, busy, facts, idle

SHORT = CHUNK_DIVISORS[-1]
GOALS = LatencyObjective(ttft_s=0.4)
HOLDS = TtftCertificate(0.4, 0.2, 0.05, 0.99)
FAILS = TtftCertificate(0.4, 0.38, 0.05, 0.99)


class World:
    """One replica's requests, one after the other, each on an empty replica.

    Args:
        short_stop_ms: of engines with short chunks, learned before; 0 = nothing was.
    """

    def __init__(self, short_stop_ms: int = 0) -> None:
        self.experience = Experience(NOW, lessons=Lessons())
        self.now, self.number = NOW, 0
        for _ in range(20 if short_stop_ms else 0):
            self.experience.note_stop(short_stop_ms / 1e3, SHORT)

    def request(
        self,
        ttft_ms: int,
        *,
        is_open: bool = False,
        stop_ms: int = 0,
        had_turns: bool | None = True,
        later_stop_ms: int = 0,
    ) -> bool | None:
        """From arrival to end, a later stop for another one between; whether it exceeds."""
        self.number += 1
        arrived, first = self.now, self.now + ttft_ms * MS
        reported, one = self.experience, self.number
        shown = reported.certificate(GOALS, 99)
        assert shown is not None
        reported.open_time.note(first if is_open else 0, arrived - 1)
        reported.begin(one, arrived)
        reported.note_size(one, 400, arrived)
        if stop_ms:
            reported.note_stop(stop_ms / 1e3, shown.chunk_divisor, had_turns=had_turns)
        reported.open_time.note(0, arrived + MS)
        reported.note_first_token(one, first)
        if later_stop_ms:
            reported.note_stop(later_stop_ms / 1e3, shown.chunk_divisor, had_turns=had_turns)
        how = EndKind.COMPLETE
        done = FinishedRequest(one, arrived, first, first + MS, 400, 2, 200, how, "/")
        self.now = first + S
        return reported.learn(done, GOALS, 0).exceeded

    @property
    def certificate(self) -> TtftCertificate:
        found = self.experience.certificate(GOALS, 99)
        assert found is not None
        return found


@pytest.mark.parametrize(("added_ms", "expected"), [(20, 2.0), (5, 1.1)])
def test_a_gate_that_shuts_at_each_arrival_still_learns_what_co_running_costs(
    added_ms: int, expected: float
) -> None:
    world = World()
    for number in range(100):
        met = number % 2
        world.request(100 + added_ms * met, is_open=bool(met), stop_ms=40 * met)
    assert world.experience.slowdown == pytest.approx(expected, abs=0.1)
    predictor = world.experience.predictor
    assert predictor.loss(decoding=False) > 0.4, "it is told by no share of open time"


def test_a_stop_of_an_engine_without_turns_is_no_evidence_that_co_running_is_free() -> None:
    world = World()
    for number in range(200):
        had_turns = number % 4 < 3
        world.request(100 + 20 * had_turns, is_open=True, stop_ms=40, had_turns=had_turns)
    assert world.experience.slowdown == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize("stop_ms", [0, 40], ids=["of no stop", "of a stop alone"])
def test_a_request_of_which_nobody_knows_what_it_shared_teaches_no_cost(stop_ms: int) -> None:
    world = World()
    for number in range(100):
        met = number % 2
        world.request(100 + 4 * met, is_open=bool(met), stop_ms=40 * met)
    before = world.experience.lessons.stopping
    world.request(100, is_open=True, stop_ms=stop_ms, had_turns=None)
    assert world.experience.lessons.stopping == before


@pytest.mark.parametrize("met", [False, True], ids=["alone", "beside rollouts"])
def test_a_stall_is_not_taken_for_harm_or_help_of_rollouts(met: bool) -> None:
    world = World()
    for number in range(100):
        world.request(100 + 20 * (number % 2), is_open=bool(number % 2), stop_ms=40 * (number % 2))
    before = world.experience.slowdown
    world.request(10_000, is_open=met, stop_ms=40 * met)
    assert world.experience.slowdown == pytest.approx(before, abs=0.1)


@pytest.mark.parametrize(("level", "count"), [(0.9, 9), (0.9, 40), (0.99, 99)])
def test_the_first_bound_covers_what_it_says(level: float, count: int) -> None:
    draw, tries, missed = random.Random(5), 2000, 0
    for _ in range(tries):
        seen = LastTimes(draw.lognormvariate(0, 1) for _ in range(count))
        missed += draw.lognormvariate(0, 1) > seen.bound(level)
    assert missed <= most_hits(tries, 1 - level)


@pytest.mark.parametrize("level", [0.9, 0.99])
@pytest.mark.parametrize("kind", MOVING)
def test_a_certificates_quantile_holds_its_level_whatever_moves(kind: str, level: float) -> None:
    seen, missed, tries = LastTimes(), 0, 10_000
    for number, seconds in enumerate(moving(kind, tries)):
        missed += number >= 100 and seconds > seen.bound(level)
        seen.add(seconds)
    assert missed <= most_hits(tries - 100, 1 - level)


def test_below_its_samples_a_percentile_is_claimed_at_a_lower_level() -> None:
    for nexts, stops, percentile, level in (
        (8, 99, 99, 0),
        (99, 8, 99, 0),
        (9, 9, 99, 0.9),
        (99, 98, 99, 0.9),
        (99, 99, 99, 0.99),
        (9, 9, 75, 0.75),
    ):
        assert (
            certify(LastTimes([0.1] * nexts), LastTimes([0.02] * stops), 0.4, percentile).level
            == level
        )


def test_what_the_owner_says_stands_in_the_place_of_what_was_seen() -> None:
    received = certify(LastTimes(), LastTimes([0.02] * 99), 0.4, 99, alone_s=0.37)
    assert (received.next_s, received.level, received.holds) == (0.37, 0.99, True)
    assert not certify(LastTimes([0.1] * 99), LastTimes([0.04] * 99), 0.4, 99, alone_s=0.37).holds


def test_one_stall_does_not_shut_the_gate_for_ever() -> None:
    seen = [5.0, *[0.1] * 9]
    assert not certify(LastTimes(seen), LastTimes([0.02] * 20), 0.4, 99).holds
    assert certify(LastTimes([*seen, *[0.1] * 9]), LastTimes([0.02] * 20), 0.4, 99).holds


def test_without_stops_a_gate_is_not_shut_for_what_one_might_take() -> None:
    reported = certify(LastTimes([0.39] * 99), LastTimes([0.01] * 8), 0.4, 99)
    assert reported.stop_s == FIRST_STOP_S
    assert reported.holds, "a shut gate would never learn how long a stop takes"


def test_where_whole_chunks_stop_too_late_short_ones_are_tried_and_certified() -> None:
    world = World()
    for _ in range(9):
        world.request(410, is_open=True, stop_ms=60)
    tried = world.certificate
    assert (tried.holds, tried.learned, tried.chunk_divisor) == (True, False, SHORT)
    for _ in range(9):
        world.request(370, is_open=True, stop_ms=20)
    reported = world.certificate
    assert (reported.holds, reported.learned, reported.chunk_divisor) == (True, True, SHORT)
    assert reported.text == "p90 of TTFT 350 + stop 20 = 370 <= 400 ms (prefill chunks 1/4)"


def test_short_chunks_are_not_tried_for_what_would_be_late_alone() -> None:
    world = World()
    for _ in range(20):
        world.request(450, is_open=True, stop_ms=20)
    assert world.certificate.next_s > GOALS.ttft_s
    assert not world.certificate.holds
    assert world.certificate.chunk_divisor == 1


def test_whole_chunks_are_tried_again_after_a_while_of_short_ones() -> None:
    world = World(short_stop_ms=20)
    for _ in range(9):
        world.request(410, is_open=True, stop_ms=60)
    asked = 0
    while world.certificate.chunk_divisor != 1:
        world.request(370, is_open=True, stop_ms=20)
        asked += 1
        assert asked <= RELEARN, "stops of whole chunks are never forgotten"
    assert asked >= RELEARN - 20, "they are not tried all the time"
    assert world.certificate.holds
    for _ in range(9):
        world.request(380, is_open=True, stop_ms=30)
    assert (world.certificate.learned, world.certificate.chunk_divisor) == (True, 1)


def test_one_request_in_twelve_at_most_meets_a_gate_without_a_promise() -> None:
    for whole in (False, True):
        envelope, bare, asked = Envelope(), 0, 5000
        for _ in range(asked):
            reported = envelope.certificate(0.4, 99, whole=whole)
            envelope.note_next(0.3)
            if not reported.holds:
                envelope.note_refused(reported)
            else:
                envelope.note_stop(0.2, reported.chunk_divisor)
                bare += not reported.learned
        assert bare > 18, "stops are learned anew"
        assert bare - 18 <= asked / 12, "after the first nine of each size"


def test_a_request_that_is_late_by_itself_shuts_the_gate_whatever_stops_took() -> None:
    assert not certify(LastTimes([0.5] * 20), LastTimes(), 0.4, 99).holds
    assert not certify(LastTimes(), LastTimes(), 0.4, 99, alone_s=0.5).holds
    envelope = Envelope()
    for _ in range(20):
        envelope.note_next(0.5)
    for _ in range(2 * RELEARN):
        reported = envelope.certificate(0.4, 99)
        assert not reported.holds
        envelope.note_refused(reported)


def test_beside_ranks_that_keep_whole_chunks_no_short_ones_are_promised() -> None:
    envelope = Envelope()
    for _ in range(20):
        envelope.note_next(0.35)
        envelope.note_stop(0.06)
        envelope.note_stop(0.02, SHORT)
    assert envelope.certificate(0.4, 99).holds
    reported = envelope.certificate(0.4, 99, whole=True)
    assert (reported.holds, reported.chunk_divisor) == (False, 1)


def test_a_gate_that_opens_under_a_certificate_carries_its_chunks() -> None:
    short = TtftCertificate(0.4, 0.35, 0.02, 0.99, SHORT)
    for certificate, divisor in ((short, SHORT), (HOLDS, 1), (None, 1)):
        verdict = judge(facts(idle(), certificate=certificate), GateLimits(), NOW)
        assert (verdict.open, verdict.chunk_divisor) == (True, divisor)


def test_an_empty_replica_is_not_lent_without_a_certificate() -> None:
    limits = GateLimits()
    verdict = judge(facts(idle(), certificate=FAILS), limits, NOW)
    assert (verdict.open, verdict.reason) == (False, GateReason.NOT_CERTIFIED)
    assert judge(facts(idle(), certificate=HOLDS), limits, NOW).open
    assert judge(facts(idle(), certificate=None), limits, NOW).open, "no TTFT was promised"


def test_a_busy_replica_is_judged_by_slack_and_not_by_the_certificate() -> None:
    verdict = judge(facts(busy(), certificate=FAILS), GateLimits(), NOW)
    assert verdict.reason is GateReason.SERVING_BUSY


def test_a_gate_that_was_shut_opens_again_when_requests_become_smaller() -> None:
    world = World(short_stop_ms=40)
    for _ in range(20):
        world.request(390, is_open=True, stop_ms=40)
    for _ in range(5):
        world.request(390)
    assert not world.certificate.holds
    for _ in range(40):
        world.request(100)
    assert world.certificate.holds


def test_a_gate_that_was_shut_for_slow_stops_opens_to_learn_them_anew() -> None:
    world = World(short_stop_ms=350)
    for _ in range(20):
        world.request(420, is_open=True, stop_ms=350)
    assert not world.certificate.holds
    asked = 0
    while not (world.certificate.learned and world.certificate.holds):
        is_open = world.certificate.holds
        world.request(320 if is_open else 300, is_open=is_open, stop_ms=20 if is_open else 0)
        asked += 1
        assert asked < 2 * RELEARN, "the slow stops are never forgotten"


@pytest.mark.parametrize(
    ("first_ns", "status"), [(0, 200), (9 * MS, 500)], ids=["not streamed", "failed"]
)
def test_a_shut_gate_opens_again_for_requests_without_a_ttft(first_ns: int, status: int) -> None:
    goals = LatencyObjective(ttft_s=0.4, alone_s=0.35)
    reported = Experience(NOW, lessons=Lessons())
    for _ in range(20):
        reported.note_stop(0.075)
        reported.note_stop(0.075, SHORT)
    shown = reported.certificate(goals, 99)
    assert shown is not None
    assert not shown.holds
    for number in range(RELEARN):
        now = NOW + number * S
        reported.certificate(goals, 99)
        reported.begin(number, now)
        first = now + first_ns if first_ns else 0
        how = EndKind.COMPLETE
        done = FinishedRequest(number, now, first, now + 10 * MS, 400, 2, status, how, "/")
        reported.learn(done, goals, 0)
    shown = reported.certificate(goals, 99)
    assert shown is not None
    assert shown.holds, "nothing else would ever take its stops away"


def test_what_stopping_took_is_not_counted_twice() -> None:
    world = World()
    for _ in range(120):
        world.request(340, is_open=True, stop_ms=40)
    assert world.certificate.next_s == pytest.approx(0.3)
    assert world.certificate.ceiling_s == pytest.approx(0.34)
    assert world.certificate.holds


def test_a_stop_for_another_request_is_none_of_the_first_ones_time() -> None:
    world = World()
    for _ in range(120):
        world.request(340, is_open=True, stop_ms=40, later_stop_ms=120)
    assert world.certificate.next_s == pytest.approx(0.3)


def test_followers_within_the_stop_count_as_the_batch() -> None:
    alone, crowded = World(), World()
    for world in (alone, crowded):
        reported = world.experience
        for number in range(0, 40, 2):
            now = NOW + number * S
            reported.begin(number, now)
            reported.note_stop(0.075)
            reported.note_size(number, 400, now)
            if world is crowded:
                reported.begin(number + 1, now + MS)
                reported.note_size(number + 1, 2000, now + MS)
            how = EndKind.COMPLETE
            for one in (number + 1, number):
                first = now + 50 * MS
                done = FinishedRequest(one, now, first, first, 400, 1, 200, how, "/")
                reported.learn(done, GOALS, 0)
    assert crowded.certificate.next_s > alone.certificate.next_s + 0.01


def test_what_exceeds_its_promise_is_counted_beside_what_may() -> None:
    world = World()
    for _ in range(20):
        assert world.request(100) is None, "it met no open gate"
        world.experience.note_stop(0.02)
    assert world.request(100, is_open=True, stop_ms=20) is False
    assert world.request(390, is_open=True, stop_ms=20) is True
    count = world.experience.lessons.certified
    assert (count.requests, count.exceeded) == (2, 1)
    assert count.allowed == pytest.approx(0.2)


def test_a_confidence_sequence_holds_at_every_look_at_once() -> None:
    draw = random.Random(3)
    left = 0
    for _ in range(100):
        hits = 0
        for count in range(1, 201):
            hits += draw.random() < 0.03
            found = mixture_sequence(hits, count)
            if not found.low <= 0.03 <= found.high:
                left += 1
                break
    assert left <= 0.05 * 100


def test_a_sequence_narrows_to_the_share() -> None:
    wide, narrow = mixture_sequence(1, 100), mixture_sequence(100, 10_000)
    assert wide.low <= narrow.low < 0.01 < narrow.high < wide.high
    assert mixture_sequence(0, 0).high == 1.0
    assert mixture_sequence(50, 50).high == 1.0
    assert mixture_sequence(0, 50).low == 0.0


def test_a_trial_says_at_most_how_many_lending_has_made_slow() -> None:
    assert added(Trial(lent=10)) is None, "nothing to compare with"
    calm = added(Trial(10_000, 20, 1000, 2))
    assert calm is not None
    assert not calm.proven
    assert calm.most <= 20
    harm = added(Trial(2000, 400, 1000, 10))
    assert harm is not None
    assert harm.proven
    assert "in at most 400 of 2000 busy periods (95 %; a burst counts once)" in harm.text


def test_trials_of_nodes_add_up() -> None:
    one = Trial().count(withheld=False, slow=True).count(withheld=True, slow=False)
    assert one == Trial(1, 1, 1, 0)
    assert one.plus(one) == Trial(2, 2, 2, 0)
