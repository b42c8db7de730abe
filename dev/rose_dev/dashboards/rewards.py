"""Rewards and batches: how rewards end, whether they wait for workers, and lines of batch files."""

from __future__ import annotations

from rose_dev.dashboards.model import (
    Dashboard,
    Panel,
    Row,
    high_is_bad,
    quantiles,
    rates,
    stat,
)

_ENDED = "sum(rate(rose_rewards_results_total{$here}[$rate]))"
_SCORED = 'rate(rose_rewards_results_total{outcome="scored", $here}[$rate])'


def _share(outcome: str) -> str:
    """Of the results, those that ended so; nothing where none ended."""
    ended = f'sum(rate(rose_rewards_results_total{{outcome="{outcome}", $here}}[$rate]))'
    return f"{ended} / ({_ENDED} > 0)"


DASHBOARD = Dashboard(
    name="rewards",
    title="ROSE / Rewards and batches",
    description="How rewards end, whether they wait for workers, and lines of batch files.",
    jobs=("rose_rewards_queue", "rose_batches_waiting_lines"),
    rows=(
        Row(
            "In short",
            (
                stat("Rewards per second", "Results of any outcome.", "short", _ENDED),
                stat(
                    "Correct",
                    "Of the scored answers, those found correct.",
                    "percentunit",
                    f"sum(rate(rose_rewards_correct_total{{$here}}[$rate])) / (sum({_SCORED}) > 0)",
                ),
                stat(
                    "Lost",
                    "Of the results, those that have none after every try; asked again they are "
                    "tried anew.",
                    "percentunit",
                    _share("lost"),
                    steps=high_is_bad(0.001, 0.01),
                ),
                stat(
                    "Masked",
                    "Of the results, those without a verdict or whose worker took too long; the "
                    "trajectory is left out.",
                    "percentunit",
                    _share("masked"),
                ),
                stat(
                    "Waiting or running",
                    "Rewards that were asked for and have no result yet, judges' too.",
                    "short",
                    "sum(rose_rewards_queue{$here})",
                ),
                stat(
                    "Lines of batches left",
                    "Lines that wait for their turn or are at a router.",
                    "short",
                    "sum(rose_batches_waiting_lines{$here}) "
                    "+ sum(rose_batches_running_lines{$here})",
                ),
            ),
        ),
        Row(
            "How rewards end",
            (
                Panel(
                    "Results",
                    "By function and outcome. None is a zero that nobody computed.",
                    "ops",
                    {
                        "sum by (function, outcome) "
                        "(rate(rose_rewards_results_total{$here}[$rate]))": (
                            "{{function}} {{outcome}}"
                        )
                    },
                ),
                Panel(
                    "Correct by function",
                    "Of the scored answers, those found correct.",
                    "percentunit",
                    {
                        "sum by (function) (rate(rose_rewards_correct_total{$here}[$rate])) "
                        f"/ (sum by (function) ({_SCORED}) > 0)": "{{function}}"
                    },
                ),
                Panel(
                    "Time of a verification",
                    "Without its wait for a worker.",
                    "s",
                    quantiles("rose_rewards_seconds", "function"),
                ),
                Panel(
                    "Second workers",
                    "Late verifications that decide their group and were given to a second worker, "
                    "by whose verdict it was.",
                    "ops",
                    rates("rose_rewards_hedged_total", "winner"),
                ),
            ),
        ),
        Row(
            "Workers",
            (
                Panel(
                    "Wished for, and there",
                    "Verifications at a time, by team; no team = functions of everybody. Wished "
                    "for above there for minutes: KEDA, the autoscaler or the pods do not follow.",
                    "short",
                    {
                        "sum by (team) (rose_rewards_wish{$here})": "{{team}} wished for",
                        "sum by (team) (rose_rewards_workers{$here})": "{{team}} there",
                    },
                ),
                Panel(
                    "Busy",
                    "Workers that verify now, and rewards that wait or run.",
                    "short",
                    {
                        "sum(rose_rewards_busy_workers{$here})": "busy",
                        "sum(rose_rewards_queue{$here})": "waiting or running",
                    },
                ),
                Panel(
                    "Workers that ended at work",
                    "Before they had answered, by function; those that a verdict of the other "
                    "worker stopped too. More than a few: memory, or the team's code.",
                    "ops",
                    rates("rose_rewards_ended_workers_total", "function"),
                    width=24,
                ),
            ),
        ),
        Row(
            "Batches",
            (
                Panel(
                    "Lines ended",
                    "Lines of batch files, by outcome.",
                    "ops",
                    rates("rose_batches_lines_total", "outcome"),
                ),
                Panel(
                    "Lines waiting, and at routers",
                    "Lines get an engine when no other turn waits for one.",
                    "short",
                    {
                        "sum(rose_batches_waiting_lines{$here})": "waiting",
                        "sum(rose_batches_running_lines{$here})": "at routers",
                    },
                ),
                Panel(
                    "Tries for a line",
                    "Requests sent to routers for each line that ended; above 1, some were sent "
                    "again because a router was away, full or without an engine.",
                    "short",
                    {
                        "sum(rate(rose_batches_tries_total{$here}[$rate])) "
                        "/ (sum(rate(rose_batches_lines_total{$here}[$rate])) > 0)": "tries"
                    },
                ),
                Panel(
                    "Batches ended",
                    "By status.",
                    "ops",
                    rates("rose_batches_ended_total", "status"),
                ),
                Panel(
                    "Files and answers",
                    "On the disk of each process.",
                    "bytes",
                    {"sum by (instance) (rose_batches_stored_bytes{$here})": "{{instance}}"},
                    width=24,
                ),
            ),
        ),
    ),
)
