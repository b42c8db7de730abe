"""Keys that outlive the engine that made them: what is fetched, and what is computed again."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_core.rollouts.engines.kv_store import (
    LONGEST_SECONDS,
    MEASURED_SECONDS,
    PAGE_TOKENS,
    PullCost,
    PullPace,
    RecentPace,
    measures_anew,
    patience,
)
from rose_simulate.model.clock import SECOND, VirtualClock
from rose_simulate.model.gpus.batch import BatchEngine, Sequence
from rose_simulate.model.gpus.kept import JobKeys, KeptKeys
from rose_simulate.model.gpus.recomputed import Cause, EngineHistory, KeyHistory
from rose_simulate.model.regimes import RULES, KeysKept
from rose_simulate.model.run import run
from rose_simulate.model.scenarios.costs import MODELS, costs, pairs
from rose_simulate.model.scenarios.scenario import Regime
from tests.simulate.worlds import MATERIAL, scenario

COSTS = costs("H100", "Qwen3-8B", 0.5)
TOKEN_BYTES = 147_456
SHORT_S, LONG_S = 0.5, 100.0
SETUP_S = 0.03


class Pair:
    """Two engines of one job, and their tier."""

    def __init__(
        self, room: int = 100_000, bytes_per_second: float = 1e11, *, nodes: str = "aa"
    ) -> None:
        self.clock = VirtualClock()
        keys = JobKeys(lambda: KeptKeys(room, TOKEN_BYTES, bytes_per_second, SETUP_S))
        self.first, self.second = (
            BatchEngine(
                *(self.clock, COSTS, 400_000, lambda: None),
                kept=keys.at(node),
                history=keys.history_of(node),
            )
            for node in nodes
        )
        self.first_s: dict[str, float] = {}
        # Engines measure by what they write themselves.
        for engine in (self.first, self.second):
            self.turn(engine, f"{id(engine)}@1", 64, 1)
            self.run(LONG_S)

    def turn(self, engine: BatchEngine, session: str, context: int, output: int) -> Sequence:
        """A turn and what became of it; ``first_s`` has how long its first token took."""
        began = self.clock.now_s

        def first() -> None:
            self.first_s[session] = self.clock.now_s - began

        one = Sequence(session, context, output, first, lambda: None)
        engine.submit(one)
        return one

    def run(self, seconds: float) -> None:
        self.clock.run(self.clock.now_ns + round(seconds * SECOND))


def test_an_engine_fetches_what_another_has_made_and_computes_the_rest() -> None:
    pair = Pair()
    pair.turn(pair.first, "t@1", 4000, 10)
    pair.run(LONG_S)
    later = pair.turn(pair.second, "t@1", 4060, 10)
    pair.run(LONG_S)
    assert (later.fetched, later.uncached) == (4000, 60), "whole pages of 4,010 tokens"
    computed = COSTS.prefill(60, 60 * (4000 + 30))
    pulled = SETUP_S + 4000 * TOKEN_BYTES / 1e11
    assert abs(pair.first_s["t@1"] - computed - pulled) < 1e-3


def test_where_prefill_is_as_quick_nothing_is_fetched() -> None:
    pair = Pair(bytes_per_second=1e6)
    pair.turn(pair.first, "t@1", 4000, 10)
    pair.run(LONG_S)
    later = pair.turn(pair.second, "t@1", 4060, 10)
    pair.run(LONG_S)
    assert (later.fetched, later.uncached) == (0, 4060)
    assert patience(250, COSTS.prefill(4000, 0) / 4000, by_rate(1e6, TOKEN_BYTES * 16)) == 0


def test_keys_of_one_version_are_never_used_under_another() -> None:
    pair = Pair()
    pair.turn(pair.first, "t@1", 4000, 10)
    pair.run(LONG_S)
    for engine in (pair.first, pair.second):
        later = pair.turn(engine, "t@2", 4060, 10)
        pair.run(LONG_S)
        if engine is pair.first:
            assert (later.fetched, later.uncached) == (0, 4060)
        else:
            assert later.fetched == 4048, "the second has it from the first, of the same version"


def test_a_cut_turn_has_the_keys_of_its_prompt_and_no_more() -> None:
    pair = Pair()
    cut = pair.turn(pair.first, "t@1", 4000, 1000)
    pair.run(SHORT_S)
    pair.first.settle()
    assert cut.produced > 1
    pair.first.set_speed(0.0)
    pair.first.remove(cut)
    again = pair.turn(pair.second, "t@1", 4000 + cut.produced, 1000 - cut.produced)
    pair.run(LONG_S)
    assert (again.fetched, again.uncached) == (4000, cut.produced)


def test_the_least_recently_used_session_goes_first() -> None:
    tier = KeptKeys(250, 1, 1.0, 0.0)
    tier.keep("a", 100)
    tier.keep("b", 100)
    assert tier.held("a") == 100
    tier.keep("c", 100)
    assert [tier.held(name) for name in "abc"] == [100, 0, 100]
    tier.keep("a", 50)
    assert tier.held("a") == 100, "what was longer stays"


def test_fewer_tokens_are_computed_again_where_keys_are_kept() -> None:
    setup = scenario(kv_tier={"gbps": 100.0})
    jobs = [
        run(setup, regime, 1, MATERIAL, {})[0].jobs[0] for regime in (Regime.OURS, Regime.OURS_KEPT)
    ]
    assert RULES[Regime.OURS_KEPT].keeps_keys is KeysKept.POOL
    assert jobs[0].fetched_tokens == 0 < jobs[1].fetched_tokens
    again = [(one.prefilled_tokens + one.warmed_tokens) / one.new_tokens for one in jobs]
    assert again[1] < again[0]


def test_a_store_of_the_node_has_what_its_own_engines_made_whatever_it_takes() -> None:
    keys = JobKeys(lambda: KeptKeys(100_000, TOKEN_BYTES, 1e6, 0.0, is_near=True), by_node=True)
    clock, nodes = VirtualClock(), ("a", "a", "b")
    first, beside, other = (
        BatchEngine(clock, COSTS, 400_000, lambda: None, kept=keys.at(node)) for node in nodes
    )
    turns: list[Sequence] = []
    for engine in (first, beside, other):
        turns.append(Sequence("t@1", 4000 + len(turns), 1, lambda: None, lambda: None))
        engine.submit(turns[-1])
        clock.run(clock.now_ns + round(10_000 * SECOND))
    assert [one.fetched for one in turns] == [0, 4000, 0]


def test_why_tokens_are_computed_is_told_by_who_has_computed_them_before() -> None:
    history = KeyHistory()
    mine, beside, far = (EngineHistory(history, node) for node in ("a", "a", "b"))
    assert mine.causes("t@1", range(100), 0)[Cause.NEW] == 100
    far.note("t@1", 900)
    far.note("t@2", 500)
    beside.note("t@2", 300)
    mine.note("t@2", 200)
    mine.note("u@2", 5000)  # another trajectory
    found = mine.causes("t@2", range(50, 1000), 120)
    assert found == {
        Cause.UNFETCHED: 70,
        Cause.ROOM: 80,
        Cause.NODE: 100,
        Cause.ELSEWHERE: 200,
        Cause.WEIGHTS: 400,
        Cause.NEW: 100,
    }


def test_engines_have_a_cause_for_each_token_that_they_compute() -> None:
    pair = Pair(bytes_per_second=1e6, nodes="ab")
    pair.turn(pair.first, "t@1", 4000, 10)
    pair.run(LONG_S)
    later = pair.turn(pair.second, "t@1", 4060, 10)
    pair.run(LONG_S)
    assert {cause: count for cause, count in later.causes.items() if count} == {
        Cause.UNFETCHED: 4010,
        Cause.NEW: 50,
    }
    other = pair.turn(pair.second, "t@2", 4070, 10)
    pair.run(LONG_S)
    assert other.causes[Cause.WEIGHTS] == 4070


@pytest.mark.parametrize("regime", [Regime.OURS, Regime.OURS_NODE, Regime.OURS_KEPT])
def test_the_causes_of_a_run_are_all_that_was_computed(regime: Regime) -> None:
    job = run(scenario(), regime, 1, MATERIAL, {})[0].jobs[0]
    assert sum(job.causes.values()) == job.prefilled_tokens + job.warmed_tokens > 0


QUICK, SLOW = 1e-5, 5e-4  # seconds of prefill for a token
PAGE, TEN_GIGABITS = 2 << 20, 1.25e9  # of an 8B in bfloat16; bytes in a second
ASSUMED_S = PullCost().setup_seconds


def by_rate(bytes_per_second: float, page: float = PAGE) -> PullCost:
    """Pulls as they look to an engine that has not told their set-up from their pages yet."""
    return PullCost(seconds_per_page=page / bytes_per_second)


@pytest.mark.parametrize(
    ("pages", "seconds_per_token", "rate", "waits"),
    [
        (2000, SLOW, TEN_GIGABITS, True),
        (2000, QUICK, TEN_GIGABITS, False),  # a fast GPU, a slow link
        (2000, QUICK, 100e9, True),
        (1, SLOW, TEN_GIGABITS, False),  # the set-up alone takes longer
        (0, SLOW, TEN_GIGABITS, False),
        (2000, SLOW, 1e6, False),
    ],
)
def test_a_turn_waits_where_that_is_quicker_than_to_prefill(
    pages: int, seconds_per_token: float, rate: float, waits: bool
) -> None:
    assert (patience(pages, seconds_per_token, by_rate(rate)) > 0) == waits


def test_nothing_is_pulled_before_a_pull_was_measured() -> None:
    pace = PullPace()
    assert patience(2000, SLOW, pace.cost) == 0
    pace.note(8 * PAGE / TEN_GIGABITS, 8)
    assert patience(2000, SLOW, pace.cost) > 0


def test_a_pace_follows_what_was_measured_and_a_freeze_is_no_slowness() -> None:
    pace = RecentPace()
    pace.note(1.0, 10)
    pace.note(900.0, 10)  # it was frozen for a quarter of an hour
    assert pace.seconds_each < 0.3
    for _ in range(100):
        pace.note(2.0, 10)
    assert pace.seconds_each == pytest.approx(0.2, rel=0.01)


def test_pages_are_read_back_at_first_and_when_what_is_known_is_old() -> None:
    assert measures_anew(None, 5.0)
    assert not measures_anew(5.0, 5.0 + MEASURED_SECONDS / 2)
    assert measures_anew(5.0, 5.0 + MEASURED_SECONDS)


@given(
    pages=st.integers(0, 1 << 16),
    page_bytes=st.integers(1, 64 << 20),
    seconds_per_token=st.floats(0, 1),
    rate=st.floats(1, 1e12),
)
def test_a_turn_never_waits_longer_than_its_prefill_takes_nor_than_a_router_bears(
    pages: int, page_bytes: int, seconds_per_token: float, rate: float
) -> None:
    waits = patience(pages, seconds_per_token, by_rate(rate, page_bytes))
    assert 0 <= waits <= min(LONGEST_SECONDS, pages * PAGE_TOKENS * seconds_per_token)
    if waits:
        assert ASSUMED_S + pages * (page_bytes / rate) < waits


TCP = 1e9 / 0.9  # bytes in a second that one processor moves (docs/decisions/0850)


def test_an_h100_pulls_an_8bs_keys_by_a_link_of_its_own_and_not_over_tcp() -> None:
    for tokens in (1000, 4000, 16_000):
        took = COSTS.prefill(tokens, 0) / tokens
        pages, size = tokens // PAGE_TOKENS, TOKEN_BYTES * PAGE_TOKENS
        assert patience(pages, took, by_rate(TCP, size)) == 0
        assert (patience(pages, took, by_rate(100e9 / 8, size)) > 0) == (tokens > 1000)


PAGE_OF_ENGINES = Path(__file__).parents[2] / "docs" / "engines.md"
WORTH = [
    [cell.strip().removeprefix("above ").removesuffix(" Gb/s") for cell in line.split("|")[1:-1]]
    for line in PAGE_OF_ENGINES.read_text().splitlines()
    if line.startswith("| Qwen")
]


@pytest.mark.parametrize("row", WORTH, ids=lambda row: str(row[0]))
def test_the_page_says_from_which_rate_on_a_models_keys_are_pulled(row: list[str]) -> None:
    cost = costs("H100", row[0], 0.5, attention=True)
    assert row[1] == f"{cost.fit.kv_bytes_per_token >> 10} KiB"
    made = cost.fit.kv_bytes_per_token * cost.fit.prefill_tokens_per_s
    assert float(row[2]) == pytest.approx(made * 8 / 1e9, abs=0.5)
    for tokens, gigabits in zip((4000, 16_000, 32_000), map(float, row[3:]), strict=True):
        took = cost.prefill(tokens, pairs(tokens)) / tokens

        def waits(rate: float, tokens: int = tokens, took: float = took) -> float:
            page = cost.fit.kv_bytes_per_token * PAGE_TOKENS
            return patience(tokens // PAGE_TOKENS, took, by_rate(rate * 1e9 / 8, page))

        assert waits(gigabits + 0.6) > 0 == waits(gigabits - 0.6)
    assert {one[0] for one in WORTH} == set(MODELS)
