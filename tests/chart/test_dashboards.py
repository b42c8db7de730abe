"""Dashboards and alerts: generated, linted, asking only for what processes export, documented."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from rose_dev import dashboards, prometheus
from rose_dev.dashboards import lint
from rose_dev.dashboards.model import Dashboard, Panel, Row, text
from rose_dev.shell import run

ROOT = Path(__file__).resolve().parents[2]
RULES = yaml.safe_load((ROOT / "helm/rose/files/alerts.yaml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
PROMTOOL = prometheus.find("promtool")
FOREIGN = {"up", "kube_daemonset_status_number_unavailable"}
ROW = re.compile(r"^\| `(rose_\w+)` \| (\w+) \|", re.MULTILINE)


@cache
def known() -> dict[str, str]:
    """Every exported metric and its type, from the generated page."""
    return dict(ROW.findall((ROOT / "docs/metrics.md").read_text()))


@pytest.mark.parametrize("board", dashboards.ALL, ids=lambda board: board.name)
def test_a_dashboard_keeps_to_the_rules(board: Dashboard) -> None:
    assert list(lint.problems(json.loads(text(board)), known())) == []


def test_the_chart_carries_what_the_code_says() -> None:
    for path, content in dashboards.files().items():
        assert (ROOT / path).read_text() == content, "make generate"
    assert len(dashboards.files()) == len(list((ROOT / dashboards.FOLDER).iterdir())) == 5


BAD = {
    "does not exist": "sum(rose_nothing{$here})",
    "lacks the matchers": "sum(rose_host_engines)",
    "shown raw": "sum(rose_host_engine_restarts_total{$here})",
    "instead of": "sum(rate(rose_host_engine_restarts_total{$here}[5m]))",
    "no metric of ours": "vector(1)",
    "parentheses": "sum(rose_host_engines{$here}",
}


@pytest.mark.parametrize("problem", BAD)
def test_the_rules_find(problem: str) -> None:
    panel = Panel("Title", "What it shows.", "short", {BAD[problem]: ""})
    board = Dashboard("bad", "Bad", "Bad.", ("rose_host_engines",), (Row("Row", (panel,)),))
    found = list(lint.problems(json.loads(text(board)), known()))
    assert any(problem in line for line in found), found


def test_every_dashboard_is_listed_on_its_page() -> None:
    page = (ROOT / "docs/dashboards.md").read_text()
    for board in dashboards.ALL:
        assert board.title in page
        for row in board.rows:
            titles = ", ".join(panel.title for panel in row.panels)
            assert f"| {row.title} | {titles} |" in page, f"{board.title}: {row.title}"


def test_every_dashboard_row_and_panel_that_a_runbook_names_is_there() -> None:
    rows = [row for board in dashboards.ALL for row in board.rows]
    titles = {board.title for board in dashboards.ALL} | {row.title for row in rows}
    titles |= {panel.title for row in rows for panel in row.panels}
    named = {
        (page.name, " ".join(name.split()))
        for page in (ROOT / "docs/runbooks").glob("Rose*.md")
        for name in re.findall(r"(?<!\*)\*([A-Z][^*]+)\*(?!\*)", page.read_text())
    }
    assert len(named) > 20
    assert {one for one in named if one[1] not in titles} == set()


@pytest.mark.parametrize("board", dashboards.ALL, ids=lambda board: board.name)
def test_no_row_of_a_dashboard_has_a_hole(board: Dashboard) -> None:
    filled: dict[int, int] = {}
    for panel in json.loads(text(board))["panels"]:
        at = panel["gridPos"]
        filled[at["y"]] = filled.get(at["y"], 0) + at["w"]
    assert set(filled.values()) == {24}


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_an_alert_asks_for_what_exists_and_says_what_to_do(alert: dict[str, Any]) -> None:
    name = alert["alert"]
    metrics = set(re.findall(r"\b((?:rose|kube)_\w+|up)\b(?=\{|\[|\)| )", alert["expr"]))
    assert metrics
    for metric in metrics - FOREIGN:
        assert lint.base_name(metric, known()) in known(), metric
    assert alert["labels"]["severity"] in {"critical", "warning"}
    page = ROOT / "docs" / "runbooks" / f"{name}.md"
    assert alert["annotations"]["runbook_url"].endswith(f"/runbooks/{name}/")
    for heading in ("## Meaning", "## Effect", "## Find the cause", "## Repair"):
        assert heading in page.read_text(), f"{page.name} lacks {heading}"


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here: rose dev build")
def test_alerts_fire_when_they_must_and_are_silent_otherwise() -> None:
    series = sorted((ROOT / "tests/chart").glob("alerts_*test.yaml"))
    run([PROMTOOL or "", "test", "rules", *series], seconds=240)
    tested = {name for one in series for name in re.findall(r"alertname: (\w+)", one.read_text())}
    assert tested == {alert["alert"] for alert in ALERTS}


def test_every_runbook_has_its_alert() -> None:
    pages = {path.stem for path in (ROOT / "docs" / "runbooks").glob("Rose*.md")}
    assert pages == {alert["alert"] for alert in ALERTS}
    index = (ROOT / "docs/runbooks/README.md").read_text()
    assert all(f"]({page}.md)" in index for page in pages)
