"""``python -m tests.chart.privileges``: writes ``docs/granted.md``, every right the chart grants.

``docs/privileges.md`` says why; this says what, line by line: a right more is a line more in
a review. ``test_privileges`` compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from tests.chart.rendering import (
    BATCHES,
    CHART,
    EVERYTHING,
    LENDING,
    REWARDS,
    SANDBOXES,
    Object,
    render,
)

PAGE = CHART.parents[1] / "docs" / "granted.md"
PROFILES: dict[str, Object] = {
    "By default": {},
    "With lending": LENDING,
    "With lending, where `gpus.access` is `HostPath`": {**LENDING, "gpus": {"access": "HostPath"}},
    "With hosts of sandboxes": {"sandboxes": SANDBOXES},
    "With `sandboxes.templates.enabled`": {
        "sandboxes": {**SANDBOXES, "templates": {"enabled": True}}
    },
    "With everything that values switch on": {
        **EVERYTHING,
        "agent": {"wholeReplica": {"enabled": True}},
        "mps": {"enabled": True},
        "rewards": REWARDS,
        "batches": BATCHES,
    },
}
_HEAD = """# Every right that the chart grants

<!-- written by `python -m tests.chart.privileges`; do not edit -->

[Privileges](privileges.md) says why each is needed. Who changes this page changes what ROSE may do.
"""


def page() -> str:
    """The page."""
    parts = [_HEAD]
    seen: set[str] = set()
    for title, values in PROFILES.items():
        lines = [line for line in granted(values) if line not in seen]
        seen |= set(lines)
        more = "" if title == next(iter(PROFILES)) else ", beside the above"
        parts.append(f"## {title}{more}\n\n" + "\n".join(f"- {line}" for line in lines) + "\n")
    return "\n".join(parts)


def granted(values: Object) -> list[str]:
    """A line per right, sorted."""
    rendered = render(values)
    found: set[str] = set()
    for item in rendered.objects:
        name = f"{item['kind']} `{item['metadata']['name']}`"
        if item["kind"] in {"Role", "ClusterRole"}:
            found |= {f"{name}: {words}" for rule in item["rules"] for words in _rule(rule)}
        template = item.get("spec", {}).get("template") if "spec" in item else None
        if template and "containers" in template.get("spec", {}):
            found |= {f"{name}: {words}" for words in _pod(template["spec"])}
    return sorted(found)


def _rule(rule: Object) -> Iterator[str]:
    named = f" named {', '.join(rule['resourceNames'])}" if rule.get("resourceNames") else ""
    for group in rule.get("apiGroups", ()):
        for resource in rule.get("resources", ()):
            at = f"{resource}.{group}" if group else resource
            yield f"{', '.join(sorted(rule['verbs']))} {at}{named}"
    for url in rule.get("nonResourceURLs", ()):
        yield f"{', '.join(sorted(rule['verbs']))} {url}"


def _pod(spec: Object) -> Iterator[str]:
    for word in ("hostPID", "hostNetwork", "hostIPC", "shareProcessNamespace"):
        if spec.get(word):
            yield word
    if spec.get("automountServiceAccountToken", True):
        yield "a service account's token"
    volumes = {one["name"]: one for one in spec.get("volumes", ())}
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        yield from (f"`{container['name']}` {words}" for words in _container(container, spec))
        for mount in container.get("volumeMounts", ()):
            volume = volumes.get(mount["name"], {})
            only = " (read-only)" if mount.get("readOnly") else ""
            if "hostPath" in volume:
                yield f"`{container['name']}` mounts the node's {volume['hostPath']['path']}{only}"
            for name, secret in _secrets(volume):
                keys = ", ".join(one["key"] for one in secret.get("items", ())) or "all of it"
                yield f"`{container['name']}` mounts the Secret {name} ({keys})"


def _secrets(volume: Object) -> Iterator[tuple[str, Object]]:
    """A volume's Secrets by name, those among other sources too."""
    if "secret" in volume:
        yield volume["secret"]["secretName"], volume["secret"]
    for source in volume.get("projected", {}).get("sources", ()):
        if "secret" in source:
            yield source["secret"]["name"], source["secret"]


def _container(container: Object, spec: Object) -> Iterator[str]:
    context = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
    user = context.get("runAsUser")
    yield f"runs as {'root' if user in {0, None} and not context.get('runAsNonRoot') else user}"
    if context.get("privileged"):
        yield "is privileged"
    if context.get("allowPrivilegeEscalation", True):
        yield "may gain privileges"
    if not context.get("readOnlyRootFilesystem"):
        yield "may write its root file system"
    capabilities = context.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield "keeps the runtime's capabilities"
    yield from (f"has {one}" for one in sorted(capabilities.get("add", ())))
    seccomp = context.get("seccompProfile", {}).get("type")
    if seccomp != "RuntimeDefault":
        yield f"has the filter of system calls {json.dumps(seccomp)}"


if __name__ == "__main__":
    PAGE.write_text(page())
