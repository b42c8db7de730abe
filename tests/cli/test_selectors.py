"""What error messages tell people to look at has the labels that the chart gives it."""

from __future__ import annotations

import inspect
import re

import pytest

from rose_cli.ops import drain, explain
from tests.chart.rendering import HELM, LENDING, render

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")


def test_the_operator_that_does_not_answer_is_found() -> None:
    selected = re.search(r"deployment -A -l (\S+)=([\w-]+)", inspect.getsource(explain))
    assert selected is not None
    deployment = render(LENDING).one("Deployment", "rose-operator")
    assert deployment["metadata"]["labels"][selected[1]] == selected[2]


def test_the_agents_that_left_slots_are_found() -> None:
    selected = re.search(r"pods -A -o wide -l (\S+)=([\w-]+)", inspect.getsource(drain))
    assert selected is not None
    agent = render(LENDING).one("DaemonSet", "rose-agent")
    assert agent["spec"]["template"]["metadata"]["labels"][selected[1]] == selected[2]
