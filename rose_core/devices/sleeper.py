"""A serving engine that gives its memory away for a while, and the switch that brings it back.

Lending a whole replica means that serving's own engine sleeps. Nothing may keep it asleep but a
grant that is renewed: whatever dies, the grant lapses and serving comes back.

| stage | seen | next | order |
|---|---|---|---|
| Awake | granted, idle, its answer to a probe known, no refusal lately | Falling | Release |
| Falling | as much memory free as was asked for | Asleep | |
| Falling | refused: nothing was released | Waking, with the reason | |
| Falling | not free in ``effect_s`` | Recalled, with the reason | |
| Falling, Asleep | grant lapsed | Recalled | |
| Recalled | borrowers gone, or ``vacate_s`` passed | Waking | Resume |
| Waking | answers the probe as before | Awake | |
| Waking | ``repeat_s`` since the last resume | Waking | Resume |
| Waking | ``wake_s`` passed | Broken | Restart |
| Broken | answers the probe as before | Awake | |
| Broken | ``restart_s`` since the last restart | Broken | Restart |

A second resume can end an SGLang that needs none, so the probe is asked first and the repetition
waits; an SGLang that ends is restarted by its kubelet, which also brings serving back, and staying
asleep would not. Pure. Next step: ``rose_agent.sleeper.sleeper`` carries the orders out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class SleepStage(StrEnum):
    """Where serving stands; see the table."""

    AWAKE = "Awake"
    FALLING = "Falling"
    ASLEEP = "Asleep"
    RECALLED = "Recalled"
    WAKING = "Waking"
    BROKEN = "Broken"


class SleeperOrder(StrEnum):
    """What to do to the serving engine now."""

    NONE = "None"
    RELEASE = "Release"
    RESUME = "Resume"
    RESTART = "Restart"


@dataclass(frozen=True)
class SleeperLimits:
    """Times in seconds; ``least_bytes`` is what must become free."""

    least_bytes: int
    effect_s: float = 10.0
    vacate_s: float = 15.0
    repeat_s: float = 10.0
    wake_s: float = 60.0
    restart_s: float = 120.0
    rest_s: float = 600.0


@dataclass(frozen=True)
class SleeperSeen:
    """What is known now; None = unknown.

    Attributes:
        granted: the grant has not lapsed.
        idle: serving has no request, running or waiting.
        reference: what serving answers to the probe when it is well is known.
        refused: the engine refused to release, and why; empty = it did not.
        released_bytes: memory that has become free since the release was ordered.
        vacated: no rollout engine holds the GPUs.
        well: it answers the probe as it did before it slept.
    """

    granted: bool
    idle: bool | None = None
    reference: bool = False
    refused: str = ""
    released_bytes: int | None = None
    vacated: bool | None = None
    well: bool | None = None


@dataclass(frozen=True)
class Sleeper:
    """State of one serving engine.

    Attributes:
        since_s: when the stage was entered, seconds of the machine's monotonic clock.
        ordered_s: when the last resume or restart was ordered.
        refusal: why the last release failed: ``NothingReleased``, ``MemoryUnknown``, or what the
            engine said.
        refused_s: when.
    """

    stage: SleepStage = SleepStage.AWAKE
    since_s: float = 0.0
    ordered_s: float = 0.0
    refusal: str = ""
    refused_s: float = 0.0

    @property
    def lendable(self) -> bool:
        """Borrowers may use the memory."""
        return self.stage is SleepStage.ASLEEP


Step = tuple[Sleeper, SleeperOrder]


def resting(state: Sleeper, limits: SleeperLimits, now_s: float) -> bool:
    """A release failed lately: serving is left alone."""
    return bool(state.refusal) and now_s - state.refused_s < limits.rest_s


def unknown(now_s: float) -> Sleeper:
    """Nothing is remembered: serving counts as asleep until it answers its probe."""
    return Sleeper(SleepStage.WAKING, since_s=now_s, ordered_s=now_s)


def decide(state: Sleeper, seen: SleeperSeen, limits: SleeperLimits, now_s: float) -> Step:
    """Next stage and order."""
    return _RULES[state.stage](state, seen, limits, now_s)


def _awake(state: Sleeper, seen: SleeperSeen, limits: SleeperLimits, now_s: float) -> Step:
    ready = seen.granted and seen.idle and seen.reference
    if not ready or resting(state, limits, now_s):
        return state, SleeperOrder.NONE
    return _ordered(replace(state, refusal=""), SleepStage.FALLING, SleeperOrder.RELEASE, now_s)


def _asleep(state: Sleeper, seen: SleeperSeen, _limits: SleeperLimits, now_s: float) -> Step:
    return (state, SleeperOrder.NONE) if seen.granted else _to(state, SleepStage.RECALLED, now_s)


def _recalled(state: Sleeper, seen: SleeperSeen, limits: SleeperLimits, now_s: float) -> Step:
    if seen.vacated or now_s - state.since_s >= limits.vacate_s:
        return _ordered(state, SleepStage.WAKING, SleeperOrder.RESUME, now_s)
    return state, SleeperOrder.NONE


def _falling(state: Sleeper, seen: SleeperSeen, limits: SleeperLimits, now_s: float) -> Step:
    if not seen.granted:
        return _to(state, SleepStage.RECALLED, now_s)
    if seen.refused:
        # Asked first: a resume of what was never released ends an SGLang.
        state = replace(state, refusal=seen.refused, refused_s=now_s, ordered_s=now_s)
        return _to(state, SleepStage.WAKING, now_s)
    if seen.released_bytes is not None and seen.released_bytes >= limits.least_bytes:
        return _to(state, SleepStage.ASLEEP, now_s)
    if now_s - state.since_s < limits.effect_s:
        return state, SleeperOrder.NONE
    refusal = "MemoryUnknown" if seen.released_bytes is None else "NothingReleased"
    return _to(replace(state, refusal=refusal, refused_s=now_s), SleepStage.RECALLED, now_s)


def _waking(state: Sleeper, seen: SleeperSeen, limits: SleeperLimits, now_s: float) -> Step:
    """Waking or Broken."""
    if seen.well:
        return _to(state, SleepStage.AWAKE, now_s)
    waited = now_s - state.ordered_s
    if state.stage is SleepStage.WAKING:
        if now_s - state.since_s >= limits.wake_s:
            return _ordered(state, SleepStage.BROKEN, SleeperOrder.RESTART, now_s)
        again = waited >= limits.repeat_s
        return (
            (replace(state, ordered_s=now_s), SleeperOrder.RESUME)
            if again
            else (state, SleeperOrder.NONE)
        )
    again = waited >= limits.restart_s
    return (
        (replace(state, ordered_s=now_s), SleeperOrder.RESTART)
        if again
        else (state, SleeperOrder.NONE)
    )


def _to(state: Sleeper, stage: SleepStage, now_s: float) -> Step:
    return replace(state, stage=stage, since_s=now_s), SleeperOrder.NONE


def _ordered(state: Sleeper, stage: SleepStage, order: SleeperOrder, now_s: float) -> Step:
    return replace(state, stage=stage, since_s=now_s, ordered_s=now_s), order


_RULES = {
    SleepStage.AWAKE: _awake,
    SleepStage.FALLING: _falling,
    SleepStage.ASLEEP: _asleep,
    SleepStage.RECALLED: _recalled,
    SleepStage.WAKING: _waking,
    SleepStage.BROKEN: _waking,
}
