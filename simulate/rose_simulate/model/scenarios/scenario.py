"""What a simulation is told: services, jobs, links, failures. One YAML file, read by the shell.

``docs/scenario.md`` is made of these classes, with what their docstrings say of each field.
``possible.impossible`` refuses what no field is wrong in, but what cannot exist.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rose_core.rollouts.placement.selection import Policy

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=4096)]


class Regime(StrEnum):
    """Who decides when rollouts may compute, and how turns are placed."""

    FIXED = "fixed"
    FIXED_LADDER = "fixed-ladder"
    FULL_MEMORY = "full-memory"
    UNGUARDED = "unguarded"
    STATIC_SPLIT = "static-split"
    ON_OFF = "on-off"
    WHOLE_REPLICA = "whole-replica"
    SPOT = "spot"
    POLLED = "polled"
    ROSE_PAPER = "rose-paper"
    ROSE_PAPER_DEDICATED = "rose-paper-dedicated"
    ROSE_PAPER_TAP = "rose-paper-tap"
    ROSE_PAPER_KEEP = "rose-paper-keep"
    ROSE_PAPER_OLDEST = "rose-paper-oldest"
    ROSE_PAPER_QUEUE = "rose-paper-queue"
    OURS_LADDER = "ours-ladder"
    OURS_HELD = "ours-held"
    OURS_KEPT = "ours-kept"
    OURS_NODE = "ours-node"
    OURS_GAIN = "ours-gain"
    OURS = "ours"
    CLAIRVOYANT = "clairvoyant"


USUAL = (Regime.FIXED, Regime.ROSE_PAPER, Regime.ROSE_PAPER_DEDICATED, Regime.OURS)


class Strict(BaseModel):
    """Unknown fields are errors; nothing changes once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Load(Strict):
    """Load of a service: a replayed trace, or bursts.

    Attributes:
        trace: CSV of arrivals (``t_s,in_tokens,out_tokens``), played in a loop; a path relative to
            the scenario's folder.
        requests_per_s: over all replicas; the trace is thinned or overlaid to this mean.
        shape: CSV of a slow trend (``t_s,req_per_s``) that the trace's rate follows; for fleets.
        prompt_spread: of a trace: each request's prompt is its row's times a factor drawn by seed,
            evenly from one less to one more than this share. A trace that is played in a loop has
            the same longest prompts in each lap, and a tail that hangs on few rows.
        offset_s: where in the trace it begins; without a trace, when the first burst comes.
        sessions: in place of a trace: requests are turns of the scenario's episodes, each with all
            of its session before it, ``requests_per_s`` of them on average. The pool keeps the
            keys of sessions while it has room, and a session's turns go where they are.
        burst_every_s: from one burst to the next, in place of a trace.
        burst_size: requests of a burst over all replicas, all within a second.
        burst_prompt: tokens of a prompt, from half to one and a half of it.
        burst_output: tokens of an answer, likewise.
    """

    trace: str = ""
    requests_per_s: Positive | None = None
    shape: str = ""
    prompt_spread: Annotated[float, Field(ge=0, lt=1)] = 0.0
    offset_s: Annotated[float, Field(ge=0)] = 0.0
    sessions: bool = False
    burst_every_s: Positive | None = None
    burst_size: Annotated[int, Field(ge=0)] = 0
    burst_prompt: Annotated[int, Field(ge=1)] = 1500
    burst_output: Annotated[int, Field(ge=1)] = 100


class Service(Strict):
    """One serving deployment: what serves, what it is asked, and what may be lent of it.

    Attributes:
        name: of the service; jobs borrow by it.
        model: Qwen2.5-7B, 14B or 32B, or Qwen3-8B, 14B or 32B, whose costs were measured.
        device: H100 or H200.
        replicas: of the service.
        gpus_per_replica: tensor parallelism.
        ttft_ms: SLO: time to the first token.
        tpot_ms: SLO: time per output token after the first.
        percentile: share of the requests that must keep both, percent.
        load: what it is asked.
        max_replicas_percent: most replicas that are lent at once, percent.
        min_unlent_replicas: replicas that are never lent.
        serving_memory_share: of the GPU's memory, for the serving engine.
        rollout_memory_share: for the rollout engine beside it.
    """

    name: Annotated[str, Field(min_length=1)]
    model: str
    device: str
    replicas: Count
    gpus_per_replica: Annotated[int, Field(ge=1, le=8)] = 1
    ttft_ms: Positive
    tpot_ms: Positive
    percentile: Annotated[int, Field(ge=50, le=99)] = 99
    load: Load
    max_replicas_percent: Annotated[int, Field(ge=0, le=100)] = 100
    min_unlent_replicas: Annotated[int, Field(ge=0)] = 0
    serving_memory_share: Annotated[float, Field(gt=0, le=1)] = 0.35
    rollout_memory_share: Annotated[float, Field(ge=0, le=1)] = 0.5


class RolloutJob(Strict):
    """One RL job: engines of its own, what it borrows, and how its trainer goes on.

    Attributes:
        name: of the job.
        model: Qwen2.5-7B, 14B or 32B, or Qwen3-8B, 14B or 32B, whose costs were measured.
        device: of the dedicated engines; a borrowed one has its lender's.
        dedicated: engines of its own.
        borrowed: most replicas that it borrows at once.
        borrows_from: the service that lends.
        gpus_per_engine: tensor parallelism; as many as the lender's ``gpus_per_replica``.
        trainer_gpus: GPUs that the trainer holds; they cost what dedicated ones cost.
        group: trajectories of one prompt.
        batch_groups: groups that one training step takes.
        staleness: publishes that a trajectory may lag behind when it is trained on; 0 =
            synchronous steps.
        train_s: how long a training step takes; then it publishes.
        cap: most trajectories on a borrowed engine, less where its KV pool holds fewer of
            12,000 tokens.
        dedicated_cap: the same on an engine of its own.
        gap_scale: environment gaps of the episodes times this; they are a coding agent's, whose
            tools take seconds; a game answers at once.
        surplus: tail batching (``rollouts.training.rounds``): prompts that a short round starts
        beyond its
            batch, as a share of it; None = off.
        member_surplus: with ``surplus``: trajectories that a short round starts beyond ``group``
            for each prompt, as a share of it; it keeps the first ``group`` of them.
        streams: with ``surplus``: the trainer adds a group's gradients as soon as the group is
            ready, ``train_s / batch_groups`` for each, on the weights of the step; otherwise it
            begins when the round is over.
        reward_s: from a trajectory's last token to its reward; it ends with that. As many rewards
            as there are run at a time.
        late: with ``surplus``: groups whose rewards a round need not wait for; they are in the next
            round's batch, one version later than ``staleness`` says. ``learned`` = as many as
            the trainer's rounds learn (``rose_core.rollouts.training.lateness``).
        oldest_first: the trainer takes the oldest groups and waits for those whose last chance it
            is (``rollouts.training.consumption``); otherwise those that finished first.
        awaits_weights: new groups begin when the dedicated engines have what was published
            (``dedicated_s`` of the link later); otherwise in the second of the publish, on weights
            of the version before, which favours production (study ``eager``).
        idle_seconds: how long its lease holds slots without a turn (``slots.idleSeconds``).
        draft_nodes: tokens that a step verifies for each trajectory (``drafts: Router`` of a
            lease); each costs what a token of a prompt does. 0 = a step gives one token.
        tokens_per_step: of a step that verifies drafts; it has to be measured on the task.
        widths: with ``surplus``: GPUs of an engine of its own that they may change to between two
            rounds, as many engines as the GPUs make (``model.jobs.widths``); empty = they stay
            as wide as ``gpus_per_engine``, which ``dedicated`` and ``dedicated_cap`` are of.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    model: str
    device: str = "H100"
    dedicated: Annotated[int, Field(ge=0, le=4096)]
    borrowed: Annotated[int, Field(ge=0, le=4096)]
    borrows_from: str = ""
    gpus_per_engine: Annotated[int, Field(ge=1, le=8)] = 1
    trainer_gpus: Annotated[int, Field(ge=0, le=4096)] = 0
    group: Count = 8
    batch_groups: Count = 8
    staleness: Annotated[int, Field(ge=0, le=64)] = 1
    train_s: Positive = 60.0
    cap: Count = 16
    dedicated_cap: Count = 32
    gap_scale: Annotated[float, Field(ge=0)] = 1.0
    surplus: Annotated[float, Field(ge=0, le=4)] | None = None
    member_surplus: Annotated[float, Field(ge=0, le=4)] = 0.0
    streams: bool = False
    reward_s: Annotated[float, Field(ge=0)] = 0.0
    late: Annotated[int, Field(ge=0)] | Literal["learned"] = 0
    oldest_first: bool = False
    awaits_weights: bool = False
    idle_seconds: Annotated[float, Field(ge=10, le=604_800)] = 90.0
    draft_nodes: Annotated[int, Field(ge=0, le=64)] = 0
    tokens_per_step: Annotated[float, Field(ge=1, le=64)] = 1.0
    widths: tuple[Annotated[int, Field(ge=1, le=8)], ...] = ()

    @model_validator(mode="after")
    def _late_ones_are_part_of_a_batch(self) -> Self:
        most = 0 if self.surplus is None else self.batch_groups
        if (self.late == "learned" and not most) or (self.late != "learned" and self.late > most):
            why = (
                "without surplus there are no rounds" if not most else f"a batch has {most} groups"
            )
            message = f"late: {self.late} must be at most {most}: {why}"
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _several_tokens_need_drafts(self) -> Self:
        if self.tokens_per_step > 1 and not self.draft_nodes:
            message = (
                f"tokens_per_step: {self.tokens_per_step:g} needs draft_nodes of 1 or more: "
                "without drafts a step gives one token"
            )
            raise ValueError(message)
        return self


class Link(Strict):
    """Path of the weights; transfers do not slow each other.

    Attributes:
        gbps: gigabits per second to each borrowed engine.
        delta_share: size of what a publish changes, as a share of the weights.
        apply_s: to stage, commit and attest it.
        dedicated_s: from a publish to dedicated engines that have it.
    """

    gbps: Positive = 20.0
    delta_share: Annotated[float, Field(gt=0, le=1)] = 0.06
    apply_s: Annotated[float, Field(ge=0)] = 1.0
    dedicated_s: Annotated[float, Field(ge=0)] = 2.0


class KvTier(Strict):
    """Where keys and values are kept beyond the engine that made them (``kept``).

    ``ours-kept`` has a pool that all engines of a job reach, ``ours-node`` a folder on each node.

    Attributes:
        gigabytes: of each job's tier.
        gbps: gigabits per second at which an engine gets them back, of the platform's network and
            store; engines measure it.
        setup_s: of a pull, before its first page; engines measure that, too.
        node_gigabytes: of each job's folder on a node.
        node_gbps: gigabits per second at which an engine reads it; the default is what one process
            does (``bench.keys``: 0.18 s/GB).
    """

    gigabytes: Positive = 1000.0
    gbps: Positive = 100.0
    setup_s: Annotated[float, Field(ge=0)] = 0.05
    node_gigabytes: Positive = 256.0
    node_gbps: Positive = 44.0


class Interference(Strict):
    """Modelled cost of co-running, as factors of time; see ``device``.

    Attributes:
        serving_slowdown: of serving while both compute.
        rollout_slowdown: of rollouts while both compute.
        rollout_alone: what a fixed share of the multiprocessors (MPS) costs rollouts while serving
            is idle; 1 under time slicing, where they have the whole GPU then.
    """

    serving_slowdown: Annotated[float, Field(ge=1)] = 2.0
    rollout_slowdown: Annotated[float, Field(ge=1)] = 2.0
    rollout_alone: Annotated[float, Field(ge=1)] = 1.0


class Placement(Strict):
    """Knobs of production's placement (``rollouts.placement.selection.Policy``); its own defaults.

    Attributes:
        pause_seconds: what a reclaim costs a turn beside its re-prefill.
        crowding_seconds: added for an engine that is full, in proportion below.
        move_margin: a session leaves home when it gains this share of the re-prefill on top.
        lent_weight: seconds of cost per second for which a lent GPU computes more, times what its
            guard has measured of serving's slowdown, less 1.
    """

    pause_seconds: Annotated[float, Field(ge=0)] = Policy().pause_seconds
    crowding_seconds: Annotated[float, Field(ge=0)] = Policy().crowding_seconds
    move_margin: Annotated[float, Field(ge=0)] = Policy().move_margin
    lent_weight: Annotated[float, Field(ge=0)] = Policy().lent_weight


class Nodes(Strict):
    """Machines. Replicas fill them in the scenario's order, then dedicated engines do.

    Attributes:
        gpus: of each.
        fail_every_s: mean time from one failure of a node to its next, drawn from an exponential
            distribution by seed and node, the same under every regime; None = ``failures`` alone.
        back_s: how long such a node is off, until its serving engines take requests again.
    """

    gpus: Annotated[int, Field(ge=1, le=64)] = 8
    fail_every_s: Positive | None = None
    back_s: Positive = 180.0


class Failure(Strict):
    """Something breaks.

    Attributes:
        kind: ``engine`` dies and is started anew, ``gone`` it never comes back, ``guard`` decides
            nothing for ``seconds``, the ``link`` of the weights is down for ``seconds``, a ``node``
            is off for ``seconds`` with everything on it.
        at_s: when, counted from the start of the warm-up.
        seconds: how long; not for engines.
        target: number of the replica, or of the node; the link has none.
        every_s: again and again, until the end.
    """

    kind: Literal["engine", "gone", "guard", "link", "node"]
    at_s: Annotated[float, Field(ge=0)]
    seconds: Annotated[float, Field(ge=0)] = 10.0
    target: Annotated[int, Field(ge=0)] = 0
    every_s: Positive | None = None


class Delays(Strict):
    """Delays of the control path, seconds.

    Attributes:
        tap_s: first segment of a request on the wire to the guard's decision.
        close_s: that decision to a permit that an engine finds closed when it next looks. What it
            has launched by then runs to its end.
        freeze_s: that decision to an engine whose every thread stands.
        open_s: decision to an engine that computes again.
        poll_s: period of a polled source, in regimes without the tap.
        start_s: an engine's start until it serves.
    """

    tap_s: Annotated[float, Field(ge=0)] = 0.001
    close_s: Annotated[float, Field(ge=0)] = 0.0002
    freeze_s: Annotated[float, Field(ge=0)] = 0.005
    open_s: Annotated[float, Field(ge=0)] = 0.010
    poll_s: Positive = 0.050
    start_s: Annotated[float, Field(ge=0)] = 45.0


class Contexts(Strict):
    """What the recorded episodes' contexts, of more than 100,000 tokens, are brought to.

    Attributes:
        first: tokens of the first prompt.
        most: an episode ends before its context is longer.
    """

    first: Annotated[int, Field(ge=1, le=32_000)] = 6000
    most: Annotated[int, Field(ge=100, le=32_000)] = 32_000


class Scenario(Strict):
    """A whole scenario; counted are the ``seconds`` after ``warmup_s``.

    Attributes:
        name: of the scenario and its result; the studies want the file's.
        seconds: that are counted.
        warmup_s: simulated before, and not counted.
        derate: share of the kernels' speed that engines reach from 32 sequences on.
        seeds: of requests and episodes; regimes are compared in pairs of equal seeds.
        regimes: who decides (``docs/simulator.md`` has the list).
        episodes: CSV of rollout episodes, relative to the scenario's folder.
        contexts: how long they are.
        services: what serves.
        jobs: what borrows.
        link: how weights travel.
        kv_tier: where one regime keeps keys and values.
        interference: what co-running costs.
        prefill_attention: prefill pays for attention to what is before it too (``costs``), as
            published speeds of long prompts show that it does.
        delays: of the control path.
        placement: knobs of it.
        nodes: which machines there are, and how they fail.
        failures: what breaks, and when.
    """

    name: Annotated[str, Field(min_length=1)]
    seconds: Annotated[float, Field(gt=0, le=1_209_600)]
    warmup_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    derate: Annotated[float, Field(gt=0, le=1)] = 0.5
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (1, 2, 3)
    regimes: Annotated[tuple[Regime, ...], Field(min_length=1)] = USUAL
    episodes: str
    contexts: Contexts = Contexts()
    services: Annotated[tuple[Service, ...], Field(min_length=1)]
    jobs: Annotated[tuple[RolloutJob, ...], Field(min_length=1)]
    link: Link = Link()
    kv_tier: KvTier = KvTier()
    interference: Interference = Interference()
    prefill_attention: bool = True
    delays: Delays = Delays()
    placement: Placement = Placement()
    nodes: Nodes = Nodes()
    failures: tuple[Failure, ...] = ()
