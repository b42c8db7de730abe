"""``rose advise --telemetry FILE``: what a pool could lend, at which risk, and a first pool.

Reads what ``advice.telemetry`` describes: CSV or JSON rows, or an answer of Prometheus.
Prints the options with intervals, what is not known, and the ServingPool; touches nothing.
``rose advise memory`` answers for the GPUs' memory (``advise_memory``).
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Any, TypedDict

import msgspec
import yaml

from rose_simulate.advice.errors import AdviceError, TelemetryError
from rose_simulate.advice.estimate import Assumed, EstimateInterval, LendingEstimate, estimate
from rose_simulate.advice.recommend import Advice, Goal, recommend
from rose_simulate.advice.telemetry import BUSY, RUNNING, LoadTelemetry, from_prometheus, from_rows
from rose_wire.flags import VerbParser, amount, count, share

PERCENTS = (10, 25, 50, 75, 100)
_PERCENTILE = "percent of requests that must meet it"
_WIDTH = 100


class _Indents(TypedDict):
    initial_indent: str
    subsequent_indent: str


def parser() -> argparse.ArgumentParser:
    """Arguments of the verb."""
    made = VerbParser(prog="rose advise", description=__doc__)
    add = made.add_argument
    add("--telemetry", type=Path, required=True, help="CSV, JSON rows, or a range query's answer")
    add("--meaning", choices=[RUNNING, BUSY], default="", help="of a metric whose name is silent")
    add("--name", default="serving", help="of the ServingPool")
    add("--namespace", default="default", help="of the ServingPool")
    add(
        "--label",
        type=_label,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of the serving pods; without one app=NAME is assumed",
    )
    add("--ttft", type=count, default=0, help="SLO: time to first token, milliseconds")
    add("--tpot", type=count, default=0, help="SLO: time per output token, milliseconds")
    percents, stop = range(50, 100), "p99 from arrival to rollouts that stand still"
    add("--percentile", type=int, choices=percents, metavar="50..99", default=99, help=_PERCENTILE)
    add("--gpus", type=int, choices=range(1, 9), metavar="1..8", default=1, help="of one replica")
    add("--stop-ms", type=amount, default=75.0, help=stop)
    add("--budget-share", type=share, default=0.1, help="of the error budget lending may use")
    add("--json", type=Path, help="write everything there")
    add("--pool", type=Path, help="write the ServingPool there")
    return made


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is no KEY=VALUE")
    return key, value


def read(path: Path, meaning: str = "") -> LoadTelemetry:
    """Read a file of telemetry.

    Raises:
        TelemetryError: it cannot be read or is none; the message names the place.
        TooLittle: it holds too few samples.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path}: cannot be read: {error}"
        raise TelemetryError(message) from error
    if not text.strip():
        raise TelemetryError(f"{path}: is empty")
    if text.lstrip()[0] not in "{[":
        return from_rows(_csv(text, path), str(path))
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        message = f"{path}:{error.lineno}: no JSON, or cut off: {error.msg}"
        raise TelemetryError(message) from error
    if isinstance(content, dict):
        return from_prometheus(content, str(path), meaning)
    rows = ((number, _row(one, path, number)) for number, one in enumerate(content, start=1))
    return from_rows(rows, str(path))


def _csv(text: str, path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    if not text.endswith("\n"):
        raise TelemetryError(f"{path}: truncated: the last line has no end")
    reader = csv.DictReader(io.StringIO(text))
    missing = {"t_s", "replica"} - set(reader.fieldnames or ())
    if missing:
        message = (
            f"{path}:1: no column {', '.join(sorted(missing))}; "
            f"columns are t_s, replica, {RUNNING} or {BUSY}, and optionally requests, slow, "
            "ttft_p99_ms"
        )
        raise TelemetryError(message)
    return enumerate(reader, start=2)


def _row(one: object, path: Path, number: int) -> dict[str, str]:
    if not isinstance(one, dict):
        raise TelemetryError(f"{path}: row {number} is no object")
    return {str(key): str(value) for key, value in one.items() if value is not None}


def show(found: LendingEstimate, advice: Advice) -> str:
    """Both as text."""
    lines = [
        f"{found.replicas} replicas, {found.span_s / 3600:.1f} h recorded, "
        f"idle {_percent(found.idle)}",
        "",
        "replicas lent  GPU-hours a day [95 %]     "
        "requests that stop a rollout [95 %]  newly above the SLO",
    ]
    for one in found.options:
        hours = one.gpu_hours
        risk = "not known" if one.at_risk is None else f"~ {one.at_risk.high:.4%}"
        lines.append(
            f"{f'{one.percent} % = {one.lent}':<14} "
            f"{f'{hours.value:.1f} [{hours.low:.1f}, {hours.high:.1f}]':<26} "
            f"{_percent(one.exposed):<36} {risk}"
        )
    notes = (fill(text, _WIDTH, **_under("- ", "  ")) for text in found.caveats)
    reasons = (fill(text, _WIDTH, **_under("# ", "# ")) for text in advice.reasons)
    lines += ["", "What the telemetry does not say:", *notes] if found.caveats else []
    lines += ["", "# To begin with (--pool FILE writes it):", *reasons, _yaml(advice.pool)]
    return "\n".join(lines)


def _under(first: str, then: str) -> _Indents:
    return {"initial_indent": first, "subsequent_indent": then}


def _percent(interval: EstimateInterval) -> str:
    return f"{interval.value:.1%} [{interval.low:.1%}, {interval.high:.1%}]"


def _yaml(pool: dict[str, Any]) -> str:
    return yaml.safe_dump(pool, sort_keys=False)


def _labels(options: argparse.Namespace) -> dict[str, str]:
    return dict(options.label) or {"app": options.name}


def main(argv: list[str]) -> int:
    """Run the verb."""
    options = parser().parse_args(argv)
    try:
        telemetry = read(options.telemetry, options.meaning)
        assumed = Assumed(options.gpus, options.stop_ms / 1e3, ttft_ms=options.ttft)
        found = estimate(telemetry, assumed, PERCENTS)
    except AdviceError as error:
        sys.stderr.write(f"rose advise: {error}\n")
        return 1
    goal = Goal(
        options.namespace,
        options.name,
        _labels(options),
        options.ttft,
        options.tpot,
        options.percentile,
        options.budget_share,
    )
    advice = recommend(found, goal)
    sys.stdout.write(show(found, advice))
    if options.pool:
        options.pool.write_text(_yaml(advice.pool))
    if options.json:
        content = {"estimate": found, "pool": advice.pool, "reasons": advice.reasons}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
