"""Each way in which containers see GPUs, installed anew by a user: Ready, found, and it lends.

How long each took stands in the run's summary, beside the aim; a time is no promise of a machine's,
so none is asserted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from rose_dev.cluster.gpu_node import files
from rose_dev.cluster.gpu_node.driver_root import ROOT
from rose_dev.errors import CommandFailed
from tests.chart.installation import SYSTEM
from tests.gpu_node.lending import MARKS, Lending

pytestmark = [*MARKS, pytest.mark.long]

AIM_SECONDS = 60.0
ADMIN = "resource.kubernetes.io/admin-access"


@dataclass(frozen=True)
class Mode:
    """A way to install.

    Attributes:
        access: what the pool's condition says that it is.
        values: of the chart.
        absent: classes of NVIDIA's runtime that such a cluster has not.
        claims: the namespace may claim GPUs with admin access.
    """

    name: str
    access: str
    values: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    claims: bool = False


BOTH = ("nvidia", "nvidia-cdi")
MODES = [
    Mode("Auto", "RuntimeClass"),
    Mode("RuntimeClass", "RuntimeClass", ("gpus.access=RuntimeClass",)),
    Mode("NRI", "NRI", ("gpus.access=NRI",), absent=BOTH),
    Mode("CDI", "CDI", ("gpus.access=CDI", "gpus.runtimeClassName=nvidia-cdi")),
    Mode("DRA", "DRA", ("gpus.access=DRA",), claims=True, absent=BOTH),
    Mode("HostPath", "HostPath", ("gpus.access=HostPath", f"gpus.driverRoot={ROOT}"), absent=BOTH),
    Mode("Auto, nothing found", "Auto", absent=BOTH),
]


@dataclass
class Times:
    """Seconds from the start of the installation, by mode."""

    rows: dict[str, dict[str, float]] = field(default_factory=dict)

    def table(self) -> str:
        heads = ("installed", "ready", "found", "lends")
        lines = ["", f"{'gpus.access':22}" + "".join(f"{head:>11}" for head in heads)]
        for name, row in self.rows.items():
            cells = "".join(f"{row[head]:11.1f}" if head in row else f"{'-':>11}" for head in heads)
            met = "met" if row.get("ready", AIM_SECONDS) < AIM_SECONDS else "missed"
            lines.append(f"{name:22}{cells}  aim of {AIM_SECONDS:.0f} s to ready: {met}")
        return "\n".join(lines)


@pytest.fixture(scope="module")
def times(pytestconfig: pytest.Config) -> Iterator[Times]:
    made = Times()
    yield made
    reporter = pytestconfig.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    reporter.write_line(made.table())


@pytest.fixture
def gone(installed: Lending) -> Lending:
    """Two replicas that serve, and no ROSE."""
    installed.serve(chat_1=2)
    installed.renew_lease(slots={"min": 2, "max": 2, "idleSeconds": 604800})
    node = installed.node
    where = (f"--namespace={SYSTEM}", "--wait", "--ignore-not-found", "--timeout=300s")
    try:
        node.helm("uninstall", "rose", *where, seconds=330)
    except CommandFailed:  # what a failed installation has left has no namespace for the hook
        node.helm("uninstall", "rose", *where, "--no-hooks", seconds=330)
    pods = ("--for=delete", "pods", "--all", f"--namespace={SYSTEM}", "--timeout=300s")
    node.kubectl("wait", *pods, seconds=310)
    return installed


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_new_installation_is_ready_finds_the_gpus_and_lends(
    gone: Lending, times: Times, mode: Mode
) -> None:
    row = times.rows.setdefault(mode.name, {})
    with surroundings(gone, mode):
        started = time.monotonic()

        def mark(what: str) -> None:
            row[what] = time.monotonic() - started

        gone.install(*(f"--set={value}" for value in mode.values))
        mark("installed")
        gone.wait(lambda: ready(gone), "every pod of ROSE is Ready")
        mark("ready")
        gone.wait(lambda: gone.found() == "Found", "the guard finds its GPUs")
        mark("found")
        gone.wait_for_all()
        mark("lends")
        gone.wait(
            lambda: f"through {mode.access}," in gone.condition("DeviceAccess"),
            "the pool says how the GPUs are seen",
        )
        gone.wait(
            lambda: gone.condition("DevicesFit").startswith("True of 2 replicas "),
            "the pool says that its GPUs fit",
        )


@contextmanager
def surroundings(lending: Lending, mode: Mode) -> Iterator[None]:
    """A cluster that has what this mode is for; the others' traces are put back afterwards."""
    node = lending.node
    for name in mode.absent:
        node.kubectl("delete", "runtimeclass", name, "--ignore-not-found")
    # With a minus behind it the label is taken away.
    label = f"{ADMIN}=true" if mode.claims else f"{ADMIN}-"
    node.kubectl("label", "namespace", SYSTEM, "--overwrite", label)
    try:
        yield
    finally:
        node.kubectl("apply", "--filename=-", stdin=files.runtime_classes())
        node.kubectl("label", "namespace", SYSTEM, "--overwrite", f"{ADMIN}-")


def ready(lending: Lending) -> bool:
    """Whether every container of every pod there is Ready, agents and engine hosts among them."""
    listed = json.loads(lending.node.kubectl("get", "pods", f"--namespace={SYSTEM}", "-o=json"))
    pods = {
        item["metadata"]["labels"].get("app.kubernetes.io/name", ""): {
            one["type"]: one["status"] for one in item["status"].get("conditions", [])
        }
        for item in listed["items"]
    }
    wanted = {"rose-operator", "rose-agent", "rose-engine-host"}
    return wanted <= pods.keys() and all(pods[name].get("Ready") == "True" for name in wanted)
