"""What a dashboard must keep to: the rules of Grafana's dashboard-linter, and our own.

| rule | why |
|---|---|
| one datasource variable, named and labelled as Grafana does | any Prometheus will do |
| ``job`` and ``instance``: several values, all of them ``.+``, anew when the time changes | |
| every panel: title, description, unit, the datasource variable | it explains itself |
| every selector of our metrics carries both matchers | the variables filter everything |
| rates over ``$__rate_interval`` (a stat may take the whole ``$__range``) | right at every zoom |
| a counter is never shown raw | its value means nothing |
| every metric exists | no panel is empty for ever |
| not editable; stable uid; ids are unique | |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Json = Mapping[str, Any]

_SELECTOR = re.compile(r"(?<![\w:])(rose_\w+)(\{[^}]*\})?")
_RATE = re.compile(r"\b(?:rate|irate|increase)\(")
_SPAN = re.compile(r"\[([^\]]+)\]")
_SUFFIXES = ("_bucket", "_sum", "_count")
_UNITS = frozenset({"short", "s", "percentunit", "reqps", "ops", "Bps", "bytes", "pps"})


def problems(board: Json, known: Mapping[str, str]) -> Iterator[str]:
    """Everything that is wrong with a dashboard.

    Args:
        board: the parsed JSON.
        known: metric name -> type, from ``docs/metrics.md``.
    """
    if board["editable"]:
        yield "it can be edited, and the next upgrade would undo that"
    if not re.fullmatch(r"rose-[a-z]+", board["uid"]):
        yield f"uid {board['uid']!r} is not stable and readable"
    yield from _variables(board["templating"]["list"])
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    if len({panel["id"] for panel in board["panels"]}) != len(board["panels"]):
        yield "two panels have the same id"
    for panel in panels:
        for problem in _panel(panel, known):
            yield f"{panel['title']}: {problem}"


def selectors(query: str) -> list[tuple[str, str]]:
    """Every metric of ours in a query, with its matchers."""
    return [(name, matchers or "") for name, matchers in _SELECTOR.findall(query)]


def base_name(metric: str, known: Mapping[str, str]) -> str:
    """The name under which a series is documented: histograms have three."""
    for suffix in _SUFFIXES:
        base = metric.removesuffix(suffix)
        if metric.endswith(suffix) and known.get(base) == "histogram":
            return base
    return metric


def _variables(variables: list[Json]) -> Iterator[str]:
    sources = [item for item in variables if item["type"] == "datasource"]
    if [(item["name"], item["label"]) for item in sources] != [("datasource", "Data source")]:
        yield "there must be one datasource variable, named datasource, labelled Data source"
    by_name = {item["name"]: item for item in variables}
    for name in ("job", "instance"):
        found = by_name.get(name)
        if found is None:
            yield f"variable {name} is missing"
        elif not (found["multi"] and found["includeAll"] and found["allValue"] == ".+"):
            yield f"variable {name} must take several values, all of them as .+"
        elif found["refresh"] != 2:
            yield f"variable {name} must be read anew when the time range changes"


def _panel(panel: Json, known: Mapping[str, str]) -> Iterator[str]:
    if not (panel["title"] and panel["description"]):
        yield "needs a title and a description"
    if panel["fieldConfig"]["defaults"].get("unit") not in _UNITS:
        yield "has no known unit"
    for target in panel["targets"]:
        if target["datasource"]["uid"] != "$datasource":
            yield "does not use the datasource variable"
        yield from _query(target["expr"], known)


def _query(query: str, known: Mapping[str, str]) -> Iterator[str]:
    found = selectors(query)
    if not found:
        yield f"asks for no metric of ours: {query}"
    for metric, matchers in found:
        yield from _selector(metric, matchers, query, known.get(base_name(metric, known)))
    if len(_RATE.findall(query)) != len(_SPAN.findall(query)):
        yield f"a range without a rate: {query}"
    for span in _SPAN.findall(query):
        if span not in {"$__rate_interval", "$__range"}:
            yield f"rate over {span} instead of $__rate_interval"
    if query.count("(") != query.count(")"):
        yield f"parentheses do not match: {query}"


def _selector(metric: str, matchers: str, query: str, kind: str | None) -> Iterator[str]:
    if kind is None:
        yield f"{metric} does not exist"
    if 'job=~"$job"' not in matchers or 'instance=~"$instance"' not in matchers:
        yield f"{metric} lacks the matchers of job and instance"
    if kind == "counter" and not re.search(rf"(?:rate|increase)\({metric}\{{", query):
        yield f"{metric} is a counter and shown raw"
