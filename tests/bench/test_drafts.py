"""Acceptance of drafts, read from a router's counters."""

from __future__ import annotations

from prometheus_client import generate_latest

from bench.drafts import Counts, counts_of, figures
from rose_router import metrics


def test_the_counters_of_a_router_are_read() -> None:
    before = counts_of(generate_latest(metrics.REGISTRY).decode())
    metrics.DRAFTS.labels("steps").inc(4)
    metrics.DRAFTS.labels("accepted").inc(6)
    metrics.DRAFT_CORPORA.labels("sent").inc()
    after = counts_of(generate_latest(metrics.REGISTRY).decode())
    assert after.since(before) == Counts(4, 6, 1, 0)
    assert after.since(before).per_step == 2.5


def test_figures_are_of_the_whole_run_and_of_its_thirds() -> None:
    found = [Counts(), Counts(10, 0), Counts(20, 10), Counts(30, 40)]
    values = {one.name: one.value for one in figures(found)}
    assert values["tokens a step, all"] == 1 + 40 / 30
    assert values["tokens a step, first third"] == 1
    assert values["tokens a step, second third"] == 2
    assert values["tokens a step, last third"] == 4
    assert values["steps that verified drafts"] == 30


def test_a_third_without_steps_says_nothing() -> None:
    found = [Counts(), Counts(), Counts(), Counts(steps=100, accepted=50, sent=2)]
    listed = {one.name: one.value for one in figures(found)}
    assert listed["tokens a step, all"] == 1.5
    assert "tokens a step, first third" not in listed
    assert listed["tokens a step, last third"] == 1.5
    assert listed["corpora that the engine took"] == 2
    assert not any(one.name.startswith("tokens a step") for one in figures([Counts()]))
