"""Metrics of the reward functions."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

RESULTS = Counter(
    "rose_rewards_results_total",
    "Rewards by function and outcome: scored, masked or lost.",
    ["function", "outcome"],
    registry=REGISTRY,
)
CORRECT = Counter(
    "rose_rewards_correct_total", "Answers found correct.", ["function"], registry=REGISTRY
)
SECONDS = Histogram(
    "rose_rewards_seconds",
    "Time of one verification, its wait excluded.",
    ["function"],
    registry=REGISTRY,
    buckets=(0.001, 0.01, 0.1, 0.5, 1, 5, 20, 60, 300),
)
HEDGED = Counter(
    "rose_rewards_hedged_total",
    "Verifications that two workers were given because the first was late, by whose verdict it "
    "was: first, second or none.",
    ["function", "winner"],
    registry=REGISTRY,
)
QUEUE = Gauge("rose_rewards_queue", "Rewards that wait or run.", registry=REGISTRY)
BUSY = Gauge("rose_rewards_busy_workers", "Workers that verify now.", registry=REGISTRY)
ENDED = Counter(
    "rose_rewards_ended_workers_total",
    "Workers that ended before they had answered, stopped ones included.",
    ["function"],
    registry=REGISTRY,
)
WORKERS = Gauge(
    "rose_rewards_workers",
    "Verifications that linked workers may run at a time, by their team.",
    ["team"],
    registry=REGISTRY,
)
WISH = Gauge(
    "rose_rewards_wish",
    "Verifications at a time that are wished for of workers in pods, by team.",
    ["team"],
    registry=REGISTRY,
)


def expect(function: str) -> None:
    """Begin a function's series at 0: a first loss is then an increase, and no panel is empty."""
    for outcome in ("scored", "masked", "lost"):
        RESULTS.labels(function, outcome)
    for winner in ("first", "second", "none"):
        HEDGED.labels(function, winner)
    for metric in (CORRECT, SECONDS, ENDED):
        metric.labels(function)


@contextlib.contextmanager
def shown(wishes: Mapping[str, Callable[[], int]]) -> Iterator[None]:
    """Show what each team's wish is whenever somebody looks, KEDA or not, until the block ends."""
    for team, wish in wishes.items():
        WISH.labels(team).set_function(wish)
    try:
        yield
    finally:
        for team in wishes:
            with contextlib.suppress(KeyError):  # of two gateways in one process the first is gone
                WISH.remove(team)
