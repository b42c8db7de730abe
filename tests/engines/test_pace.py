"""Staging beside busy serving: a share of a core, all of it as soon as the permit opens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rose_core.identity import WeightVersion
from rose_dev.engine_testing import State, write_bundle
from rose_engines.node import pace
from rose_engines.node.pace import LONGEST_SECONDS, SHARE, Pace, rest_of
from rose_engines.tensors.canonical import host_tensors
from rose_engines.weights.calls import Stage, Staged
from rose_engines.weights.session import WeightSession


@dataclass
class Core:
    """Time on a core and beside it."""

    worked: float = 0.0
    slept: list[float] = field(default_factory=list)
    opens_after: float = 1e9

    def busy(self) -> bool:
        return sum(self.slept) < self.opens_after

    def made(self) -> Pace:
        return Pace(self.busy, lambda: self.worked, self.slept.append)


def test_work_takes_its_share_of_a_core() -> None:
    core = Core()
    made = core.made()
    for _ in range(20):
        core.worked += 0.04
        made.rest()
    assert core.worked / (core.worked + sum(core.slept)) == pytest.approx(SHARE, abs=0.02)


def test_nothing_rests_while_the_permit_is_open() -> None:
    core = Core(opens_after=0)
    made = core.made()
    core.worked += 1.0
    made.rest()
    assert core.slept == []


def test_a_rest_ends_when_the_permit_opens() -> None:
    core = Core(opens_after=0.1)
    made = core.made()
    core.worked += 1.0
    made.rest()
    assert sum(core.slept) == pytest.approx(0.1, abs=0.03)


def test_no_piece_of_work_makes_a_rest_longer_than_the_limit() -> None:
    assert rest_of(60.0) == LONGEST_SECONDS
    assert rest_of(-1.0) == 0


def test_staging_rests_after_every_piece_while_the_permit_is_closed(
    old: State, sparse: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests = []
    monkeypatch.setattr(pace.Pace, "rest", lambda made: rests.append(made._busy()))
    versions = [WeightVersion("run", 1, number) for number in range(2)]
    manifest = write_bundle(tmp_path / "b", versions[1], sparse, (versions[0], old))
    session = WeightSession(host_tensors(old), str(versions[0]))
    for permit in (False, True, None):
        rests.clear()
        session.permit_open = lambda permit=permit: permit  # type: ignore[misc]
        assert isinstance(session.handle(Stage(str(tmp_path / "b"))), Staged)
        touched = {block.tensor for block in manifest.blocks}
        # Blocks are decoded tensor by tensor; what is in host memory is then resolved as a whole.
        assert rests == [permit is False] * (len(touched) + 1)
