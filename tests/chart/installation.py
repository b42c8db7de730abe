"""ROSE from the chart on a real node, with fake engines: installed for a test, gone afterwards.

``ROSE_BUILT_IMAGES`` names a folder with one docker archive per target of the Dockerfile; the test
then runs on those instead of the image made of the checkout (docs/images.md).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rose_core.api import EXPLAIN_ANNOTATION
from rose_dev.cluster.node import Node
from rose_dev.errors import CommandFailed
from rose_dev.waiting import wait_until
from rose_weights.serve import tenants

HERE = Path(__file__).parent
CHART = HERE.parents[1] / "helm" / "rose"
SYSTEM, ROUTERS, RESEARCH, SERVING = "rose-system", "rose-routers", "research", "serving"
SECONDS = 400.0
TARGETS = ("operator", "router", "agent", "weights", "engine")


@contextmanager
def installation(
    node: Node,
    models: Path,
    *values: str,
    chart: tuple[str, ...] = (str(CHART),),
    before: tuple[dict[str, Any], ...] = (),
    smoke: bool = False,
) -> Iterator[None]:
    """ROSE, what stands beside it, and one model on the node.

    Args:
        models: folder of models, which the node sees.
        values: further words for ``helm install``, such as ``--set`` of the chart.
        chart: what ``helm install`` is given of it.
        before: objects that the chart with these values needs, in namespaces that end with it.
        smoke: run ``helm test`` as well; a test that lends asks for more than it does.
    """
    remove(node)
    wait_until(
        lambda: not {RESEARCH, SERVING, SYSTEM, ROUTERS} & set(namespaces(node)),
        "an earlier run's namespaces are gone",
        seconds=SECONDS,
        pause=0.5,
    )
    built = Path(os.environ.get("ROSE_BUILT_IMAGES", ""))
    if built.name:
        node.load(*(built / f"{target}.tar" for target in TARGETS))
        values += ("--set=image.perComponent=true", "--set=image.tag=built")
    where = ("rose", *chart, f"--namespace={SYSTEM}", "--create-namespace")
    grant_store(node, models)
    apply(node, *before)
    given = (f"--values={HERE / 'values.yaml'}", f"--set=engineHost.modelsPath={models}", *values)
    try:
        try:
            node.helm("install", *where, *given, "--wait", "--timeout=300s", seconds=330)
            if smoke:
                reported = node.helm("test", "rose", f"--namespace={SYSTEM}", "--timeout=300s")
                assert "Succeeded" in reported
        except CommandFailed as error:
            pytest.fail("\n\n".join([str(error), *seen(node)]))
        beside = (HERE / "cluster.yaml").read_text() + tenants_secret(models)
        if built.name:
            store = "command: [rose, weights"
            head, _, rest = beside.partition(store)
            front, _, back = head.rpartition("localhost/rose:dev")
            beside = f"{front}localhost/rose-weights:built{back}{store}{rest}"
        node.kubectl("apply", "--filename=-", stdin=beside)
        yield
    finally:
        remove(node)


def grant_store(node: Node, models: Path) -> None:
    """Who may use the weight store: the team publishes, the serving cluster reads."""
    file = models / "tenants.json"
    if not file.exists():
        team = tenants.grant(file, "research", publish=("grpo",), read=("grpo",))
        (models / "team").write_text(team)
        (models / "cluster").write_text(tenants.grant(file, "cluster", read=("*",)))
    objects = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}},
        secret(SYSTEM, "rose-store-credential", token=(models / "cluster").read_text()),
    ]
    apply(node, *objects)


def apply(node: Node, *objects: dict[str, Any]) -> None:
    """Make these objects, in this order."""
    if not objects:
        return
    listed = {"apiVersion": "v1", "kind": "List", "items": objects}
    node.kubectl("apply", "--filename=-", stdin=json.dumps(listed))


def tenants_secret(models: Path) -> str:
    """The store's file of tenants, as a document to apply."""
    made = secret(RESEARCH, "store-credentials", tenants=(models / "tenants.json").read_text())
    return f"\n---\n{json.dumps(made)}\n"


def secret(namespace: str, name: str, **data: str) -> dict[str, Any]:
    """A Secret with these keys."""
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data}


def make_models(folder: Path) -> Path:
    """A folder with the model ``tiny``, readable by everybody."""
    from rose_dev.models import TINY, make_model  # noqa: PLC0415  # torch takes seconds to import

    make_model(TINY, folder).rename(folder / "tiny")
    folder.chmod(0o755)
    return folder


def remove(node: Node) -> None:
    """Take away what a run of this test makes; also of one that was killed."""
    if '"rose"' in node.helm("list", f"--namespace={SYSTEM}", "--all", "--output=json"):
        # A run that was killed may have left pods that the hook would wait for.
        node.helm("uninstall", "rose", f"--namespace={SYSTEM}", "--no-hooks")
    # A namespace is looked at again only when half of its pods' longest grace is over. What makes
    # pods goes before them.
    kinds = "deployments,replicasets,daemonsets,jobs,pods"
    places = (SYSTEM, ROUTERS, SERVING, RESEARCH)
    for name in places:
        where = (f"--namespace={name}", "--all", "--grace-period=1", "--wait=false")
        node.kubectl("delete", kinds, *where)
    names = [f"namespace/{name}" for name in places]
    node.kubectl("delete", "--ignore-not-found", "--wait=false", *names)


def namespaces(node: Node) -> list[str]:
    listed = node.kubectl("get", "namespaces", "--output=jsonpath={.items[*].metadata.name}")
    return listed.split()


def field(node: Node, kind: str, name: str, namespace: str, path: str) -> str:
    where = (kind, name, f"--namespace={namespace}", f"--output=jsonpath={path}")
    return node.kubectl("get", *where, check=False).strip()


def said(node: Node, kind: str, name: str, namespace: str, condition: str) -> str:
    """Message of a condition, as it is now: without a question it may be two minutes old."""
    question = f"{EXPLAIN_ANNOTATION}={time.monotonic_ns()}"
    node.kubectl("annotate", kind, name, f"--namespace={namespace}", "--overwrite", question)
    path = f"{{.status.conditions[?(@.type=='{condition}')].message}}"
    return field(node, kind, name, namespace, path)


def seen(node: Node) -> list[str]:
    """What somebody would look at who wonders why something does not happen."""
    kinds = "pods,servingpools,rolloutleases,rolloutslots"
    nodes = ("daemonset/rose-agent", "daemonset/rose-engine-host")
    workloads = ("pod/rose-test", "deployment/rose-operator", *nodes)
    return [
        node.kubectl("get", kinds, "--all-namespaces", check=False),
        node.kubectl("describe", "pods,rolloutleases,rolloutslots", "-A", check=False),
        *(logs(node, workload) for workload in workloads),
    ]


def logs(node: Node, workload: str) -> str:
    where = (f"--namespace={SYSTEM}", "--all-containers", "--tail=60")
    return node.kubectl("logs", workload, *where, check=False)
