"""What the demo records while it runs; everything after that is a pure function of these.

Times are seconds of one monotonic clock, counted from the start of the measurement.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from rose_demo.spans import SpanRecord


class Role(StrEnum):
    """Why a serving replica is there."""

    LENT = "lent"
    CONTROL = "control"


class Window(StrEnum):
    """What the guard allowed on the lent replica when a request came."""

    LENT = "lent"
    WITHHELD = "withheld"


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request of live traffic, measured at the client.

    Attributes:
        number: which arrival of the plan; a replica gets each one twice, in a lent and in a
            withheld window, and only then can they be compared.
        late_s: how much later than planned it was sent; a generator that lags measures itself.
        ttft_s: from the first byte sent to the first token received.
        tpot_s: mean time per token after the first; None where too few tokens or reads are left
            (``load``).
        error: why it failed, else empty.
    """

    role: Role
    at_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    end_s: float = 0.0
    late_s: float = 0.0
    error: str = ""
    number: int = -1


class ClassFigures(msgspec.Struct, frozen=True):
    """What the engines of one device class have done, as the router counts and measures it.

    Attributes:
        read: prompt tokens that no cache had.
        written: output tokens.
        turns: begun there; one that moves counts at each.
        step_s, prefill_s: per output token and per prompt token; None until measured.
    """

    read: int
    written: int
    turns: int
    step_s: float | None = None
    prefill_s: float | None = None


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One look at ROSE's own figures; ``None`` means unknown, never zero.

    Attributes:
        gate_open: whether rollouts may compute beside the lent replica.
        withheld: the guard is in a crossover window in which it lends nothing.
        borrowed_tokens, dedicated_tokens: totals of output tokens by kind of engine.
        borrowed_turns, dedicated_turns: totals of finished turns by kind of engine.
        undelivered_tokens: of turns whose caller had hung up.
        open_s: total time the gate has been open, from the guard's own counter.
        versions: attested version by engine; before the first publish its own checkpoint.
        lag: most publishes an attached engine is behind the head.
        classes: by device class; engines of unknown class are in none.
    """

    at_s: float
    gate_open: bool | None = None
    withheld: bool | None = None
    borrowed_tokens: int | None = None
    dedicated_tokens: int | None = None
    borrowed_turns: int | None = None
    dedicated_turns: int | None = None
    redone_tokens: int | None = None
    undelivered_tokens: int | None = None
    refused: int | None = None
    open_s: float | None = None
    versions: dict[str, str] = {}
    lag: int | None = None
    queued: int | None = None
    classes: dict[str, ClassFigures] = {}


class Agents(msgspec.Struct, frozen=True, omit_defaults=True):
    """Agents with a shell task, whose sandbox host was killed in mid-run.

    Attributes:
        skipped: why there were none on this machine; empty: there were.
        turns: that all of them had.
        restored: the turn from which each went on after the kill.
        verified: how many were looked at in the end and differed in nothing.
        failed: who did not end as an undisturbed agent does, and in what.
        stopped: what kept the demo from looking at all of them; empty: nothing.
        seconds: that it took.
        saved: boundaries by what was saved.
        written_bytes: that records needed.
        state_bytes: that they stand for, as if each had been saved in full.
        saving_s: time that boundaries took.
        held_s: of it, time that replies were held for.
    """

    skipped: str = ""
    agents: int = 0
    turns: int = 0
    restored: tuple[int, ...] = ()
    verified: int = 0
    failed: tuple[str, ...] = ()
    stopped: str = ""
    seconds: float = 0.0
    saved: dict[str, int] = {}
    written_bytes: int = 0
    state_bytes: int = 0
    saving_s: float = 0.0
    held_s: float = 0.0


class Settings(msgspec.Struct, frozen=True):
    """What the run was asked to do, as far as the report needs it."""

    seconds: float
    ttft_slo_s: float
    tpot_slo_s: float
    percentile: int
    window_s: float
    trace: str
    serving_model: str
    rollout_model: str
    rollout_engine: str = "sglang"


class Recording(msgspec.Struct, frozen=True):
    """A whole run.

    Attributes:
        gate: intervals in which the gate was open, from the guard's flight recorder; empty when it
            could not be read, then the samples speak.
        stops_s: from a live request's first segment until every rollout thread stood still.
        inclusion: the router's bias meter at the end, ``GET /trajectories``; empty when it did not
            answer.
        training: records of the trainer's progress file, in order.
        trajectory: spans of the trajectory that shows most, as the router exported them; empty when
            none came.
        story: what ``kubectl get servpool,rlease,rslot`` said during the run.
        agents: with a shell task; None: a run of before there were any.
        before_s: that the first sample was taken before the measurement began, although it stands
            at 0: totals of tokens and of the gate's time grow from there.
        notes: facts of the machine and the versions, name -> value.
    """

    settings: Settings
    requests: tuple[Request, ...] = ()
    samples: tuple[Sample, ...] = ()
    gate: tuple[tuple[float, float], ...] = ()
    stops_s: tuple[float, ...] = ()
    training: tuple[dict[str, object], ...] = ()
    inclusion: dict[str, Any] = {}
    trajectory: tuple[SpanRecord, ...] = ()
    story: str = ""
    agents: Agents | None = None
    before_s: float = 0.0
    notes: dict[str, str] = {}
