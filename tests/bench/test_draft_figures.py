"""What the benchmark of drafts says of a run in which parts verified nothing."""

from __future__ import annotations

from bench.drafts import Counts, figures


def test_a_third_without_steps_says_nothing() -> None:
    found = [Counts(), Counts(), Counts(), Counts(steps=100, accepted=50, sent=2)]
    told = {one.name: one.value for one in figures(found)}
    assert told["tokens a step, all"] == 1.5
    assert "tokens a step, first third" not in told
    assert told["tokens a step, last third"] == 1.5
    assert told["corpora that the engine took"] == 2
    assert not any(one.name.startswith("tokens a step") for one in figures([Counts()]))
