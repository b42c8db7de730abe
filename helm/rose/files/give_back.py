"""Gives every lent GPU back before ROSE is uninstalled; runs as the chart's pre-delete hook.

| step | afterwards |
|---|---|
| scale the operator to zero | nobody grants; what is granted lapses on the nodes' own clocks |
| wait until no engine host has an engine | the GPUs are serving's alone |
| delete slots, routers | nothing is left that the operator alone would have removed |
| correct the status of pools and leases | nobody reads of slots, GPUs or a URL that are gone |

It fails, and with it the uninstallation, while an engine is still there: say what holds it.
"""

import json
import os
import re
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API = "https://kubernetes.default.svc"
KINDS = "/apis/rose-gpu.dev/v1alpha1"
# What a reader would take for a promise; the other conditions say what was found, not what is.
WITHDRAWN = (
    "Ready",
    "Granted",
    "RouterReady",
    "WeightsSynced",
    "ServingProtected",
    "LendingCertified",
    "TelemetryFresh",
)
COUNTS = ("lentReplicas", "qualifiedReplicas", "unwantedGpus", "slotsGranted", "slotsReady")
MANAGED = "labelSelector=app.kubernetes.io/managed-by%3Drose-operator"
OPERATOR = "labelSelector=app.kubernetes.io/name%3Drose-operator"
HOSTS = "labelSelector=rose-gpu.dev/engine-host%3Dtrue"
ENGINES = re.compile(r'^rose_host_engines\{state="(\w+)"\} (\S+)$', re.MULTILINE)


def ask(path: str, method: str = "GET", body: dict[str, Any] | None = None) -> dict[str, Any]:
    """One request to the API server; what is not there counts as done."""
    headers = {"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"}
    if body is not None:
        headers["Content-Type"] = "application/merge-patch+json"
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(API + path, data, headers, method=method)  # noqa: S310
    trust = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    try:
        with urllib.request.urlopen(request, timeout=10, context=trust) as answer:  # noqa: S310
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return {}
        raise
    return found


def names(path: str) -> list[str]:
    """Names of the objects a list has."""
    return [item["metadata"]["name"] for item in ask(path).get("items", [])]


def engines(metrics: str) -> int:
    """Engines a host has, from its metrics page."""
    return round(sum(float(count) for _state, count in ENGINES.findall(metrics)))


def metrics_of(address: str) -> str:
    """An engine host's metrics page, which may be for those with a token only."""
    token = os.environ.get("ROSE_METRICS_TOKEN", "")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"http://{address}:9103/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
        text: str = answer.read().decode()
    return text


def busy_hosts(namespace: str) -> list[str]:
    """Engine hosts with an engine, or of which nobody can tell."""
    found = []
    for pod in ask(f"/api/v1/namespaces/{namespace}/pods?{HOSTS}").get("items", []):
        node, address = pod["spec"].get("nodeName", "?"), pod["status"].get("podIP")
        if not address:
            continue
        try:
            count = engines(metrics_of(address))
        except OSError as error:
            found.append(f"{node} (no answer: {error})")
        else:
            if count:
                found.append(f"{node} ({count} engines)")
    return found


def wait(what: str, deadline: float, pending: Any) -> None:  # noqa: ANN401  # any callable
    """Until ``pending()`` is empty.

    Raises:
        SystemExit: it never was; names what was left.
    """
    while left := pending():
        if time.monotonic() > deadline:
            message = (
                f"{what}: still there: {', '.join(left)}. Look at those nodes, or uninstall with "
                "--no-hooks: the engine hosts end their engines when they are deleted"
            )
            raise SystemExit(message)
        time.sleep(1)
    sys.stdout.write(f"{what}: none\n")


def corrected(status: dict[str, Any], now: str) -> dict[str, Any]:
    """The status of a pool or lease once ROSE is gone: nothing is lent, and it says why."""
    gone = {"status": "False", "reason": "Uninstalled", "message": "ROSE has been uninstalled"}
    conditions = [
        condition
        if condition["type"] not in WITHDRAWN or condition["status"] == "False"
        else {**condition, **gone, "lastTransitionTime": now}
        for condition in status.get("conditions", [])
    ]
    counts = {name: 0 for name in COUNTS if status.get(name)}
    url = {"routerURL": ""} if status.get("routerURL") else {}
    return {"conditions": conditions, **counts, **url}


def correct_statuses() -> None:
    """Write what is true from now on; an object that cannot be written keeps its old words."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for plural in ("servingpools", "rolloutleases"):
        for item in ask(f"{KINDS}/{plural}").get("items", []):
            meta, status = item["metadata"], item.get("status", {})
            where = f"{KINDS}/namespaces/{meta['namespace']}/{plural}/{meta['name']}"
            try:
                ask(f"{where}/status", "PATCH", {"status": corrected(status, now)})
            except urllib.error.HTTPError as error:
                sys.stdout.write(f"status of {meta['namespace']}/{meta['name']}: {error}\n")


def main(namespace: str, routers: str, seconds: float, *more: str) -> None:
    """Give everything back; ``routers`` is the namespace of the routers, which may have routes."""
    deadline = time.monotonic() + seconds
    core, apps = f"/api/v1/namespaces/{namespace}", f"/apis/apps/v1/namespaces/{namespace}"
    slots = f"{KINDS}/namespaces/{namespace}/rolloutslots"
    scale = f"{apps}/deployments/rose-operator/scale"
    ask(scale, "PATCH", {"spec": {"replicas": 0}})
    wait("operators", deadline, lambda: names(f"{core}/pods?{OPERATOR}"))
    wait("engines on borrowed GPUs", deadline, lambda: busy_hosts(namespace))
    for name in names(slots):
        ask(f"{slots}/{name}", "DELETE")
    edge = f"namespaces/{routers}"
    routes = [f"/apis/gateway.networking.k8s.io/v1/{edge}/httproutes"] if "routes" in more else []
    of_routers = [f"/apis/apps/v1/{edge}/deployments", f"/api/v1/{edge}/services", *routes]
    for collection in of_routers:
        for name in names(f"{collection}?{MANAGED}"):
            ask(f"{collection}/{name}?propagationPolicy=Background", "DELETE")
    correct_statuses()
    sys.stdout.write("slots and routers are gone; pools and leases stay\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), *sys.argv[4:])
