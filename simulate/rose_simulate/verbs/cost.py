"""``rose cost FILE``: what an accepted trajectory cost; on the terminal, as HTML and as JSON.

| FILE | from |
|---|---|
| a simulator's result | ``rose simulate`` writes it; every regime becomes a statement |
| leases as JSON | ``kubectl get rolloutleases,servingpools -A -o json``; the trainer adds to it |

With pools in the file the bill is whole: a pool's statement has the memory that it kept back while
nobody borrowed, which is in no lease's. A simulation's has both.

What trainers report of their trajectories stands in a lease's totals. Where none does,
``--accepted`` and ``--correct`` give the counts; without any costs per trajectory are *unknown*.
A late request costs what serving earns by one, where a pool of the file says what tokens earn
(``spec.revenue``) or ``--input-million`` and ``--output-million`` do; else what serving's GPUs
cost by the requests that they served. ``--violation`` counts before both. Memory kept back costs
its share of the GPU, unless ``--reserve`` says otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from rose_core.accounting.breakdown import money
from rose_core.accounting.cost import GIGABYTE, MICRO, Prices
from rose_core.accounting.late import LatePrice, ServedTraffic, TokenRevenue, late_price
from rose_core.accounting.leases import UNLENT, OutsideLeases, ledger_of, unlent_of
from rose_core.accounting.ledger import ServingImpact, allowed_hundredths, total
from rose_core.accounting.statement import CostStatement, statement
from rose_core.api.servingpool import Revenue
from rose_simulate.model.outcome import RunOutcome
from rose_simulate.model.run import ledger
from rose_simulate.model.scenarios.scenario import Regime
from rose_simulate.pages.statement_page import html, percent
from rose_simulate.runs.study import Result
from rose_wire.flags import VerbParser

_PERCENTILE = "leases: of the pool's SLO, for the share of its error budget"
_VIOLATION = (
    "price of an added violation; by default what serving earns by a request, or what its GPUs "
    "cost by the requests they served"
)
_MILLION = "what serving earns by a million tokens of {}; for leases before what their pools say"
_RESERVE = (
    "price of all of a GPU's memory, kept back from serving for an hour; by default that of a "
    "dedicated GPU-hour, so that memory costs its share of the GPU"
)
_HOUR_MS = 3_600_000


class CostError(Exception):
    """Nothing follows from the file; says where and why."""


def parser() -> argparse.ArgumentParser:
    """Arguments of the verb."""
    made = VerbParser(prog="rose cost", description=__doc__.split("\n\n", 1)[0])
    add = made.add_argument
    add("file", type=Path, help="a simulator's result, or leases as JSON")
    add("--dedicated-hour", type=float, default=1.0, help="price of a dedicated GPU-hour")
    add("--lent-hour", type=float, default=0.0, help="price of a lent GPU-hour")
    add("--violation", type=float, help=_VIOLATION)
    add("--input-million", type=float, help=_MILLION.format("prompts"))
    add("--output-million", type=float, help=_MILLION.format("answers"))
    add("--reserve", type=float, help=_RESERVE)
    add("--gigabyte", type=float, default=0.0, help="price of a gigabyte of weights")
    add("--dedicated-gpu-hours", type=float, default=0.0, help="leases: held beside them")
    add("--accepted", type=int, default=0, help="leases: trajectories the trainer accepted")
    add("--correct", type=int, default=0, help="leases: correct answers among them")
    add("--percentile", type=int, choices=range(50, 100), metavar="50..99", help=_PERCENTILE)
    add("--json", type=Path, help="write the statements there")
    add("--html", type=Path, help="write a page with plots there")
    return made


def read(path: Path, options: argparse.Namespace) -> list[CostStatement]:
    """The statements of a file.

    Raises:
        CostError: it is neither a result nor leases.
    """
    reserve = options.dedicated_hour if options.reserve is None else options.reserve
    prices = Prices(
        *(
            round(price * MICRO)
            for price in (
                options.dedicated_hour,
                options.lent_hour,
                options.violation or 0.0,
                options.gigabyte,
                reserve,
            )
        )
    )
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise CostError(f"{path}: cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        message = f"{path}:{error.lineno}: no JSON, or cut off: {error.msg}"
        raise CostError(message) from error
    if isinstance(content, dict) and "outcomes" in content:
        return _of_result(path, content, prices, options)
    if isinstance(content, list):
        parts = [one for one in content if isinstance(one, dict) and "rows" in one]
        if parts:
            return [found for one in parts for found in _of_result(path, one, prices, options)]
    if isinstance(content, dict) and ("items" in content or content.get("kind") == "RolloutLease"):
        return _of_leases(path, content, prices, options)
    message = f"{path}: is neither a result of rose simulate nor RolloutLeases as JSON"
    raise CostError(message)


def _of_result(
    path: Path, content: dict[str, Any], prices: Prices, options: argparse.Namespace
) -> list[CostStatement]:
    try:
        result = msgspec.convert(content, Result)
    except msgspec.ValidationError as error:
        message = f"{path}: is no result of this version of rose simulate: {error}"
        raise CostError(message) from error
    found: list[CostStatement] = []
    for derate, slowdown in dict.fromkeys((row.derate, row.slowdown) for row in result.rows):
        runs = {
            row.regime: [
                one
                for one in result.outcomes
                if (one.regime, one.derate, one.slowdown) == (row.regime, derate, slowdown)
            ]
            for row in result.rows
            if (row.derate, row.slowdown) == (derate, slowdown)
        }
        sums = {regime: total(map(ledger, ran)) for regime, ran in runs.items()}
        base = sums.get(Regime.FIXED.value)
        for regime, used in sums.items():
            silent = any(one.unlent_reserved_ms is None for one in runs[regime])
            if silent and used.reserved_milliseconds and prices.reserve_hour:
                message = (
                    f"{path}: {regime}: says nothing of memory kept back while nobody borrowed; "
                    "run it anew, or say --reserve 0"
                )
                raise CostError(message)
            name = f"{result.scenario}, {regime}, derate {derate:g}, x{slowdown:g}"
            alone = None if regime == Regime.FIXED.value else base
            hours = sum(one.serving_gpu_ms for one in runs[regime]) / _HOUR_MS
            served = _served(runs[regime], hours)
            if _asks_tokens(options) and served.with_tokens < served.requests:
                message = (
                    f"{path}: {name}: says nothing of tokens, by which a late request is to be "
                    "priced; run it anew, or say --violation"
                )
                raise CostError(message)
            late = _late(prices, served, options, None)
            if late.micros is None and used.serving.added_violations:
                message = (
                    f"{path}: {name}: says nothing of serving's GPUs, by which a late request is "
                    "priced; run it anew, or say --violation"
                )
                raise CostError(message)
            asked = replace(prices, violation=late.whole)
            found.append(statement(name, used, asked, alone, late_source=late.source))
    return found


def _served(runs: Sequence[RunOutcome], gpu_hours: float) -> ServedTraffic:
    """What serving had in these runs."""
    services = [service for one in runs for service in one.services]
    return ServedTraffic(
        sum(one.requests for one in services),
        gpu_hours,
        sum(one.input_tokens for one in services),
        sum(one.output_tokens for one in services),
        sum(one.requests for one in services if one.input_tokens + one.output_tokens),
    )


def _asks_tokens(options: argparse.Namespace) -> bool:
    """Whether a late request is to be priced by what tokens earn, as the flags say."""
    said = options.input_million is not None or options.output_million is not None
    return said and options.violation is None


def _late(
    prices: Prices,
    served: ServedTraffic,
    options: argparse.Namespace,
    revenue: TokenRevenue | None,
) -> LatePrice:
    """The price of a late request; ``revenue`` is what its pool says."""
    read, written = options.input_million, options.output_million
    if read is not None or written is not None:
        revenue = TokenRevenue(round((read or 0.0) * MICRO), round((written or 0.0) * MICRO))
    asked = None if options.violation is None else prices.violation
    return late_price(served, prices.dedicated_hour, revenue, asked)


def _of_leases(
    path: Path, content: dict[str, Any], prices: Prices, options: argparse.Namespace
) -> list[CostStatement]:
    items = content.get("items", [content])
    revenues = _revenues(path, items)
    found = []
    for index, item in enumerate(items):
        try:
            name = f"{item['metadata']['namespace']}/{item['metadata']['name']}"
            if item.get("kind") == "ServingPool":
                found.append(_of_pool(name, item, prices))
                continue
            totals = item["status"]["totals"]
            lent = int(totals.get("lentMilliseconds", 0))
            opened = int(totals.get("openMilliseconds", lent))  # not said: all of it
            tokens = int(totals.get("harvestedTokens", 0))
            moved = int(totals.get("weightBytes", 0))
            kept_back = int(totals.get("reservedMilliseconds", 0))
            served, slow, read, written, with_tokens = (
                int(totals.get(name, 0))
                for name in (
                    "servingRequests",
                    "sloViolations",
                    "servingInputTokens",
                    "servingOutputTokens",
                    "servingRequestsWithTokens",
                )
            )
            kept, right = (
                int(totals.get(k, 0)) for k in ("acceptedTrajectories", "correctAnswers")
            )
        except (KeyError, TypeError, ValueError) as error:
            message = f"{path}: items[{index}]: no RolloutLease with status.totals ({error})"
            raise CostError(message) from error
        beside = OutsideLeases(
            round(options.dedicated_gpu_hours * _HOUR_MS),
            options.accepted or kept,
            options.correct or right,
        )
        slo = options.percentile
        allowed = 0 if slo is None else allowed_hundredths(served, slo)
        serving = ServingImpact(served, slow, allowed)
        used = ledger_of(
            lent,
            opened,
            tokens,
            beside,
            serving=serving,
            weight_bytes=moved,
            reserved_ms=kept_back,
        )
        late = _late(
            prices,
            ServedTraffic(served, used.borrowed.held_hours, read, written, with_tokens),
            options,
            _revenue(item, revenues),
        )
        asked = replace(prices, violation=late.whole)
        found.append(statement(name, used, asked, late_source=late.source))
    return found


def _revenues(path: Path, items: Sequence[Any]) -> dict[str, TokenRevenue]:
    """What the pools among these say that tokens earn, by namespace and name."""
    found = {}
    for index, item in enumerate(items):
        try:
            if item.get("kind") != "ServingPool" or not item.get("spec", {}).get("revenue"):
                continue
            said = Revenue.model_validate(item["spec"]["revenue"])
            found[f"{item['metadata']['namespace']}/{item['metadata']['name']}"] = said.of_tokens
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            message = f"{path}: items[{index}]: no ServingPool whose revenue can be read ({error})"
            raise CostError(message) from error
    return found


def _revenue(lease: dict[str, Any], revenues: Mapping[str, TokenRevenue]) -> TokenRevenue | None:
    """What the lease's pools say alike; None where one says nothing, or they differ."""
    spec = lease.get("spec", {})
    pools = [spec.get("poolRef", {}), *spec.get("poolRefs", [])]
    said = {revenues.get(f"{one.get('namespace')}/{one.get('name')}") for one in pools}
    return said.pop() if len(said) == 1 else None


def _of_pool(name: str, item: dict[str, Any], prices: Prices) -> CostStatement:
    """What no lease of the pool is charged."""
    totals = item.get("status", {}).get("totals", {})
    unlent = unlent_of(int(totals.get("unlentReservedMilliseconds", 0)))
    return statement(f"{name} ({UNLENT})", unlent, prices)


def show(found: Sequence[CostStatement]) -> str:
    """Render statements as text, one a line."""
    width = max((len(one.name) for one in found), default=0)
    head = (
        f"{'':<{width}}  dedicated h  borrowed h  duty     tokens       weights GB  violations  "
        "SLO budget  accepted  cost/accepted  cost/correct  saved    break-even  a late one  "
        "memory      not lent    opportunity  a late one is priced by"
    )
    return "\n".join([head, *(_line(one, width) for one in found)]) + "\n"


def _line(one: CostStatement, width: int) -> str:
    used = one.ledger
    return (
        f"{one.name:<{width}}  {one.dedicated_hours:>11.2f}  {one.borrowed_hours:>10.2f}  "
        f"{percent(used.borrowed.duty):<7}  {used.tokens.produced:<11}  "
        f"{used.weight_bytes / GIGABYTE:<10.4g}  {used.serving.added_violations:<10}  "
        f"{percent(used.serving.budget_used):<10}  {used.trajectories.accepted:<8}  "
        f"{money(one.per_accepted):<13}  {money(one.per_correct):<12}  {percent(one.saved):<7}  "
        f"{money(one.break_even):<10}  {money(one.violation):<10}  "
        f"{money(one.cost.reserve):<10}  {money(one.cost.unlent_reserve):<10}  "
        f"{money(one.opportunity):<11}  {one.late_source}"
    )


def main(argv: list[str]) -> int:
    """Run the verb."""
    options = parser().parse_args(argv)
    try:
        found = read(options.file, options)
    except CostError as error:
        sys.stderr.write(f"rose cost: {error}\n")
        return 1
    sys.stdout.write(show(found))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    if options.html:
        options.html.write_text(html(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
