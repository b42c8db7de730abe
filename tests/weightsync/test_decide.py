"""The table of ``decide``, row by row, and what failures lead to."""

from __future__ import annotations

import pytest

from rose_agent.weightsync.decide import (
    DENSE_AFTER,
    Engine,
    Head,
    Progress,
    Step,
    SyncAction,
    decide,
    failed,
    lag,
    name_of,
    succeeded,
)
from rose_core.identity import WeightVersion

OLD, NEW = WeightVersion("run", 1, 1), WeightVersion("run", 1, 2)
HEAD = Head(NEW, "new")
AT_HEAD = Engine(str(NEW), "new")
BEHIND = Engine(str(OLD), "old")


@pytest.mark.parametrize(
    ("engine", "head", "progress", "action"),
    [
        (None, HEAD, Progress(), SyncAction.WAIT),
        (Engine(str(OLD), "old", broken=True), HEAD, Progress(), SyncAction.WAIT),
        (BEHIND, None, Progress(), SyncAction.WAIT),
        (BEHIND, HEAD, Progress(retry_at=101), SyncAction.WAIT),
        (AT_HEAD, HEAD, Progress(attested_at=90), SyncAction.WAIT),
        (AT_HEAD, HEAD, Progress(), SyncAction.ATTEST),
        (AT_HEAD, HEAD, Progress(attested_at=30), SyncAction.ATTEST),
        (BEHIND, HEAD, Progress(attested_at=90), SyncAction.PULL),
        (Engine("base", "new"), HEAD, Progress(), SyncAction.PULL),
        (Engine(str(NEW), "other"), HEAD, Progress(attested_at=90), SyncAction.PULL),
        (AT_HEAD, HEAD, Progress(quarantined=True), SyncAction.PULL),
    ],
)
def test_every_row(
    engine: Engine | None, head: Head | None, progress: Progress, action: SyncAction
) -> None:
    assert decide(engine, head, progress, 100.0, attest_every_seconds=60.0).action is action


OWN = Engine("base", "d" * 32)


@pytest.mark.parametrize(
    ("engine", "none_published", "progress", "action"),
    [
        (OWN, True, Progress(), SyncAction.ATTEST),
        (OWN, True, Progress(attested_at=90), SyncAction.WAIT),
        (OWN, True, Progress(attested_at=30), SyncAction.ATTEST),
        (OWN, True, Progress(retry_at=101), SyncAction.WAIT),
        (OWN, True, Progress(quarantined=True), SyncAction.WAIT),
        (OWN, False, Progress(), SyncAction.WAIT),
        (Engine("base", ""), True, Progress(), SyncAction.WAIT),
        (Engine("base", "d" * 32, broken=True), True, Progress(), SyncAction.WAIT),
        (BEHIND, True, Progress(), SyncAction.WAIT),
    ],
)
def test_an_own_checkpoint_is_attested_when_the_store_says_that_there_is_nothing_else(
    engine: Engine, none_published: bool, progress: Progress, action: SyncAction
) -> None:
    step = decide(engine, None, progress, 100.0, 60.0, none_published=none_published)
    assert step.action is action


def test_a_head_is_pulled_whatever_the_store_said_before_it() -> None:
    step = decide(OWN, HEAD, Progress(attested_at=90), 100.0, none_published=True)
    assert step.action is SyncAction.PULL


def test_what_is_live_has_a_name_for_others() -> None:
    assert name_of(OWN, "run") == "run@base.dddddddddddd"
    assert name_of(AT_HEAD, "run") == str(NEW)


@pytest.mark.parametrize("digest", ["", "no digest", "d" * 11])
def test_a_checkpoint_without_a_digest_has_no_name(digest: str) -> None:
    assert name_of(Engine("base", digest), "run") == ""


def test_a_checkpoint_is_no_number_of_publishes_behind() -> None:
    assert lag(name_of(OWN, "grpo"), HEAD) is None


def test_a_pull_names_what_the_engine_holds() -> None:
    assert decide(BEHIND, HEAD, Progress(), 0.0) == Step(SyncAction.PULL, OLD, "old")
    base = decide(Engine("base", "d"), HEAD, Progress(), 0.0)
    assert (base.have, base.digest) == (None, "d")


def test_repeated_failures_ask_for_the_full_state_with_growing_pauses() -> None:
    progress, pauses = Progress(), []
    for _ in range(DENSE_AFTER):
        assert not progress.dense
        progress = failed(progress, "Damaged", "text", 0.0)
        pauses.append(progress.retry_at)
    assert progress.dense
    assert pauses == sorted(pauses)
    step = decide(BEHIND, HEAD, progress, 1000.0)
    assert (step.action, step.digest) == (SyncAction.PULL, "")


def test_pauses_are_bounded() -> None:
    progress = Progress()
    for _ in range(40):
        progress = failed(progress, "Damaged", "", 0.0)
    assert progress.retry_at == 30.0


def test_a_wrong_digest_quarantines_at_once_and_success_ends_it() -> None:
    progress = failed(Progress(attested_at=5.0), "WrongDigest", "text", 0.0)
    assert progress.quarantined
    assert progress.attested_at is None
    step = decide(AT_HEAD, HEAD, progress, 1000.0)
    assert (step.action, step.digest) == (SyncAction.PULL, "")
    assert not succeeded(1000.0).quarantined


def test_a_busy_engine_is_no_failure() -> None:
    progress = Progress(attested_at=5.0)
    for _ in range(10):
        progress = failed(progress, "Busy", "closed gate", 0.0)
    assert (progress.failures, progress.dense) == (0, False)


@pytest.mark.parametrize(
    ("served", "expected"),
    [("run@1.2", 0), ("run@1.0", 2), ("run@0.9", None), ("base", None), ("other@1.2", None)],
)
def test_lag_counts_publishes_or_is_unknown(served: str, expected: int | None) -> None:
    assert lag(served, HEAD) == expected
    assert lag(served, None) is None
