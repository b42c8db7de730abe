"""Recordings with known answers, for statistics, verdicts, report and table."""

from __future__ import annotations

import random
from typing import Any

from rose_demo.records import Recording, Request, Role, Sample, Settings
from rose_demo.spans import SpanEvent, SpanRecord

SETTINGS = Settings(
    seconds=240.0,
    ttft_slo_s=0.8,
    tpot_slo_s=0.08,
    percentile=95,
    window_s=20.0,
    trace="azure2023_conv_600s.csv",
    serving_model="mid",
    rollout_model="tiny",
)


def samples(seconds: float = 240.0, window: float = 20.0) -> tuple[Sample, ...]:
    """Every 0.5 s; odd windows withheld; the gate is open two thirds of the lent time."""
    result, opened, borrowed = [], 0.0, 0
    for step in range(int(seconds * 2) + 1):
        at = step / 2
        withheld = int(at // window) % 2 == 1
        gate = not withheld and step % 3 != 0
        opened += 0.5 * gate
        borrowed += 120 * gate
        result.append(
            Sample(
                at_s=at,
                gate_open=gate,
                withheld=withheld,
                borrowed_tokens=borrowed,
                dedicated_tokens=150 * step,
                borrowed_turns=borrowed // 8,
                dedicated_turns=150 * step // 8,
                redone_tokens=0,
                undelivered_tokens=0,
                refused=0,
                open_s=opened,
                versions={"slot-1": f"grpo@1.{step // 4}", "dedicated-0": f"grpo@1.{step // 4}"},
                lag=step % 2,
                queued=0,
            )
        )
    return tuple(result)


def requests(harm: float = 1.0, machine: float = 1.0, seed: int = 3) -> tuple[Request, ...]:
    """Log-normal latencies; in lent windows times ``machine`` everywhere and ``harm`` on the lent.

    Args:
        harm: factor on the lent replica's latencies in lent windows.
        machine: factor on both replicas' latencies in lent windows.
    """
    source = random.Random(seed)
    rows = []
    for role, gap in ((Role.LENT, 0.8), (Role.CONTROL, 1.2)):
        at, number = 0.1, 0
        while at < 239.0:
            if int(at // 20.0) % 2 == 0 and at % 20.0 < 17.0:
                size = source.lognormvariate(0, 0.6)
                slow = machine * (harm if role is Role.LENT else 1.0)
                for start, factor in ((at, slow), (at + 20.0, 1.0)):
                    ttft, tpot = latencies(size, factor, source)
                    end = start + ttft + 24 * tpot
                    rows.append(Request(role, start, 200, 25, ttft, tpot, end, number=number))
                number += 1
            at += source.expovariate(1 / gap)
    return tuple(rows)


def latencies(size: float, slow: float, source: random.Random) -> tuple[float, float]:
    """TTFT and TPOT of one of a pair: the size is the pair's, the noise its own."""
    ttft = 0.07 * size * source.lognormvariate(0, 0.2) * slow
    return ttft, 0.012 * source.lognormvariate(0, 0.25) * slow


def interval(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.02, "high": mean + 0.02}


def training(tokens: int | None = None) -> tuple[dict[str, Any], ...]:
    """A run that learned; ``tokens`` is what the trainer says that it received."""
    rows: list[dict[str, Any]] = [{"event": "start", "seconds": 0.0}]
    for step in range(60):
        at, reward = 3.5 * step, 0.25 + 0.65 * min(step / 45, 1)
        rows.append(
            {
                "event": "publish",
                "seconds": at,
                "step": step,
                "version": f"grpo@1.{step}",
                "changed_share": 1.0 if step == 0 else 0.8,
                "bytes": 800_000,
            }
        )
        rows.append(
            {
                "event": "step",
                "seconds": at + 0.1,
                "step": step + 1,
                "reward": reward,
                "version": f"grpo@1.{step}",
                "lag": 1,
                "staleness_mean": 1.2,
                "trained": 32,
                "correct": round(32 * reward),
                "kept": 1000,
            }
        )
        if step % 6 == 0:
            rows.append(evaluation(at, reward))
    rows.append(evaluation(215.0, 0.9) | {"final": True})
    rows.append(mismatch())
    total = samples()[-1]
    counted = (total.borrowed_tokens or 0) + (total.dedicated_tokens or 0)
    rows.append(
        {
            "event": "end",
            "seconds": 216.0,
            "reason": "time limit",
            "tokens": counted if tokens is None else tokens,
            "dropped_groups": 2,
            "cut": 0,
        }
    )
    return tuple(rows)


def inclusion(
    gap: float = 0.0, control_groups: int = 15, *, biased: bool = False
) -> dict[str, Any]:
    """The router's bias meter."""
    arms = {"any": 280, "dedicated": control_groups}
    row = {arm: {"groups": groups, "lost": 0, "value": 1.0} for arm, groups in arms.items()}
    interval = {"value": gap, "low": gap - 0.1, "high": gap + 0.1}
    strata = (("all", "all"), ("length", "<1k"))
    rows = [{"dimension": one, "stratum": other} for one, other in strata]
    return {"inclusion": [row | which | {"gap": interval, "biased": biased} for which in rows]}


def mismatch(k3: float = 2e-5) -> dict[str, Any]:
    figures = {"tokens": 9000, "invalid": 0, "k1": 0.0, "k3": k3, "largest": 0.02, "clipped": 0.0}
    return {"event": "mismatch", "seconds": 215.0, **figures}


def evaluation(at: float, trained: float) -> dict[str, Any]:
    return {
        "event": "evaluation",
        "seconds": at,
        "tasks": 64,
        "trained": trained,
        "frozen": 0.25,
        "shuffled": 0.252,
        "rise": interval(trained - 0.25),
        "control_rise": interval(0.002),
        "learned": trained - 0.27 > 0,
        "control_flat": True,
    }


def trajectory() -> tuple[SpanRecord, ...]:
    """Two turns, as a router exports them: the first leaves a borrowed engine at a closed gate."""
    name = {"rl.trajectory.id": "task-7/3"}
    spans = [
        SpanRecord(
            *("t", "root", "rl.sample", 30.0, 41.0, ""),
            {
                **name,
                "rl.trajectory.turns": 2,
                "gen_ai.usage.output_tokens": 61,
                "rl.trajectory.outcome": "trained",
            },
        ),
        SpanRecord("t", "r", "rl.reward", 55.0, 55.0, "root", {**name, "rl.reward.value": 1.0}),
    ]
    for number, (began, ended, tokens) in enumerate(((30.0, 36.5, 40), (37.0, 41.0, 21)), 1):
        output = {
            **name,
            "rl.turn.number": number,
            "rose.queue_seconds": 0.6,
            "gen_ai.usage.output_tokens": tokens,
            "gen_ai.response.finish_reasons": ["stop"],
        }
        moved = (
            SpanEvent("rose.move", 33.0, {"rose.move.reason": "paused", "rose.move.at_token": 18}),
            SpanEvent("rl.sync", 34.8, {"rl.policy.version": "grpo@1.4"}),
        )
        events = moved if number == 1 else ()
        turn = f"turn{number}"
        spans.append(
            SpanRecord("t", turn, "text_completion tiny", began, ended, "root", output, events)
        )
    legs = (
        ("turn1", 1, "slot-1", "Borrowed", 30.6, 33.0, 18),
        ("turn1", 2, "dedicated-0", "Dedicated", 33.2, 36.5, 22),
        ("turn2", 1, "dedicated-0", "Dedicated", 37.6, 41.0, 21),
    )
    for turn, number, engine, kind, began, ended, tokens in legs:
        output = {
            "rose.engine.name": engine,
            "rose.engine.kind": kind,
            "rose.leg.number": number,
            "rl.policy.version": "grpo@1.3",
            "gen_ai.usage.output_tokens": tokens,
        }
        leg = f"{turn}.{number}"
        spans.append(SpanRecord("t", leg, f"generate {engine}", began, ended, turn, output))
    return tuple(spans)


def recording(**changes: object) -> Recording:
    """A run in which every promise was kept, with fields replaced."""
    fields: dict[str, Any] = {
        "settings": SETTINGS,
        "requests": requests(),
        "samples": samples(),
        "training": training(),
        "inclusion": inclusion(),
        "trajectory": trajectory(),
        "before_s": 60.0,
        "story": "NAMESPACE  NAME  MODE\nserving    chat  Lend",
        "notes": {"cores": "2"},
    }
    return Recording(**(fields | changes))
