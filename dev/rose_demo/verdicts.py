"""A verdict per promise, with the evidence: pure functions of a recording.

| verdict | means |
|---|---|
| KEPT | the evidence is there and supports the promise |
| BROKEN | the evidence contradicts it |
| UNPROVEN | too little was seen to say; never counted as kept |
| MEASURED | a figure without a limit; it decides nothing |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from rose_demo.records import Agents, Recording, Role, Window
from rose_demo.statistics import (
    LENT_WINDOWS,
    SAMPLE_FLOOR,
    WITHHELD_WINDOWS,
    Attainment,
    Comparison,
    Estimate,
    attainment,
    class_name,
    compare,
    growth,
    open_share,
    split,
    windows,
)

QUANTILES = (0.5, 0.9)
HARM_TOLERANCE = 1.10
"""Ratio of lent to withheld latency, beyond the control's, that is called harm when proven."""
MOST_HARM = 3.0
"""Upper end of an interval that still says something of harm: beyond it a threefold one is not
excluded. Its lower end says how much faster serving may have been, which harms nobody."""
MISMATCH_LIMIT = 1e-3
"""KL per token (k3) between engine and trainer at the same version: rounding of bfloat16 stays
below 1e-4, a wrong tensor or a stale key is far above."""
LEAST_GROUPS = 5
"""Groups that an arm of the bias meter needs before anything is said of it."""


class CheckResult(StrEnum):
    """Outcome of a promise or of one check."""

    KEPT = "KEPT"
    BROKEN = "BROKEN"
    UNPROVEN = "UNPROVEN"
    MEASURED = "MEASURED"


@dataclass(frozen=True)
class Check:
    """One piece of evidence."""

    result: CheckResult
    text: str


@dataclass(frozen=True)
class PromiseVerdict:
    """One promise and everything that speaks for or against it."""

    promise: str
    result: CheckResult
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Findings:
    """Everything computed from a recording; report, summary and exit code read only this."""

    comparisons: tuple[Comparison, ...]
    attainments: Mapping[str, Attainment]
    borrowed_tokens: int | None
    dedicated_tokens: int | None
    borrowed_turn_share: float | None
    open_share: float | None
    open_seconds: float | None
    verdicts: tuple[PromiseVerdict, ...]

    @property
    def exit_code(self) -> int:
        """0 when every promise was kept, else 1."""
        return int(any(verdict.result is not CheckResult.KEPT for verdict in self.verdicts))


def judge(recording: Recording) -> Findings:
    """Compute every figure and verdict of a recording."""
    settings = recording.settings
    spans = windows(recording.samples)
    lent = split(recording.requests, spans, Role.LENT)
    control = split(recording.requests, spans, Role.CONTROL)
    comparisons = tuple(
        compare(lent, control, latency, q) for latency in ("ttft", "tpot") for q in QUANTILES
    )
    classes = {
        class_name(role, kind): parts[kind]
        for role, parts in ((Role.LENT, lent), (Role.CONTROL, control))
        for kind in Window
    }
    attainments = {
        name: attainment(rows, settings.ttft_slo_s, settings.tpot_slo_s, settings.percentile)
        for name, rows in classes.items()
    }
    opened = growth(recording.samples, "open_s")
    return Findings(
        comparisons=comparisons,
        attainments=attainments,
        borrowed_tokens=_whole(growth(recording.samples, "borrowed_tokens")),
        dedicated_tokens=_whole(growth(recording.samples, "dedicated_tokens")),
        borrowed_turn_share=borrowed_share(recording),
        open_share=open_share(recording.samples),
        open_seconds=None if opened is None else float(opened),
        verdicts=(
            _verdict("Serving first", serving_checks(recording, comparisons, attainments)),
            _verdict("Exact and honest", honesty_checks(recording)),
            _verdict("Useful", usefulness_checks(recording)),
        ),
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _verdict(promise: str, checks: Sequence[Check]) -> PromiseVerdict:
    results = {check.result for check in checks}
    result = next(
        (w for w in (CheckResult.BROKEN, CheckResult.UNPROVEN) if w in results), CheckResult.KEPT
    )
    return PromiseVerdict(promise, result, tuple(checks))


def borrowed_share(recording: Recording) -> float | None:
    """Share of finished turns that borrowed engines took part in."""
    borrowed = growth(recording.samples, "borrowed_turns")
    dedicated = growth(recording.samples, "dedicated_turns")
    if borrowed is None or dedicated is None or borrowed + dedicated == 0:
        return None
    return float(borrowed / (borrowed + dedicated))


def serving_checks(
    recording: Recording,
    comparisons: Sequence[Comparison],
    attainments: Mapping[str, Attainment],
) -> list[Check]:
    """SLO in lent windows, harm beyond the control, and no failed request."""
    checks = [_slo_check(recording, attainments), *map(_harm_check, comparisons)]
    if recording.stops_s:
        stops = np.array(recording.stops_s) * 1e3
        text = (
            f"from a live request's first segment until every rollout thread stood still: "
            f"p50 {np.quantile(stops, 0.5):.1f} ms, p99 {np.quantile(stops, 0.99):.1f} ms "
            f"({len(stops)} stops)"
        )
        checks.append(Check(CheckResult.MEASURED, text))
    failed = [request for request in recording.requests if request.error]
    if recording.requests:
        result = CheckResult.BROKEN if failed else CheckResult.KEPT
        first = f"; first: {failed[0].error}" if failed else ""
        text = f"{len(failed)} of {len(recording.requests)} live requests failed{first}"
        checks.append(Check(result, text))
    return checks


def _slo_check(recording: Recording, attainments: Mapping[str, Attainment]) -> Check:
    settings = recording.settings
    lent = attainments[LENT_WINDOWS]
    alone = attainments[WITHHELD_WINDOWS]
    if lent.met is None or lent.count < SAMPLE_FLOOR:
        return Check(
            CheckResult.UNPROVEN, f"{lent.count} requests in lent windows, {SAMPLE_FLOOR} needed"
        )
    limit = settings.percentile / 100
    text = (
        f"SLO (TTFT {settings.ttft_slo_s * 1e3:.0f} ms, TPOT {settings.tpot_slo_s * 1e3:.0f} ms, "
        f"{settings.percentile} %): met by {lent.met:.1%} of {lent.count} requests in lent windows"
    )
    if alone.met is not None:
        text += f", by {alone.met:.1%} of {alone.count} in withheld windows"
    if lent.met >= limit:
        return Check(CheckResult.KEPT, text)
    if alone.met is not None and alone.met < limit:
        # Not lending's doing: the replica misses the SLO without rollouts as well.
        return Check(CheckResult.UNPROVEN, text + "; the replica misses it alone as well")
    return Check(CheckResult.BROKEN, text)


def _harm_check(comparison: Comparison) -> Check:
    """Harm is slower in lent windows *and* beyond the control: both are asked, one rule.

    | whose interval lies above the tolerance | word |
    |---|---|
    | both | BROKEN |
    | one of them | UNPROVEN |
    | neither, and one reaches beyond ``MOST_HARM`` | UNPROVEN |
    | neither | KEPT |
    """
    name = f"{comparison.latency.upper()} p{comparison.quantile * 100:.0f}"
    if comparison.ratio is None or comparison.excess is None:
        text = f"{name}: too few pairs for an interval ({comparison.pairs} of the lent replica)"
        return Check(CheckResult.UNPROVEN, text)
    text = (
        f"{name} of {comparison.pairs} pairs: lent / withheld {show(comparison.ratio)}, control "
        f"replica {show(comparison.control)}, beyond the control {show(comparison.excess)}"
    )
    ratio, excess = comparison.ratio, comparison.excess
    proven = [one.low > HARM_TOLERANCE for one in (ratio, excess)]
    if all(proven):
        return Check(CheckResult.BROKEN, text)
    if not any(proven):
        if any(one.high > MOST_HARM for one in (ratio, excess)):
            return Check(CheckResult.UNPROVEN, text + "; so wide an interval excludes no harm")
        return Check(CheckResult.KEPT, text)
    return Check(
        CheckResult.UNPROVEN, text + "; only one of the two shows it: too noisy to tell why"
    )


def show(value: Estimate | None) -> str:
    """An estimate with its interval."""
    return "unknown" if value is None else f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"


def of_event(training: Sequence[Mapping[str, Any]], event: str) -> list[Mapping[str, Any]]:
    """The trainer's records of one kind."""
    return [record for record in training if record.get("event") == event]


def honesty_checks(recording: Recording) -> list[Check]:
    """Every token accounted for, sampled by a published version, with the right log-prob."""
    return [
        _mismatch_check(recording.training),
        _token_check(recording),
        _inclusion_check(recording.inclusion),
        *_end_checks(recording.training),
        *_agents_checks(recording.agents),
    ]


def _agents_checks(agents: Agents | None) -> list[Check]:
    """Whether agents' worlds outlived their host; a machine without sandboxes decides nothing."""
    if agents is None:
        return []
    if agents.skipped:
        return [Check(CheckResult.MEASURED, f"agents with sandboxes: skipped: {agents.skipped}")]
    if agents.failed:
        return [Check(CheckResult.BROKEN, f"agents: {'; '.join(agents.failed)}")]
    if agents.stopped or agents.verified < agents.agents:
        text = f"{agents.verified} of {agents.agents} agents were looked at: {agents.stopped}"
        return [Check(CheckResult.UNPROVEN, text)]
    if len(agents.restored) < agents.agents:
        text = f"{len(agents.restored)} of {agents.agents} agents lost their sandbox host at all"
        return [Check(CheckResult.UNPROVEN, text)]
    text = (
        f"{agents.agents} of {agents.agents} agents ended as if their sandbox host had not been "
        "killed: files, a shell's variable, a job in the background, a service, the model's words"
    )
    return [Check(CheckResult.KEPT, text)]


def _mismatch_check(training: Sequence[Mapping[str, Any]]) -> Check:
    records = of_event(training, "mismatch")
    if not records:
        return Check(
            CheckResult.UNPROVEN, "no turn was recomputed under the version that sampled it"
        )
    last = records[-1]
    value, tokens = float(last["k3"]), int(last["tokens"])
    text = (
        f"engine against trainer, same version: KL {value:.1e} per token (limit {MISMATCH_LIMIT}), "
        f"largest difference of one log-prob {float(last['largest']):.3f}, over {tokens} tokens"
    )
    if not tokens:
        return Check(CheckResult.UNPROVEN, text)
    good = value <= MISMATCH_LIMIT and not last["invalid"]
    return Check(CheckResult.KEPT if good else CheckResult.BROKEN, text)


def _token_check(recording: Recording) -> Check:
    """Every token that the router counted is one that the trainer had, or one that is named."""
    ends = of_event(recording.training, "end")
    counts = [growth(recording.samples, f"{kind}_tokens") for kind in ("borrowed", "dedicated")]
    undelivered = growth(recording.samples, "undelivered_tokens")
    if not ends or "tokens" not in ends[-1] or None in counts or undelivered is None:
        return Check(CheckResult.UNPROVEN, "token counts of trainer or router are missing")
    received, counted = int(ends[-1]["tokens"]), int(sum(count or 0 for count in counts))
    cut, left = int(ends[-1].get("cut_tokens", 0)), int(undelivered)
    text = (
        f"router counted {counted} tokens; trainer received {received} in whole turns and {cut} in "
        f"cut ones, {left} were of turns in flight that it left at its end"
    )
    if counted == received + cut + left:
        return Check(CheckResult.KEPT, text)
    return Check(
        CheckResult.BROKEN, text + f": {counted - received - cut - left:+d} unaccounted for"
    )


def _inclusion_check(meter: Mapping[str, Any]) -> Check:
    """No stratum that is judged is trained on more or less often because it may borrow."""
    rows = {(row["dimension"], row["stratum"]): row for row in meter.get("inclusion", ())}
    whole = rows.get(("all", "all"))
    if whole is None:
        return Check(
            CheckResult.UNPROVEN, "the router's bias meter is empty: the trainer reported nothing"
        )
    groups = whole["any"]["groups"], whole["dedicated"]["groups"]
    gap, lost = whole["gap"], whole["any"]["lost"] + whole["dedicated"]["lost"]
    text = f"bias meter: {groups[0]} groups that may borrow, {groups[1]} on dedicated engines alone"
    if min(groups) < LEAST_GROUPS or gap["value"] is None:
        return Check(CheckResult.UNPROVEN, f"{text}; {LEAST_GROUPS} of each are needed")
    text += (
        f"; share trained on differs by {gap['value']:+.1%} [{gap['low']:+.1%}, {gap['high']:+.1%}]"
        f", {lost} trajectories without a report"
    )
    biased = [f"{one} {other}" for (one, other), row in rows.items() if row["biased"]]
    if biased:
        return Check(CheckResult.BROKEN, f"{text}; biased: {', '.join(biased)}")
    return Check(CheckResult.KEPT, text)


def _end_checks(training: Sequence[Mapping[str, Any]]) -> list[Check]:
    ends = of_event(training, "end")
    if not ends:
        return [Check(CheckResult.BROKEN, "the trainer did not end cleanly")]
    end = ends[-1]
    reason = str(end.get("reason", ""))
    good = reason in {"time limit", "stopped"}
    checks = [
        Check(CheckResult.KEPT if good else CheckResult.BROKEN, f"the trainer ended: {reason}")
    ]
    versions = len(of_event(training, "publish"))
    checks.append(
        Check(
            CheckResult.KEPT if versions > 1 else CheckResult.UNPROVEN,
            f"{versions} versions published; {end.get('dropped_groups', 0)} groups dropped as too "
            f"old or of unknown version, {end.get('cut', 0)} cut turns asked for again",
        )
    )
    return checks


def usefulness_checks(recording: Recording) -> list[Check]:
    """Tokens were harvested, turns were borrowed, and the trainer learned from them."""
    return [_harvest_check(recording), *_learning_checks(recording.training)]


def _harvest_check(recording: Recording) -> Check:
    tokens = growth(recording.samples, "borrowed_tokens")
    share = borrowed_share(recording)
    if tokens is None or share is None:
        return Check(CheckResult.UNPROVEN, "the router's counters were not seen")
    text = f"{int(tokens)} tokens harvested, {share:.1%} of turns borrowed"
    return Check(CheckResult.KEPT if tokens > 0 and share > 0 else CheckResult.BROKEN, text)


def _learning_checks(training: Sequence[Mapping[str, Any]]) -> list[Check]:
    evaluations = of_event(training, "evaluation")
    if not evaluations:
        return [Check(CheckResult.UNPROVEN, "the trainer was not evaluated")]
    last = evaluations[-1]
    rise, control = last["rise"], last["control_rise"]
    learned = (
        f"reward on {last['tasks']} fixed tasks {last['frozen']:.3f} -> {last['trained']:.3f}, "
        f"rise {rise['mean']:.3f} [{rise['low']:.3f}, {rise['high']:.3f}] over the frozen policy"
    )
    flat = (
        f"shuffled-advantage control {last['shuffled']:.3f}, "
        f"rise {control['mean']:.3f} [{control['low']:.3f}, {control['high']:.3f}]"
    )
    return [
        Check(CheckResult.KEPT if last["learned"] else CheckResult.BROKEN, learned),
        Check(CheckResult.KEPT if last["control_flat"] else CheckResult.BROKEN, flat),
    ]
