"""What to do next for one slot's weights: a pure decision.

| engine and head                                   | what to do                              |
|---------------------------------------------------|-----------------------------------------|
| engine does not answer                            | wait                                    |
| engine says its weights are broken                | wait; the engine host restarts it       |
| none published, own checkpoint not attested       | attest: it is version 0                 |
| no head known otherwise                           | wait                                    |
| last attempt failed a moment ago                  | wait for the back-off                   |
| label and digest are the head's, attested lately  | wait                                    |
| label and digest are the head's, not attested     | attest: recompute on the live weights   |
| anything else                                     | pull: plan, fetch, stage, commit        |

A pull names the digest the engine holds, so the store sends the shortest way from there. After
``DENSE_AFTER`` failures in a row, or at once when the live weights are not what they should be
(quarantine), it names none and gets the full state. None is published when the store says so; a
store that is silent says nothing. Next step: ``follower`` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from rose_core.delta.codec import SELF_CONTAINED
from rose_core.identity import BASE_LABEL, WeightVersion, published

# Failures in a row after which the full state is asked for.
DENSE_AFTER = 3
_LONGEST_PAUSE_SECONDS = 30.0
# The gate was closed, or another commit was under way: no sign that the bundle is bad.
SOFT_REASONS = frozenset({"Busy", "Aborted"})
# Weights that are not what the manifests say, or do not compute what they should: not to be used.
QUARANTINE_REASONS = frozenset({"WrongDigest", "WrongAnswers"})


class SyncAction(StrEnum):
    """What to do now."""

    WAIT = "Wait"
    ATTEST = "Attest"
    PULL = "Pull"


@dataclass(frozen=True)
class Engine:
    """What the plugin says about the live weights.

    Attributes:
        label: version label of replies; ``base`` before the first commit.
        digest: of the live weights as last computed.
        broken: an undo failed; nothing may be computed with these weights.
        codecs: block codecs that the engine can read.
    """

    label: str
    digest: str
    broken: bool = False
    codecs: tuple[int, ...] = SELF_CONTAINED


@dataclass(frozen=True)
class Head:
    """Newest version of the run."""

    version: WeightVersion
    digest: str


@dataclass(frozen=True)
class Progress:
    """What has been tried on this engine process.

    Attributes:
        attested_at: when the live weights were last recomputed and found right, None = not yet.
        failures: attempts in a row that failed.
        retry_at: no attempt before that time.
        dense: ask for the full state.
        quarantined: the live weights are wrong; nothing may be served.
        reason: closed word of the last failure, ``error`` its text.
    """

    attested_at: float | None = None
    failures: int = 0
    retry_at: float = 0.0
    dense: bool = False
    quarantined: bool = False
    reason: str = ""
    error: str = ""


@dataclass(frozen=True)
class Step:
    """A decision.

    Attributes:
        have, digest: what a pull names; empty digest = the full state.
        wait_seconds: for ``WAIT``, look again then at the latest.
        error: why nothing can be done, for ``weights.json``.
    """

    action: SyncAction
    have: WeightVersion | None = None
    digest: str = ""
    wait_seconds: float = 1.0
    error: str = ""


def name_of(engine: Engine, run: str) -> str:
    """The label under which others know what is live; empty when it is not known.

    Args:
        engine: its plugin's report.
        run: that it follows.
    """
    if engine.label != BASE_LABEL:
        return engine.label
    try:
        return str(WeightVersion.of_base(run, engine.digest))
    except ValueError:  # no digest yet, or one that is none
        return ""


def decide(
    engine: Engine | None,
    head: Head | None,
    progress: Progress,
    now: float,
    attest_every_seconds: float = 0.0,
    *,
    none_published: bool = False,
) -> Step:
    """One row of the module's table.

    Args:
        engine: None while it does not answer.
        head: None while the run has none, as far as is known.
        progress: what has been tried on this process.
        now: monotonic seconds.
        attest_every_seconds: recompute the live digest that often, 0 = only once per process.
        none_published: the store says that the run has no version.
    """
    if engine is None or engine.broken or now < progress.retry_at:
        return _wait(engine, progress, now)
    if head is None:
        usable = none_published and engine.label == BASE_LABEL and engine.digest
        if not usable or progress.quarantined:
            return _wait(engine, progress, now)
        return _attested(progress, now, attest_every_seconds)
    arrived = engine.label == str(head.version) and engine.digest == head.digest
    if not arrived or progress.quarantined:
        digest = "" if progress.dense or progress.quarantined else engine.digest
        return Step(SyncAction.PULL, published(engine.label), digest)
    return _attested(progress, now, attest_every_seconds)


def _attested(progress: Progress, now: float, attest_every_seconds: float) -> Step:
    """The live weights are those wanted: attest them once, and again when it is time."""
    if progress.attested_at is None:
        return Step(SyncAction.ATTEST)
    due = progress.attested_at + attest_every_seconds
    if attest_every_seconds and now >= due:
        return Step(SyncAction.ATTEST)
    return Step(SyncAction.WAIT, wait_seconds=max(0.1, due - now) if attest_every_seconds else 60.0)


def _wait(engine: Engine | None, progress: Progress, now: float) -> Step:
    """Nothing can be done now; says why where people can do something about it."""
    error = "the engine does not answer yet" if engine is None else ""
    if engine is not None and engine.broken:
        error = "the engine's weights are broken; the engine host restarts it"
    left = progress.retry_at - now
    return Step(SyncAction.WAIT, wait_seconds=left if left > 0 else 1.0, error=error)


def succeeded(now: float) -> Progress:
    """The live weights were found to be what a manifest says."""
    return Progress(attested_at=now)


def failed(progress: Progress, reason: str, error: str, now: float) -> Progress:
    """An attempt failed.

    Args:
        progress: so far.
        reason: closed word (``CommitRefused.reason``, or the exception's name).
        error: text for people.
        now: monotonic seconds.
    """
    if reason in SOFT_REASONS:
        return replace(progress, reason=reason, error=error, retry_at=now + 0.2)
    failures = progress.failures + 1
    wrong = reason in QUARANTINE_REASONS
    return replace(
        progress,
        failures=failures,
        retry_at=now + min(_LONGEST_PAUSE_SECONDS, 0.5 * 2.0 ** (failures - 1)),
        dense=progress.dense or wrong or failures >= DENSE_AFTER,
        quarantined=progress.quarantined or wrong,
        attested_at=None if wrong else progress.attested_at,
        reason=reason,
        error=error,
    )


def lag(served: str, head: Head | None) -> int | None:
    """Publishes between what is served and the head; None = unknown."""
    version = published(served)
    if head is None or version is None or version.run != head.version.run:
        return None
    if version.incarnation != head.version.incarnation:
        return None
    return head.version.sequence - version.sequence
