"""TTFT lent <= TTFT alone + D + S + C, whatever comes when; ``docs/bound.md``."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from bench.bound import OUTPUTS, PROMPTS, Adversary, Findings, Schedule, Train
from rose_core.guard.reasons import GateReason
from tests.simulate.worlds import EPISODES, scenario

_TOLD = scenario()
# Without a TPOT slack is never measured, so the gate uses idle gaps alone, as the bound says.
_LOOSE = _TOLD.services[0].model_copy(update={"ttft_ms": 1e6, "tpot_ms": 0.0})
ATTACK = Adversary(_LOOSE, _TOLD.jobs[0], EPISODES)

_request = some.tuples(some.floats(0, 0.3), some.sampled_from(PROMPTS), some.sampled_from(OUTPUTS))
_train = some.builds(
    Train, some.floats(0.06, 1.0), some.lists(_request, min_size=1, max_size=10).map(tuple)
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(some.lists(_train, min_size=1, max_size=4).map(tuple), some.integers(0, 1000))
def test_no_schedule_exceeds_the_bound(schedule: Schedule, seed: int) -> None:
    found = ATTACK.try_out(schedule, seed)
    assert found.exceeded == 0, found


def test_an_adversary_finds_more_than_the_stop_and_less_than_the_bound() -> None:
    tried = list(ATTACK.search(900, seed=1))
    assert sum(one.exceeded for one in tried) == 0
    assert max(one.worst_s / one.cost.stop_s for one in tried) > 1, "D alone is no bound"
    assert all(one.lent.verdicts.get(GateReason.IDLE) for one in tried), "the gate was open"


def test_equal_seeds_search_equally() -> None:
    one, other = ([found.schedule for found in ATTACK.search(900, seed=4)] for _ in range(2))
    assert len(one) > 1
    assert one == other


def test_what_searches_have_found_adds_up() -> None:
    both = [ATTACK.findings(300, None, seed) for seed in (1, 2)]
    found, each = Findings(), [one for seed in (1, 2) for one in ATTACK.search(300, seed)]
    for one in both:
        found.join(one)
    assert (found.requests, found.schedules) == (sum(one.requests for one in each), len(each))
    worst = max(each, key=lambda one: one.share)
    assert (found.share, found.cost) == (worst.share, worst.cost)
    assert found.most_s == max(one.worst_s for one in each)


def test_a_search_whose_time_is_over_ends_with_its_schedule() -> None:
    assert ATTACK.findings(10_000, 0.0, seed=1).schedules == 1
