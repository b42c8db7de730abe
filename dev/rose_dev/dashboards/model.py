"""A dashboard as data: rows of panels, panels of queries; ``text`` makes Grafana's JSON of it.

Queries are PromQL in which ``$here`` stands for the matchers of the variables ``job`` and
``instance``, which every selector must carry, and ``$rate`` for the span of rates.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

# Grafana's grid has 24 columns.
_COLUMNS = 24
_HEIGHTS = {"stat": 4, "timeseries": 8}
_MATCHERS = 'job=~"$job", instance=~"$instance"'
_RATE = "$__rate_interval"
_SCHEMA = 39

Json = dict[str, Any]
Steps = tuple[tuple[float | None, str], ...]
"""From which value on a number has which colour; the first step has no value."""


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title, description: what it shows, and what to read from it.
        unit: Grafana's name of the unit.
        queries: PromQL -> legend.
        kind: ``timeseries`` or ``stat``.
        width: of 24 columns.
        stacked: areas on top of each other.
        steps: colours of a single number; none says that no value of it is better than another.
    """

    title: str
    description: str
    unit: str
    queries: dict[str, str]
    kind: str = "timeseries"
    width: int = 12
    stacked: bool = False
    steps: Steps = ()


@dataclass(frozen=True)
class Row:
    """Panels that answer one question."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """One dashboard.

    Attributes:
        name: of its file.
        title, description: what people see.
        jobs: metrics by which the variable ``job`` finds the scrape jobs.
    """

    name: str
    title: str
    description: str
    jobs: tuple[str, ...]
    rows: tuple[Row, ...]


def stat(
    title: str, description: str, unit: str, query: str, *, width: int = 4, steps: Steps = ()
) -> Panel:
    """One number."""
    return Panel(title, description, unit, {query: ""}, kind="stat", width=width, steps=steps)


def high_is_bad(warning: float, bad: float | None = None) -> Steps:
    """Green below ``warning``, orange from it on, red from ``bad`` on."""
    steps: Steps = ((None, "green"), (warning, "orange"))
    return steps if bad is None else (*steps, (bad, "red"))


def low_is_bad(bad: float, warning: float) -> Steps:
    """Red below ``bad``, orange below ``warning``, then green."""
    return ((None, "red"), (bad, "orange"), (warning, "green"))


def just(value: float) -> Steps:
    """Green at this whole number, red beside it."""
    return ((None, "red"), (value, "green"), (value + 1, "red"))


def quantiles(histogram: str, by: str = "", *shares: float) -> dict[str, str]:
    """Queries for quantiles of a histogram, one line per value of the label ``by``."""
    groups = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    buckets = f"sum by ({groups}) (rate({histogram}_bucket{{$here}}[$rate]))"
    return {
        f"histogram_quantile({share}, {buckets})": f"p{round(share * 100)}{legend}"
        for share in shares or (0.5, 0.99)
    }


def rates(counter: str, by: str = "") -> dict[str, str]:
    """A counter's rate, one line per value of the label ``by``."""
    groups = f" by ({by})" if by else ""
    return {f"sum{groups} (rate({counter}{{$here}}[$rate]))": f"{{{{{by}}}}}" if by else "all"}


def text(dashboard: Dashboard) -> str:
    """Grafana's JSON."""
    return json.dumps(_dashboard(dashboard), indent=1) + "\n"


def _dashboard(dashboard: Dashboard) -> Json:
    return {
        "uid": f"rose-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["rose", "gpu", "llm"],
        "schemaVersion": _SCHEMA,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables(dashboard)},
        "annotations": {"list": []},
        "links": [_link()],
        "panels": _panels(dashboard.rows),
    }


def _link() -> Json:
    return {
        "title": "ROSE",
        "type": "dashboards",
        "tags": ["rose"],
        "asDropdown": True,
        "includeVars": False,
        "keepTime": True,
    }


def _variables(dashboard: Dashboard) -> list[Json]:
    names = "|".join(dashboard.jobs)
    datasource = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "refresh": 1,
    }
    job = f'label_values({{__name__=~"{names}"}}, job)'
    instance = f'label_values({{__name__=~"{names}", job=~"$job"}}, instance)'
    return [datasource, _variable("job", "Job", job), _variable("instance", "Instance", instance)]


def _variable(name: str, label: str, query: str) -> Json:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _source(),
        "query": {"query": query, "refId": name},
        "definition": query,
        "includeAll": True,
        "multi": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all", "selected": True},
        # Anew whenever the time range changes.
        "refresh": 2,
        "sort": 1,
    }


def _panels(rows: tuple[Row, ...]) -> list[Json]:
    found: list[Json] = []
    top = 0
    for row in rows:
        found.append(_heading(row, len(found) + 1, top))
        top += 1
        left = height = 0
        for panel in row.panels:
            if left + panel.width > _COLUMNS:
                top, left, height = top + height, 0, 0
            height = max(height, _HEIGHTS[panel.kind])
            place = {"x": left, "y": top, "w": panel.width, "h": _HEIGHTS[panel.kind]}
            found.append(_panel(panel, len(found) + 1, place))
            left += panel.width
        top += height
    return found


def _heading(row: Row, number: int, top: int) -> Json:
    place = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
    return {
        "id": number,
        "type": "row",
        "title": row.title,
        "collapsed": False,
        "gridPos": place,
        "panels": [],
    }


def _panel(panel: Panel, number: int, place: Json) -> Json:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _source(),
        "gridPos": place,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
        "targets": [
            _target(query, legend, number)
            for number, (query, legend) in enumerate(panel.queries.items())
        ],
    }


def _defaults(panel: Panel) -> Json:
    if panel.kind == "stat":
        steps = [{"color": colour, "value": value} for value, colour in panel.steps]
        coloured = {"thresholds": {"mode": "absolute", "steps": steps}} if steps else {}
        return {"unit": panel.unit, **coloured}
    custom = {"fillOpacity": 40 if panel.stacked else 0, "showPoints": "never"}
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    return {"unit": panel.unit, "min": 0, "custom": {**custom, "stacking": stacking}}


def _options(panel: Panel) -> Json:
    if panel.kind == "stat":
        mode = "value" if panel.steps else "none"
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": mode}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _target(query: str, legend: str, number: int) -> Json:
    return {
        "refId": chr(ord("A") + number),
        "datasource": _source(),
        "expr": query.replace("$here", _MATCHERS).replace("$rate", _RATE),
        "legendFormat": legend or "__auto",
        "range": True,
    }


def _source() -> Json:
    return {"type": "prometheus", "uid": "$datasource"}
