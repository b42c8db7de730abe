"""What the engine host's container may do: named one by one, all only where a value needs it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.rendering import HELM, LENDING, Object, render

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")

CGROUP = {"name": "cgroup", "mountPath": "/host/cgroup"}


def host(**values: Any) -> Object:  # noqa: ANN401  # values of the chart
    rendered = render({**LENDING, **values})
    return rendered.container("DaemonSet", "rose-engine-host", "engine-host")


def test_the_helper_has_seven_rights_and_the_nodes_cgroups() -> None:
    made = host()
    context = made["securityContext"]
    assert context["privileged"] is False
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {
        "drop": ["ALL"],
        "add": ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETPCAP", "SETUID"],
    }
    assert CGROUP in made["volumeMounts"]
    spec = render(LENDING).one("DaemonSet", "rose-engine-host")["spec"]["template"]["spec"]
    paths = {one["name"]: one["hostPath"]["path"] for one in spec["volumes"] if "hostPath" in one}
    assert paths["cgroup"] == "/sys/fs/cgroup"
    # Where guard and host see it at one place, the guard finds an engine without a search.
    guard = render(LENDING).container("DaemonSet", "rose-agent", "guard")
    assert CGROUP in guard["volumeMounts"]


@pytest.mark.parametrize(
    "values",
    [
        {"engineHost": {"privileged": True}},
        {"engineHost": {"user": 0}},
        {"engineHost": {"engines": {"firstUser": 0}}},
        {"engineHost": {"engines": {"sharedMemoryMebibytes": 64}}},
        {"mps": {"enabled": True}},
    ],
)
def test_what_needs_more_makes_it_privileged(values: Object) -> None:
    made = host(**values)
    assert made["securityContext"] == {"privileged": True, "runAsUser": 0}
    assert CGROUP not in made["volumeMounts"]
