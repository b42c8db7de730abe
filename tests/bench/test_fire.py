"""What ``make fire`` makes of turns that its own kills have hit twice."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import pytest

from bench.fire.callers import Callers, Suspected, raise_if_suspected
from bench.fire.engines import Engine, start_stub
from bench.fire.fleet import Lease
from rose_core.wire.routing import EngineKind


def lease(**kills: list[float]) -> Lease:
    nothing = cast("Any", None)
    made = Lease("fire/left", "", 0, "word", 0, nothing, nothing, nothing)
    for name, at in kills.items():
        engine = Engine(name, EngineKind.BORROWED, Path(), start_stub, made.run, cap=1, kills=at)
        made.engines.append(engine)
    return made


def refusal(engines: str, *, failed: bool = True) -> Suspected:
    message = f"engines {engines} ended while this turn ran on them, at the last one alone; it ..."
    with pytest.raises(Suspected) as caught:
        raise_if_suspected("EndsEngines", message, failed=failed)
    return caught.value


@pytest.mark.parametrize(
    ("engines", "own"),
    [("a, b", True), ("b, a, b", True), ("a, a", False), ("a, c", False), ("c, c", False)],
)
def test_a_refusal_is_right_where_each_death_was_a_kill_of_this_run(
    engines: str, *, own: bool
) -> None:
    burning = lease(a=[10.0, 100.0], b=[101.0, 102.0], c=[10.0])
    callers = Callers(burning, random.Random(1), 1)
    callers._judge(refusal(engines), since=100.5)
    assert callers.outcome.failed == 1
    assert callers.outcome.ended["refused after two kills"] == own
    assert len(callers.outcome.wrong) == (not own)


def test_a_refusal_that_names_no_engine_is_a_complaint() -> None:
    callers = Callers(lease(a=[1.0, 1.0]), random.Random(1), 1)
    with pytest.raises(Suspected) as caught:
        raise_if_suspected("EndsEngines", "no more", failed=False)
    callers._judge(caught.value, since=0.0)
    assert callers.outcome.wrong
    assert not callers.outcome.failed


def test_another_refusal_is_none_of_these() -> None:
    raise_if_suspected("UnsafeTurn", "engines a, b ended while this turn ran on them", failed=True)
