"""Rights that a role grants, and those that were used, from the API server's audit log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.chart.rendering import Rendered

_CREATED = 201

Right = tuple[str, str]
"""Verb, and resource with its subresource."""


def granted(rendered: Rendered, account: str) -> set[Right]:
    """Every right of a service account, from the rendered roles of its name."""
    return {
        (verb, resource)
        for kind in ("ClusterRole", "Role")
        for role in rendered.all(kind)
        if role["metadata"]["name"] == account
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def since(events: Iterable[dict[str, Any]], moment: str) -> list[dict[str, Any]]:
    """Events from a moment on (RFC 3339, UTC), not those of an earlier installation."""
    return [event for event in events if event["requestReceivedTimestamp"] >= moment.rstrip("Z")]


def used(events: Iterable[dict[str, Any]], namespace: str, account: str) -> set[Right]:
    """Every right that the account made use of."""
    user = f"system:serviceaccount:{namespace}:{account}"
    found: set[Right] = set()
    for event in events:
        reference = event.get("objectRef")
        if event["user"]["username"] != user or reference is None or "resource" not in reference:
            continue
        resource = "/".join(filter(None, (reference["resource"], reference.get("subresource"))))
        found.add((event["verb"], resource))
        # Server-side apply asks for both rights when the object is not there yet.
        if event["verb"] == "patch" and event.get("responseStatus", {}).get("code") == _CREATED:
            found.add(("create", resource))
    return found
