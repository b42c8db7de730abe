"""What error messages tell people to look at has the labels that the chart gives it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rose_cli import main as cli
from rose_core.api import RolloutLease, RolloutSlot
from tests.api.objects import LEASE, SLOT
from tests.chart.rendering import HELM, LENDING, render

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")
NODE = SLOT["spec"]["members"][0]["node"]


class DeafCluster:
    """A cluster in which nobody acts on what is asked: slots stay, questions stay unanswered."""

    def get(self, *_: object) -> RolloutLease:
        return RolloutLease.model_validate(LEASE)

    def patch(self, *_: object) -> None:
        pass

    def pods_of(self, node: str) -> list[dict[str, Any]]:
        return [{"metadata": {"name": "chat-0", "namespace": "serving"}}] if node == NODE else []

    def objects(self, kind: type, **_: object) -> list[Any]:
        return [RolloutSlot.model_validate(SLOT)] if kind is RolloutSlot else []

    def close(self) -> None:
        pass


def selected(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[str, str, str]:
    """The kind and the label that a verb names when nobody does what it asked for."""
    monkeypatch.setattr("rose_cli.ops.cluster.Cluster", lambda _: DeafCluster())
    assert cli.main([*words, "--timeout=0.001"]) == 1
    output = capsys.readouterr().err
    found = re.search(r"kubectl get (\w+) -A .*-l (\S+)=([\w-]+)\)", output)
    assert found is not None, output
    return found[1], found[2], found[3]


def test_the_operator_that_does_not_answer_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, label, value = selected(["explain", "lease", "x"], monkeypatch, capsys)
    assert kind == "deployment"
    deployment = render(LENDING).one("Deployment", "rose-operator")
    assert deployment["metadata"]["labels"][label] == value


def test_the_agents_that_left_slots_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, label, value = selected(["drain", NODE], monkeypatch, capsys)
    assert kind == "pods"
    agent = render(LENDING).one("DaemonSet", "rose-agent")
    assert agent["spec"]["template"]["metadata"]["labels"][label] == value
