"""Who may write a slot: the chart's roles and its admission policy, asked of a real API server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import yaml

from rose_core.api import RolloutLease
from rose_dev.cluster.control_plane import ControlPlane
from rose_dev.errors import CommandFailed
from rose_dev.waiting import wait_until
from rose_operator.apply.routers import deployment
from tests.api import objects
from tests.api.installed import install
from tests.api.objects import changed
from tests.chart.rendering import CHART, EVERYTHING, HELM, Object, render
from tests.operator.bench import SETTINGS

pytestmark = [
    pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build"),
    pytest.mark.cluster,
    pytest.mark.slow,
]

SYSTEM, ROUTERS = "rose-system", "rose-routers"
OPERATOR = f"system:serviceaccount:{SYSTEM}:rose-operator"
HOOK = f"system:serviceaccount:{SYSTEM}:rose-give-back"
VERBS = ("create", "update", "patch", "delete", "deletecollection")
RESOURCES = ("rolloutslots", "rolloutslots/status", "rolloutslots/scale")
WORDS = "slots are written by ROSE's operator alone"
POLICY = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
RIGHTS = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}
SLOT = changed(objects.SLOT, {"metadata.namespace": SYSTEM, "metadata.name": "s"})


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """An API server of our own: its policy would keep the slots of other tests out."""
    with ControlPlane() as plane:
        install(plane)
        for namespace in (SYSTEM, "research"):
            plane.kubectl("create", "namespace", namespace)
        apply(plane, render(EVERYTHING).all("Namespace"))
        apply(plane, [item for item in render(EVERYTHING).objects if item["kind"] in RIGHTS])
        apply(plane, [bound_to_person(role) for role in people()])
        yield plane


def apply(plane: ControlPlane, objects: list[Object]) -> None:
    plane.kubectl("apply", "--filename=-", stdin=yaml.safe_dump_all(objects))


def people() -> list[str]:
    """Roles that the chart makes for people."""
    names = [item["metadata"]["name"] for item in render(EVERYTHING).all("ClusterRole")]
    return [name for name in names if name.endswith(("-editor", "-viewer"))]


def bound_to_person(role: str) -> Object:
    """Let a person of the role's name have it everywhere, ROSE's own namespace included."""
    group = "rbac.authorization.k8s.io"
    return {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": f"person-{role}"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": group, "kind": "User", "name": role}],
    }


def allowed(
    plane: ControlPlane, users: list[str], resources: Sequence[str] = RESOURCES
) -> set[tuple[str, str, str]]:
    """(user, verb, resource) that the API server would let through, in any namespace."""
    reviews = [
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": asked(verb, resource, namespace)},
        }
        for user, verb, resource, namespace in product(
            users, VERBS, resources, (SYSTEM, "research")
        )
    ]
    answers = plane.kubectl(
        "create", "--filename=-", "--output=json", stdin=yaml.safe_dump_all(reviews)
    )
    found = set()
    for answer in every(answers):
        spec = answer["spec"]
        wanted = spec["resourceAttributes"]
        if answer["status"]["allowed"]:
            resource = "/".join(filter(None, (wanted["resource"], wanted.get("subresource"))))
            found.add((spec["user"], wanted["verb"], resource))
    return found


def asked(verb: str, resource: str, namespace: str) -> Object:
    name, _, subresource = resource.partition("/")
    return {
        "group": "rose-gpu.dev",
        "verb": verb,
        "resource": name,
        "subresource": subresource,
        "namespace": namespace,
    }


def every(text: str) -> Iterator[Object]:
    """JSON documents one after another, as kubectl prints them."""
    decoder, position = json.JSONDecoder(), 0
    while position < len(text.rstrip()):
        document, position = decoder.raw_decode(text, position)
        position += len(text[position:]) - len(text[position:].lstrip())
        yield document


def test_of_all_that_the_chart_knows_only_the_operator_may_write_slots(
    plane: ControlPlane,
) -> None:
    accounts = [
        f"system:serviceaccount:{item['metadata']['namespace']}:{item['metadata']['name']}"
        for item in render(EVERYTHING).all("ServiceAccount")
    ]
    assert {OPERATOR, HOOK} < set(accounts)
    assert len(people()) == 6
    assert allowed(plane, accounts + people()) == {
        (OPERATOR, "create", "rolloutslots"),
        (OPERATOR, "patch", "rolloutslots"),
        (OPERATOR, "delete", "rolloutslots"),
        (OPERATOR, "patch", "rolloutslots/status"),
        (HOOK, "delete", "rolloutslots"),
    }


def test_the_operator_makes_pods_where_none_may_be_privileged_and_nowhere_else(
    plane: ControlPlane,
) -> None:
    def may(user: str, verb: str, what: str, namespace: str) -> bool:
        asked = ("auth", "can-i", verb, what, f"--as={user}", f"--namespace={namespace}")
        return plane.kubectl(*asked, check=False).strip() == "yes"

    assert may(OPERATOR, "create", "deployments", ROUTERS)
    for namespace in (SYSTEM, "research", "kube-system"):
        assert not may(OPERATOR, "create", "deployments", namespace), namespace
    for what in ("secrets", "pods", "serviceaccounts", "serviceaccounts/token"):
        for verb in ("create", "get", "list"):
            assert not may(OPERATOR, verb, what, ROUTERS), (verb, what)
            assert not may(f"system:serviceaccount:{ROUTERS}:rose-router", verb, what, ROUTERS)


def test_a_routers_pod_fits_its_namespace_and_a_privileged_one_does_not(
    plane: ControlPlane,
) -> None:
    lease = RolloutLease.model_validate(objects.LEASE)
    settings = replace(SETTINGS, router_namespace=ROUTERS, tls_dir=Path("/tls"))
    spec = deployment(lease, settings)["spec"]["template"]["spec"]
    named = {"name": "p", "namespace": ROUTERS}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": named, "spec": spec}
    create = ("create", "--filename=-", "--dry-run=server")
    plane.kubectl(*create, stdin=json.dumps(pod))
    container = {**spec["containers"][0], "securityContext": {"privileged": True}}
    for worse in ({"containers": [container]}, {"hostPID": True}, {"hostNetwork": True}):
        with pytest.raises(CommandFailed, match="violates PodSecurity"):
            plane.kubectl(*create, stdin=json.dumps({**pod, "spec": {**spec, **worse}}))


def refused(plane: ControlPlane, *arguments: str, stdin: str = "") -> bool:
    """Whether the policy refuses it; another failure fails the test."""
    try:
        plane.kubectl(*arguments, stdin=stdin)
    except CommandFailed as error:
        if WORDS not in str(error):
            raise
        return True
    return False


def test_not_even_an_administrator_writes_a_slot(plane: ControlPlane) -> None:
    text = json.dumps(SLOT)
    create = ("create", "--filename=-")
    assert not refused(plane, *create, "--dry-run=server", stdin=text), "without the policy"
    apply(plane, [item for item in render(EVERYTHING).objects if item["kind"] in POLICY])
    wait_until(
        lambda: refused(plane, *create, "--dry-run=server", stdin=text),
        "the policy is in force",
        seconds=60,
    )
    plane.kubectl(*create, f"--as={OPERATOR}", stdin=text)
    patch = ("patch", "rslot", "s", f"--namespace={SYSTEM}", "--type=merge")
    state = '--patch={"status": {"state": "Ready"}}'
    assert refused(plane, *patch, '--patch={"spec": {"engine": {"maxRunning": 9}}}')
    assert refused(plane, *patch, state, "--subresource=status")
    # As the operator does it: an apply, for which it need not read first.
    how = ("apply", "--server-side", "--subresource=status", "--filename=-", f"--as={OPERATOR}")
    plane.kubectl(*how, stdin=json.dumps({**SLOT, "status": {"state": "Ready"}}))
    assert refused(plane, *patch, '--patch={"status": null}', "--subresource=status")
    # What only tidies up goes on.
    plane.kubectl(*patch, '--patch={"metadata": {"finalizers": ["a.example/b"]}}')
    plane.kubectl(*patch, '--patch={"metadata": {"finalizers": null}}')
    plane.kubectl("delete", "rslot", "s", f"--namespace={SYSTEM}")


def test_a_policy_is_written_by_whom_the_platform_chose_alone(plane: ControlPlane) -> None:
    accounts = [
        f"system:serviceaccount:{item['metadata']['namespace']}:{item['metadata']['name']}"
        for item in render(EVERYTHING).all("ServiceAccount")
    ]
    found = allowed(plane, accounts + people(), ("tenantpolicies", "tenantpolicies/status"))
    assert {user for user, _, _ in found} == {"rose-tenantpolicy-editor"}
    aggregated = [
        item["metadata"]["name"]
        for item in render(EVERYTHING).all("ClusterRole")
        if any("aggregate-to" in label for label in item["metadata"]["labels"])
    ]
    assert "rose-tenantpolicy-editor" not in aggregated


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"spec.namespaces": {}}, "name namespaces in names, or by labels"),
        ({"spec.minPriority": 1}, "minPriority must not exceed maxPriority"),
        ({"spec.maxSlots": -1}, "spec.maxSlots"),
        ({"spec.runs": [{"storeName": "main", "names": []}]}, "spec.runs[0].names"),
        ({"spec.namespaces": {"names": ["a b"]}}, "spec.namespaces.names[0]"),
    ],
)
def test_a_policy_that_says_nothing_sensible_is_refused(
    plane: ControlPlane, changes: Object, words: str
) -> None:
    sample = yaml.safe_load((CHART.parents[1] / "crds/samples/tenantpolicy.yaml").read_text())
    text = json.dumps(changed(sample, changes))
    create = ("create", "--filename=-", "--dry-run=server")
    if not words:
        plane.kubectl(*create, stdin=text)
        return
    with pytest.raises(CommandFailed, match=re.escape(words)):
        plane.kubectl(*create, stdin=text)
