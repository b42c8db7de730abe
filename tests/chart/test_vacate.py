"""The init container that a serving pod waits in: its documented form, and where it asks."""

from __future__ import annotations

import re
import urllib.parse
from pathlib import Path

import pytest
import yaml

from rose_agent.host.vacancy.vacate import parser
from tests.chart.rendering import HELM, LENDING, render

PAGE = Path(__file__).parents[2] / "docs" / "engine-host.md"


def container() -> dict[str, object]:
    """The documented init container."""
    (text,) = re.findall(r"```yaml\n(initContainers:.*?)```", PAGE.read_text(), re.DOTALL)
    (made,) = yaml.safe_load(text)["initContainers"]
    return dict(made)


def test_the_documented_container_is_one_the_command_understands() -> None:
    words = container()["command"]
    assert isinstance(words, list)
    assert words[:2] == ["rose", "vacate"]
    assert parser().parse_args(words[2:]).deadline_seconds == 300.0
    # Another request than the serving container's would be given another GPU.
    assert container()["resources"] == {"limits": {"nvidia.com/gpu": 1}}


@pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")
def test_it_asks_the_engine_host_of_its_own_node() -> None:
    rendered = render(LENDING)
    asked = urllib.parse.urlsplit(parser().parse_args([]).url)
    name, namespace, kind = str(asked.hostname).split(".")
    assert kind == "svc"
    service = rendered.one("Service", name)
    assert service["metadata"]["namespace"] == namespace
    assert service["spec"]["internalTrafficPolicy"] == "Local", "another node's host knows nothing"
    (port,) = service["spec"]["ports"]
    assert port["port"] == asked.port
    pod = rendered.one("DaemonSet", "rose-engine-host")["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= labels
    ports = rendered.container("DaemonSet", "rose-engine-host", "engine-host")["ports"]
    assert {"name": port["targetPort"], "containerPort": asked.port} in ports
