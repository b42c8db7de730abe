"""What of a SandboxTemplate is honoured, told as passed over, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from rose_core.sandboxes.networks import PUBLIC, Network
from rose_core.sandboxes.templates import TemplateLimits, TemplateRefused, read_template

Json = dict[str, Any]
ANY = (Network("0.0.0.0/0"), Network("::/0"))


def spec(pod: Json | None = None, container: Json | None = None, **more: Any) -> Json:  # noqa: ANN401 - JSON
    one = {"name": "agent", "image": "python:3.11", **(container or {})}
    return {"podTemplate": {"spec": {"containers": [one], **(pod or {})}}, **more}


def test_what_says_what_a_sandbox_is_made_of_is_honoured() -> None:
    container = {
        "command": ["python", "-m", "http.server"],
        "args": ["$(PORT)", "$$(PORT)", "$(NONE)"],
        "workingDir": "/app",
        "env": [{"name": "PORT", "value": "8000"}, {"name": "AT", "value": ":$(PORT)"}],
        "resources": {
            "limits": {"cpu": "250m", "memory": "512Mi", "ephemeral-storage": "1Gi"},
            "requests": {"cpu": "0.1", "memory": "1e6"},
        },
        "volumeMounts": [{"name": "work", "mountPath": "/work"}],
        "securityContext": {"allowPrivilegeEscalation": False, "runAsUser": 0},
    }
    pod = {
        "runtimeClassName": "gvisor",
        "automountServiceAccountToken": False,
        "restartPolicy": "Never",
        "volumes": [{"name": "work", "emptyDir": {}}],
        "hostUsers": False,
    }
    made = read_template(spec(pod, container, service=False))
    assert (made.image, made.runtime, made.folder) == ("python:3.11", "runsc", "/app")
    assert made.command == ("python", "-m", "http.server", "8000", "$(PORT)", "$(NONE)")
    assert made.environment == {"PORT": "8000", "AT": ":8000"}
    assert made.limits == TemplateLimits(0.25, 512 << 20, 1 << 30)
    assert made.requests == TemplateLimits(0.1, 10**6, None)
    assert made.folders == ("/work",)
    assert made.networks == PUBLIC, "as its controller does where a template has no policy"
    assert made.passed_over == ()


def test_what_says_nothing_of_a_sandbox_is_told() -> None:
    container = {
        "imagePullPolicy": "Never",
        "ports": [{"containerPort": 8888}],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8888}},
    }
    pod = {"tolerations": [{"operator": "Exists"}]}
    given = spec(pod, container, volumeClaimTemplatesPolicy="Allowed")
    given["podTemplate"]["metadata"] = {"labels": {"app": "agent"}}
    at = "podTemplate.spec.containers[0]"
    assert set(read_template(given).passed_over) == {
        *("podTemplate.metadata.labels", "podTemplate.spec.tolerations"),
        *(f"{at}.{name}" for name in ("imagePullPolicy", "ports", "readinessProbe")),
    }


@pytest.mark.parametrize(
    ("pod", "container", "more", "word"),
    [
        ({"containers": []}, {}, {}, r"spec.containers: 0: a sandbox is one"),
        ({"initContainers": [{"name": "a"}]}, {}, {}, "spec.initContainers: a sandbox has none"),
        ({"runtimeClassName": "kata"}, {}, {}, "runtimeClassName: 'kata': hosts run gvisor"),
        ({"automountServiceAccountToken": True}, {}, {}, "automountServiceAccountToken"),
        ({"serviceAccountName": "robot"}, {}, {}, "serviceAccountName"),
        ({"hostNetwork": True}, {}, {}, "spec.hostNetwork"),
        ({"restartPolicy": "Always"}, {}, {}, "restartPolicy: what ends"),
        ({"nodeSelector": {"a": "b"}}, {}, {}, "nodeSelector: a host is where it is"),
        ({"affinity": {"nodeAffinity": {"a": 1}}}, {}, {}, "spec.affinity"),
        ({"securityContext": {"runAsNonRoot": True}}, {}, {}, "runAsNonRoot"),
        ({"securityContext": {"fsGroup": 7}}, {}, {}, "securityContext.fsGroup: a sandbox has"),
        ({"volumes": [{"name": "a", "configMap": {"name": "b"}}]}, {}, {}, r"volumes\[0\].config"),
        ({"volumes": [{"name": "a", "emptyDir": {"medium": "Memory"}}]}, {}, {}, "medium"),
        ({"volumes": [{"name": "a", "emptyDir": {"sizeLimit": "1Gi"}}]}, {}, {}, "sizeLimit"),
        ({"fieldOfTomorrow": 1}, {}, {}, "spec.fieldOfTomorrow: a sandbox has none"),
        ({}, {"image": ""}, {}, "image: none is named"),
        ({}, {"args": ["x"]}, {}, "args: they are of the image's own command"),
        ({}, {"env": [{"name": "A", "valueFrom": {"x": 1}}]}, {}, r"env\[0\].valueFrom"),
        ({}, {"envFrom": [{"secretRef": {"name": "a"}}]}, {}, "envFrom"),
        ({}, {"livenessProbe": {"exec": {"command": ["a"]}}}, {}, "livenessProbe"),
        ({}, {"lifecycle": {"preStop": {"a": 1}}}, {}, "lifecycle"),
        ({}, {"resources": {"limits": {"nvidia.com/gpu": 1}}}, {}, "limits.nvidia.com/gpu"),
        ({}, {"resources": {"limits": {"memory": "1Qi"}}}, {}, "memory: '1Qi' is no quantity"),
        ({}, {"resources": {"limits": {"cpu": "1e300"}}}, {}, "cpu: '1e300' is no quantity"),
        ({}, {"resources": {"claims": [{"name": "a"}]}}, {}, "resources.claims"),
        ({}, {"volumeMounts": [{"name": "a", "mountPath": "/a"}]}, {}, "'a' is no volume"),
        ({}, {"securityContext": {"capabilities": {"drop": ["ALL"]}}}, {}, "capabilities"),
        ({}, {"securityContext": {"privileged": True}}, {}, "securityContext.privileged"),
        ({}, {"securityContext": {"readOnlyRootFilesystem": True}}, {}, "readOnlyRoot"),
        ({}, {"tty": True}, {}, r"containers\[0\].tty"),
        ({}, {}, {"service": True}, "service: a sandbox has no Service"),
        ({}, {}, {"volumeClaimTemplates": [{"a": 1}]}, "volumeClaimTemplates"),
        ({"volumes": [{"name": "a", "ephemeral": {}}]}, {}, {}, r"volumes\[0\].ephemeral"),
        ({"fieldOfTomorrow": {}}, {}, {}, "spec.fieldOfTomorrow: a sandbox has none"),
        ({}, {}, {"envVarsInjectionPolicy": "Tomorrow"}, "envVarsInjectionPolicy: 'Tomorrow'"),
        ({}, {}, {"networkPolicyManagement": "Tomorrow"}, "Management: 'Tomorrow': expected one"),
        ({}, {}, {"fieldOfTomorrow": 1}, "fieldOfTomorrow: a sandbox has none"),
    ],
)
def test_what_a_sandbox_is_not_is_refused_by_name(
    pod: Json, container: Json, more: Json, word: str
) -> None:
    with pytest.raises(TemplateRefused, match=word):
        read_template(spec(pod, container, **more))


def test_all_that_is_refused_is_named_at_once() -> None:
    with pytest.raises(TemplateRefused, match=r"hostPID: .*; podTemplate.*tty: "):
        read_template(spec({"hostPID": True}, {"tty": True}))


def egress(*rules: Json) -> Json:
    return {"networkPolicy": {"egress": list(rules)}}


@pytest.mark.parametrize(
    ("more", "networks"),
    [
        ({}, PUBLIC),
        ({"networkPolicyManagement": "Unmanaged"}, None),
        ({"networkPolicyManagement": "Unmanaged", **egress()}, None),
        ({"networkPolicy": {}}, ()),
        (egress(), ()),
        (egress({}), ANY),
        (egress({"to": [{"ipBlock": {"cidr": "192.0.2.0/24"}}]}), (Network("192.0.2.0/24"),)),
        (
            egress({"to": [{"ipBlock": {"cidr": "::/0", "except": ["fc00::/7"]}}]}),
            (Network("::/0", ("fc00::/7",)),),
        ),
        (
            egress({"ports": [{"port": 443}, {"port": 8000, "endPort": 8080}]}),
            tuple(Network(one.cidr, (), ((443, 443), (8000, 8080))) for one in ANY),
        ),
        (egress({"ports": [{"protocol": "UDP", "port": 53}]}), ()),
        (
            egress({"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}),
            tuple(Network(one.cidr, (), ((53, 53),)) for one in ANY),
        ),
        (
            egress({"ports": [{"protocol": "TCP"}]}),
            tuple(Network(one.cidr, (), ((1, 65535),)) for one in ANY),
        ),
    ],
)
def test_a_policy_of_egress_says_which_addresses_the_proxy_may_dial(
    more: Json, networks: tuple[Network, ...] | None
) -> None:
    assert read_template(spec(**more)).networks == networks


@pytest.mark.parametrize(
    ("rule", "word"),
    [
        ({"to": [{"podSelector": {"matchLabels": {"a": "b"}}}]}, "podSelector: .* no pods"),
        ({"to": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]}, "namespaceSelector"),
        ({"to": [{"podSelector": {}}]}, "podSelector: .* no pods"),
        ({"to": [{"ipBlock": {"cidr": "nowhere"}}]}, "ipBlock: 'nowhere'"),
        ({"ports": [{"protocol": "UDP", "port": 443}]}, "protocol: UDP"),
        ({"ports": [{"port": "https"}]}, "port: 'https'"),
    ],
)
def test_egress_that_a_proxy_cannot_tell_is_refused(rule: Json, word: str) -> None:
    with pytest.raises(TemplateRefused, match=word):
        read_template(spec(**egress(rule)))


@pytest.mark.parametrize(
    ("policy", "given", "word"),
    [
        ({}, {"B": "2"}, "Disallowed: B"),
        ({"envVarsInjectionPolicy": "Allowed"}, {"A": "2", "B": "3"}, "Allowed: A"),
        ({"envVarsInjectionPolicy": "Allowed"}, {"B": "2"}, ""),
        ({"envVarsInjectionPolicy": "Overrides"}, {"A": "2"}, ""),
        ({}, {}, ""),
    ],
)
def test_a_callers_own_variables_are_what_the_template_allows(
    policy: Json, given: dict[str, str], word: str
) -> None:
    template = spec(None, {"env": [{"name": "A", "value": "1"}]}, **policy)
    if word:
        with pytest.raises(TemplateRefused, match=word):
            read_template(template, given)
    else:
        assert read_template(template, given).environment == {"A": "1", **given}
