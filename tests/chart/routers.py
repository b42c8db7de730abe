"""Several replicas of a lease's router, on a real node: they answer as one, also without one."""

from __future__ import annotations

import contextlib
import json
import ssl
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from rose_dev.cluster.node import Node
from rose_dev.waiting import wait_until

_ROUTERS, _RESEARCH = "rose-routers", "research"
_SECONDS = 400.0
_TURNS_AFTER_A_DEATH = 10

Turn = Callable[[str], int]
"""One turn at a router of this URL; how many tokens it had."""


def two_answer_as_one(node: Node, service: str, turn: Turn) -> None:
    """Two replicas prove themselves to each other, share an engine, and one can die."""
    _resize(node, 2)
    pods = _settled(node, 2)
    # The engine's owner dials one of them; the other has heard of it over mutual TLS.
    wait_until(
        lambda: all(_answers(pod, turn) for pod in pods.values()), "both answer", seconds=_SECONDS
    )
    for address in pods.values():
        with pytest.raises(OSError, match=r"closed|reset|alert"):
            _as_a_stranger(f"https://{address}:7445/healthz")
    victim = next(iter(pods))
    now = ("--grace-period=0", "--force", "--wait=false")
    node.kubectl("delete", "pod", victim, f"--namespace={_ROUTERS}", *now)
    for _ in range(_TURNS_AFTER_A_DEATH):
        # Until kube-proxy has heard of the death a call may be refused; callers try again.
        wait_until(lambda: _answers(service, turn), "a turn after a death", seconds=_SECONDS)
    _resize(node, 1)
    _settled(node, 1)
    wait_until(lambda: _answers(service, turn), "one router answers again", seconds=_SECONDS)


def _resize(node: Node, replicas: int) -> None:
    change = json.dumps({"spec": {"router": {"replicas": replicas}}})
    lease = ("rolloutlease", "grpo", f"--namespace={_RESEARCH}")
    node.kubectl("patch", *lease, "--type=merge", f"--patch={change}")


def _settled(node: Node, count: int) -> dict[str, str]:
    """Name and address of the routers, once there are just so many and each is ready."""
    found: dict[str, str] = {}

    def just_these() -> bool:
        found.clear()
        pods = _pods(node)
        found.update({pod["metadata"]["name"]: pod["status"].get("podIP", "") for pod in pods})
        flag = "--replicas-dns="
        alike = all(
            any(word.startswith(flag) for word in pod["spec"]["containers"][0]["args"])
            is (count > 1)
            for pod in pods
        )
        return len(pods) == count and alike and all(map(_ready, pods))

    wait_until(just_these, f"{count} routers are ready", seconds=_SECONDS, pause=1.0)
    return found


def _pods(node: Node) -> list[dict[str, Any]]:
    chosen = ("--selector=app.kubernetes.io/name=rose-router", f"--namespace={_ROUTERS}")
    items: list[dict[str, Any]] = json.loads(node.kubectl("get", "pods", *chosen, "--output=json"))[
        "items"
    ]
    return items


def _ready(pod: dict[str, Any]) -> bool:
    states = pod["status"].get("containerStatuses", [])
    leaving = "deletionTimestamp" in pod["metadata"]
    return not leaving and any(state["ready"] for state in states)


def _answers(address: str, turn: Turn) -> bool:
    with contextlib.suppress(OSError):  # not ready yet
        return turn(address) > 0
    return False


def _as_a_stranger(url: str) -> None:
    """Call without a certificate."""
    anybody = ssl.create_default_context()
    anybody.check_hostname = False
    anybody.verify_mode = ssl.CERT_NONE
    with urllib.request.urlopen(url, timeout=20, context=anybody) as answer:  # noqa: S310
        answer.read()
