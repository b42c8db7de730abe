"""Statements as a page that stands alone, with plots: for ``rose cost`` and ``rose report`` alike.

Equal statements give equal pages. Next step: ``charts`` draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from rose_core.accounting.breakdown import CostBreakdown, money
from rose_core.accounting.breakdown import lines as statement_lines
from rose_core.accounting.cost import GIGABYTE, MICRO
from rose_core.accounting.statement import CostStatement
from rose_simulate.pages.charts import ChartLine, intervals, lines
from rose_simulate.pages.charts import ChartRow as Bar


def html(found: Sequence[CostStatement], parts: Mapping[str, CostBreakdown] | None = None) -> str:
    """As a page that stands alone.

    Args:
        found: what is told of.
        parts: by a statement's name, its bill taken apart.
    """
    priced = [one for one in found if one.per_accepted is not None]
    plots = ""
    if priced:
        bars = [Bar(one.name, (one.per_accepted or 0.0) / MICRO) for one in priced]
        plots += intervals("Cost per accepted trajectory", bars, unit="currency", reference=None)
        series = [
            ChartLine(
                one.name, [(share, (price or 0.0) / MICRO) for share, price in one.sensitivity]
            )
            for one in priced
        ]
        title = "Cost per accepted trajectory by the price of a lent hour"
        plots += lines(title, series[:6], x="lent hour / dedicated hour", y="currency")
    rows = "".join(
        f"<tr><td>{escape(one.name)}</td><td>{one.dedicated_hours:.2f}</td>"
        f"<td>{one.borrowed_hours:.2f}</td><td>{percent(one.ledger.borrowed.duty)}</td>"
        f"<td>{one.ledger.tokens.produced}</td>"
        f"<td>{one.ledger.weight_bytes / GIGABYTE:.4g}</td>"
        f"<td>{one.ledger.serving.added_violations} of {one.ledger.serving.requests}</td>"
        f"<td>{percent(one.ledger.serving.budget_used)}</td>"
        f"<td>{one.ledger.trajectories.accepted}</td><td>{money(one.per_accepted)}</td>"
        f"<td>{money(one.per_correct)}</td><td>{percent(one.saved)}</td>"
        f"<td>{money(one.break_even)}</td>"
        f"<td>{money(one.cost.reserve)}</td><td>{money(one.cost.unlent_reserve)}</td>"
        f"<td>{money(one.opportunity)}</td>"
        f"<td>{money(one.violation)}</td><td>{escape(one.late_source)}</td></tr>"
        for one in found
    )
    head = (
        "<tr><th></th><th>dedicated GPU-h</th><th>borrowed GPU-h</th><th>duty</th><th>tokens</th>"
        "<th>weights, GB</th><th>SLO violations</th><th>of the SLO's budget</th>"
        "<th>accepted</th><th>cost per accepted</th><th>per correct answer</th><th>saved</th>"
        "<th>break-even lent hour</th><th>memory kept back</th>"
        "<th>while nobody borrowed</th><th>opportunity cost</th>"
        "<th>a late request</th><th>is</th></tr>"
    )
    style = (
        "body{font:14px system-ui;max-width:84rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse;font-size:13px}svg{max-width:60rem}"
        "td,th{padding:.3rem .4rem;text-align:right}"
        "td:first-child{text-align:left;white-space:nowrap}tr{border-bottom:1px solid #c9d0d9}"
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>ROSE cost</title>"
        f"<style>{style}</style><h1>What was lent, and what it cost</h1>"
        f"<table>{head}{rows}</table>{plots}{_sections(parts or {})}</html>\n"
    )


def _sections(parts: Mapping[str, CostBreakdown]) -> str:
    return "".join(
        f"<h2>What a correct answer cost {escape(name)}</h2>{table(one)}"
        for name, one in parts.items()
    )


def table(found: CostBreakdown) -> str:
    """A bill taken apart, as a table."""
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>"
        for line in statement_lines(found)
    )
    top = "<tr><th></th><th>figure</th><th></th></tr>"
    return f"<table><thead>{top}</thead><tbody>{body}</tbody></table>"


def percent(share: float | None) -> str:
    """A share."""
    return "unknown" if share is None else f"{share:.1%}"
