"""What ``helm test`` asks: is the operator there, are the nodes, do the kinds refuse nonsense?

Objects are created as dry runs, so nothing is stored and no GPU is touched.
"""

import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API = "https://kubernetes.default.svc"
GROUP = "rose-gpu.dev/v1alpha1"
# An installation that was just made may still be starting on its nodes: kubelets try the mounts of
# Secrets that the operator has just filled again after up to half a minute.
PATIENCE_SECONDS = 100.0
POOL = {"selector": {"matchLabels": {"app": "helm-test"}}}
LEASE = {
    "poolRef": {"namespace": "helm-test", "name": "helm-test"},
    "model": {"name": "helm-test"},
    "weights": {"storeName": "helm-test", "run": "helm-test"},
}


def ask(path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """Code and answer of the API server."""
    headers = {
        "Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}",
        "Content-Type": "application/json",
    }
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(API + path, data, headers)  # noqa: S310
    trust = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    try:
        with urllib.request.urlopen(request, timeout=10, context=trust) as answer:  # noqa: S310
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def create(namespace: str, kind: str, spec: dict[str, Any]) -> int:
    """Code of a dry run that creates an object."""
    body = {
        "apiVersion": GROUP,
        "kind": kind,
        "metadata": {"name": "helm-test", "namespace": namespace},
        "spec": spec,
    }
    path = f"/apis/{GROUP}/namespaces/{namespace}/{kind.lower()}s?dryRun=All"
    return ask(path, body)[0]


def late_nodes(namespace: str) -> list[str]:
    """DaemonSets of ROSE that are not ready on every node."""
    _, listed = ask(
        f"/apis/apps/v1/namespaces/{namespace}/daemonsets"
        "?labelSelector=app.kubernetes.io/part-of%3Drose"
    )
    return [
        item["metadata"]["name"]
        for item in listed["items"]
        if item["status"].get("numberReady", 0) < item["status"].get("desiredNumberScheduled", 0)
    ]


def patiently(namespace: str, deadline: float) -> list[str]:
    """The same, after giving them time."""
    while (late := late_nodes(namespace)) and time.monotonic() < deadline:
        time.sleep(1)
    return late


def operator(namespace: str, deadline: float) -> str:
    """What a replica of the operator says of itself, or why none could be asked.

    Where network policies are enforced, this pod is let through a while after it has started.
    """
    url = f"http://rose-operator.{namespace}.svc:8080/readyz"
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                state: str = answer.read().decode().strip()
        except OSError as error:
            if time.monotonic() >= deadline:
                return f"{url}: {error}"
            time.sleep(1)
        else:
            return state


def main(namespace: str) -> int:
    """Ask everything; 1 when something is wrong."""
    lending = {"mode": "Lend"}
    deadline = time.monotonic() + PATIENCE_SECONDS
    late = patiently(namespace, deadline)
    state = operator(namespace, deadline)
    ready = state in {"Leader", "Follower", "Offline"}
    checks = {
        "a pool is accepted": create(namespace, "ServingPool", POOL) == 201,
        "a lease is accepted": create(namespace, "RolloutLease", LEASE) == 201,
        "a pool that lends without a limit is refused": create(
            namespace, "ServingPool", POOL | lending
        )
        == 422,
        f"an operator is ready {'' if ready else state}".rstrip(): ready,
        f"every node is ready {' '.join(late)}".rstrip(): not late,
    }
    for name, good in checks.items():
        sys.stdout.write(f"{'ok    ' if good else 'FAILED'} {name}\n")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
