"""What the chart renders, for the values that matter."""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rose_dev.errors import CommandFailed
from rose_dev.shell import run
from tests.chart.rendering import (
    BATCHES,
    CHART,
    EVERYTHING,
    HELM,
    LENDING,
    RELAY,
    SANDBOXES,
    Object,
    Rendered,
    render,
)

pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not built: rose dev build")

WORKLOADS = {
    "operator": ("Deployment", "rose-operator"),
    "guard": ("DaemonSet", "rose-agent"),
    "tap": ("DaemonSet", "rose-agent"),
    "sleeper": ("DaemonSet", "rose-agent"),
    "engine-host": ("DaemonSet", "rose-engine-host"),
    "weight-sync": ("DaemonSet", "rose-engine-host"),
}


def test_the_default_observes_and_runs_nothing_on_gpus() -> None:
    rendered = render()
    names = {item["metadata"]["name"] for item in rendered.all("DaemonSet")}
    assert names == {"rose-agent"}
    assert rendered.all("PriorityClass") == []
    for item in rendered.objects:
        assert "privileged: true" not in yaml.safe_dump(item)


def test_observing_needs_no_capability_and_little_of_the_node() -> None:
    """Its own folder, and the kubelet's word which pod has which GPU."""
    pod = render().one("DaemonSet", "rose-agent")["spec"]["template"]["spec"]
    assert [item["name"] for item in pod["containers"]] == ["guard"]
    rights = pod["containers"][0]["securityContext"]["capabilities"]
    assert (rights["drop"], rights["add"]) == (["ALL"], [])
    paths = [volume["hostPath"]["path"] for volume in pod["volumes"] if "hostPath" in volume]
    assert paths == ["/run/rose", "/var/lib/kubelet/pod-resources"]
    (asked,) = (
        one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "pod-resources"
    )
    assert asked["readOnly"] is True


def test_without_a_real_driver_the_kubelet_is_not_asked() -> None:
    static = render({"agent": {"devices": "static"}}).one("DaemonSet", "rose-agent")
    assert "pod-resources" not in yaml.safe_dump(static)


@pytest.mark.parametrize(
    ("lends", "asked", "runs"),
    [
        (False, "auto", False),
        (True, "auto", True),
        (False, True, True),
        (True, False, False),
    ],
)
def test_the_tap_runs_where_rose_lends_or_where_it_was_asked_for(
    lends: bool,
    asked: bool | str,
    runs: bool,
) -> None:
    monitoring = {"podMonitor": {"enabled": True}}
    values = {"lending": {"enabled": lends}, "agent": {"tap": {"enabled": asked}}}
    rendered = render({**values, "monitoring": monitoring})
    pod = rendered.one("DaemonSet", "rose-agent")["spec"]["template"]["spec"]
    assert ("tap" in [item["name"] for item in pod["containers"]]) is runs
    monitor = rendered.one("PodMonitor", "rose-agent")["spec"]["podMetricsEndpoints"]
    assert ("tap-http" in [endpoint["port"] for endpoint in monitor]) is runs


def test_one_switch_lends() -> None:
    rendered = render(LENDING)
    pod = rendered.one("DaemonSet", "rose-engine-host")["spec"]["template"]["spec"]
    assert [item["name"] for item in pod["containers"]] == ["engine-host", "weight-sync"]
    assert pod["automountServiceAccountToken"] is False
    assert rendered.one("PriorityClass", pod["priorityClassName"])["value"] < 0


def test_lending_without_a_guard_is_refused() -> None:
    with pytest.raises(CommandFailed, match="without a guard no engine may run"):
        Rendered({**LENDING, "agent": {"enabled": False}})


@pytest.mark.parametrize(
    "values",
    [
        {"lendin": {"enabled": True}},
        {"operator": {"replicas": 0}},
        {"stores": [{"name": "main", "address": "no-port"}]},
        {"agent": {"devices": "amd"}},
        {"agent": {"tap": {"enabled": "maybe"}}},
        {"engineHost": {"modelsPath": "relative"}},
        {"priorityClass": {"value": 1}},
    ],
    ids="-".join,
)
def test_wrong_values_are_refused_with_their_name(values: Object) -> None:
    with pytest.raises(CommandFailed, match="values don't meet the specifications"):
        Rendered(values)


def closed(schema: Object, path: str = "values") -> Iterator[str]:
    """Places of a schema where a misspelt key would be taken for a value."""
    if "properties" in schema and schema.get("additionalProperties") is not False:
        yield path
    for name, child in schema.get("properties", {}).items():
        yield from closed(child, f"{path}.{name}")
    if "items" in schema:
        yield from closed(schema["items"], f"{path}[]")


def test_a_misspelt_key_is_refused_wherever_it_stands() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert list(closed({"properties": {"a": {}}})) == ["values"]
    assert list(closed(schema)) == []


def test_the_chart_is_clean() -> None:
    for values in ({}, EVERYTHING):
        command = [str(HELM), "lint", "--strict", "--kube-version=1.36.3", str(CHART)]
        run([*command, "--values=-"], seconds=60, stdin=json.dumps(values).encode())


NOTES: dict[str, tuple[Object, str]] = {
    "observing": ({}, "Lending is off"),
    "without the tap": ({}, "agent.tap.enabled=true shows latency"),
    "lending": (LENDING, "Lending is on"),
    "no store": (LENDING, "leases cannot name one yet"),
    "no encryption": ({"tls": {"enabled": False}}, "cross the network in the clear"),
    "machines without GPUs": ({"agent": {"devices": "static"}}, "not from the driver"),
    "kinds that go": ({"crds": {"keep": False}}, "CustomResourceDefinitions go when"),
}


@pytest.mark.parametrize("case", NOTES)
def test_the_notes_say_what_was_installed(case: str, tmp_path: Path) -> None:
    values, wanted = NOTES[case]
    # Notes are rendered for an installation only, so they travel in an object here.
    chart = shutil.copytree(CHART, tmp_path / "rose")
    notes = chart / "templates" / "NOTES.txt"
    inside = '{{ define "notes" }}' + notes.read_text() + "{{ end }}"
    outside = "kind: ConfigMap\nmetadata: {name: notes}\ndata: {text: {{ include "
    carried = outside + '"notes" . | toJson }}}\n'
    notes.with_name("notes.yaml").write_text(inside + carried)
    text = Rendered(values, chart=chart).one("ConfigMap", "notes")["data"]["text"]
    assert wanted in text
    assert "helm test rose --namespace rose-system" in text
    # A command that names an object works whatever namespace the reader's context has.
    named = [line for line in text.splitlines() if " NAME" in line]
    assert named
    assert [line for line in named if "--namespace" not in line] == []


def test_two_stores_of_one_name_are_refused() -> None:
    store = {"name": "main", "address": "a:1"}
    with pytest.raises(CommandFailed, match='two are called "main"'):
        Rendered({"stores": [store, store]})


def test_stores_reach_the_operator() -> None:
    rendered = render({"stores": [{"name": "main", "address": "weights.research.svc:7446"}]})
    data = rendered.one("ConfigMap", "rose-config")["data"]
    assert yaml.safe_load(data["stores.yaml"]) == {"main": "weights.research.svc:7446"}


READ_ONCE: dict[str, tuple[Object, str]] = {
    "store": ({"stores": [{"name": "main", "address": "a:1"}]}, "stores.yaml"),
    "relay": ({"relay": RELAY}, "stores.yaml"),
    "sandboxes": ({"sandboxes": SANDBOXES}, "router-template.yaml"),
    "batches": ({"batches": BATCHES}, "router-template.yaml"),
    "pull secret": ({"imagePullSecrets": [{"name": "mine"}]}, "router-template.yaml"),
    "template": ({"router": {"template": {"podLabels": {"a": "b"}}}}, "router-template.yaml"),
}


@pytest.mark.parametrize("case", READ_ONCE)
def test_whatever_changes_what_the_operator_reads_once_restarts_it(case: str) -> None:
    values, file = READ_ONCE[case]

    def stamp(rendered: Rendered) -> str:
        pod = rendered.one("Deployment", "rose-operator")["spec"]["template"]
        found: str = pod["metadata"]["annotations"]["rose-gpu.dev/configuration"]
        return found

    before, after = render(), render(values)
    files = [one.one("ConfigMap", "rose-config")["data"][file] for one in (before, after)]
    assert files[0] != files[1]
    assert stamp(before) != stamp(after)


def test_what_the_operator_does_not_read_does_not_restart_it() -> None:
    pods = [
        render(values).one("Deployment", "rose-operator")["spec"]["template"]
        for values in ({}, {"agent": {"staticGpus": [{"uuid": "GPU-0", "memoryBytes": 1}]}})
    ]
    assert pods[0] == pods[1]


def test_crds_are_the_generated_ones_and_stay_on_uninstall() -> None:
    generated = sorted((CHART.parents[1] / "crds").glob("*.yaml"))
    assert len(generated) == len(render().all("CustomResourceDefinition"))
    for path in generated:
        assert path.read_text() == (CHART / "crd-files" / path.name).read_text(), "make generate"
        wanted = yaml.safe_load(path.read_text())
        found = render().one("CustomResourceDefinition", wanted["metadata"]["name"])
        assert found["spec"] == wanted["spec"]
        assert found["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_crds_can_be_left_out_or_go_on_uninstall() -> None:
    assert render({"crds": {"install": False}}).all("CustomResourceDefinition") == []
    going = render({"crds": {"keep": False}}).all("CustomResourceDefinition")
    assert len(going) == len(render().all("CustomResourceDefinition"))
    for crd in going:
        assert "annotations" not in crd["metadata"]


def test_a_rendering_holds_no_secret_and_is_the_same_every_time() -> None:
    """Argo CD and Flux render again and again, and cannot look into a cluster."""
    first, second = Rendered(EVERYTHING), Rendered(EVERYTHING)
    assert first.objects == second.objects
    secrets = {item["metadata"]["name"]: item for item in first.all("Secret")}
    own = {"rose-authority", "rose-tls", "rose-token"}
    own |= {"rose-node-authority", "rose-router-authority"}
    assert set(secrets) == own
    assert all(not {"data", "stringData"} & set(item) for item in secrets.values())
    (rule,) = [
        r for role in first.all("Role") for r in role["rules"] if "secrets" in r["resources"]
    ]
    assert set(rule["resourceNames"]) == own
    assert rule["verbs"] == ["get", "update"]


def test_where_others_make_the_secrets_the_operator_may_touch_none() -> None:
    others: Object = {
        "token": {"existingSecret": "mine"},
        "tls": {
            "source": "existing",
            "existingSecret": "pair",
            "nodes": {"existingSecret": "company"},
            "routers": {"existingSecret": "routers"},
        },
    }
    rendered = render(others)
    assert rendered.all("Secret") == []
    roles = [*rendered.all("Role"), *rendered.all("ClusterRole")]
    assert "secrets" not in {
        name for role in roles for rule in role["rules"] for name in rule["resources"]
    }
    arguments = rendered.container("Deployment", "rose-operator", "operator")["args"]
    assert not [word for word in arguments if word.startswith("--own-")]


def test_an_existing_secret_takes_the_place_of_the_operators_own() -> None:
    rendered = render({**LENDING, "token": {"existingSecret": "mine"}})
    assert "rose-token" not in {item["metadata"]["name"] for item in rendered.all("Secret")}
    for kind, name in set(WORKLOADS.values()):
        volumes = rendered.one(kind, name)["spec"]["template"]["spec"]["volumes"]
        keys = [{"key": "token", "path": "token"}]
        assert {"name": "token", "secret": {"secretName": "mine", "items": keys}} in volumes


SLEEPING: dict[str, object] = {"agent": {"wholeReplica": {"enabled": True}}}
CAPABILITIES = {
    "guard": {"SYS_PTRACE", "DAC_OVERRIDE", "KILL"},
    "tap": {"NET_RAW", "SYS_ADMIN", "SYS_PTRACE", "DAC_OVERRIDE"},
    "sleeper": {"KILL"},
    "weight-sync": {"DAC_OVERRIDE"},
    "operator": set(),
}


@pytest.mark.parametrize("name", CAPABILITIES)
def test_each_container_has_just_its_rights(name: str) -> None:
    container = render({**LENDING, **SLEEPING}).container(*WORKLOADS[name], name)
    context = container["securityContext"]
    assert set(context["capabilities"].get("add", [])) == CAPABILITIES[name]
    assert context["capabilities"]["drop"] == ["ALL"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    filtered = context if name != "operator" else pod_context("operator")
    assert filtered["seccompProfile"] == {"type": "RuntimeDefault"}
    page = (CHART.parents[1] / "docs" / "privileges.md").read_text()
    for capability in CAPABILITIES[name]:
        assert capability in page


def pod_context(name: str) -> Object:
    found: Object = render({**LENDING, **SLEEPING}).one(*WORKLOADS[name])
    context: Object = found["spec"]["template"]["spec"]["securityContext"]
    return context


def test_the_operator_is_nobody() -> None:
    assert pod_context("operator")["runAsNonRoot"] is True


def test_no_role_holds_a_wildcard_and_nobody_else_writes_slots() -> None:
    rendered = render(LENDING)
    for kind in ("ClusterRole", "Role"):
        for role in rendered.all(kind):
            for rule in role["rules"]:
                assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"]
                writes = set(rule["verbs"]) - {"get", "list", "watch"}
                if "rolloutslots" in rule["resources"] and writes:
                    name = role["metadata"]["name"]
                    # The hook only deletes, once nobody grants any more.
                    assert name == "rose-operator" or (name, writes) == (
                        "rose-give-back",
                        {"delete"},
                    )
                    assert kind == "Role"


def test_a_frozen_engine_does_not_keep_its_pod_from_ending() -> None:
    container = render(LENDING).container("DaemonSet", "rose-engine-host", "engine-host")
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == ["rose", "engine-host", "--rundir=/run/rose", "--thaw-all"]


def test_engines_from_the_node_are_mounted_where_they_are() -> None:
    paths = [{"path": "/opt/engine"}, {"path": "/usr/bin/lscpu", "type": "File"}]
    values = {**LENDING, "engineHost": {"hostPaths": paths, "enginePython": "/opt/engine/python"}}
    rendered = render(values)
    container = rendered.container("DaemonSet", "rose-engine-host", "engine-host")
    mounts = {item["mountPath"]: item for item in container["volumeMounts"]}
    assert mounts["/opt/engine"]["readOnly"] is True
    assert "--engine-python=/opt/engine/python" in container["args"]
    volumes = rendered.one("DaemonSet", "rose-engine-host")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "host-1", "hostPath": {"path": "/usr/bin/lscpu", "type": "File"}} in volumes


PARSERS: dict[str, tuple[str, str]] = {
    "operator": ("rose_operator.settings", "_parser"),
    "guard": ("rose_agent.guard.main", "arguments"),
    "tap": ("rose_agent.tap.main", "arguments"),
    "sleeper": ("rose_agent.sleeper.sleepers", "parser"),
    "engine-host": ("rose_agent.host.options.arguments", "parser"),
    "weight-sync": ("rose_agent.weightsync.main", "parser"),
}


@pytest.mark.parametrize("name", PARSERS)
def test_every_process_understands_its_arguments(name: str) -> None:
    module, function = PARSERS[name]
    parser: argparse.ArgumentParser = getattr(importlib.import_module(module), function)()
    values = {**LENDING, "agent": {"devices": "static", "wholeReplica": {"enabled": True}}}
    container = render(values).container(*WORKLOADS[name], name)
    arguments: list[str] = container["args"]
    parsed = vars(parser.parse_args(arguments))
    assert len(parsed) >= len(arguments)
    hook = container.get("lifecycle")
    if hook:
        parser.parse_args(hook["preStop"]["exec"]["command"][2:])


def test_the_sleeper_runs_where_it_is_asked_for_and_has_time_to_wake_serving() -> None:
    for asked, seconds in ((False, 15), (True, 180)):
        values = {**LENDING, "agent": {"wholeReplica": {"enabled": asked}}}
        pod = render(values).one("DaemonSet", "rose-agent")["spec"]["template"]["spec"]
        assert ("sleeper" in [item["name"] for item in pod["containers"]]) is asked
        assert pod["terminationGracePeriodSeconds"] == seconds


def test_turns_are_encrypted_wherever_the_other_hops_are() -> None:
    for enabled in (True, False):
        values = {**LENDING, "tls": {"enabled": enabled}}
        host = render(values).container("DaemonSet", "rose-engine-host", "engine-host")
        assert ("--data-tls" in host["args"]) is enabled


def limit_of(values: Object, name: str) -> str | None:
    container = render(values).container(*WORKLOADS[name], name)
    found: str | None = container["resources"].get("limits", {}).get("memory")
    return found


def test_limits_of_memory_follow_from_what_is_held() -> None:
    """As docs/install.md says: engines and their /dev/shm; a version for each engine."""
    assert limit_of(LENDING, "engine-host") == f"{8 * 65536 + 8 * 1024 + 1024}Mi"
    assert limit_of(LENDING, "weight-sync") == f"{8 * 16 * 1024 + 1024}Mi"
    host = {"enginesPerNode": 2, "engines": {"memoryMebibytes": 1000}}
    two = {**LENDING, "engineHost": {**host, "weightSync": {"versionGibibytes": 3}}}
    assert limit_of(two, "engine-host") == f"{2 * 1000 + 2 * 1024 + 1024}Mi"
    assert limit_of(two, "weight-sync") == f"{2 * 3 * 1024 + 1024}Mi"
    arguments = render(two).container("DaemonSet", "rose-engine-host", "engine-host")["args"]
    assert "--engine-memory-mib=1000" in arguments


def test_keys_of_leases_lie_in_memory_that_counts_to_the_hosts() -> None:
    keys: Object = {**LENDING, "engineHost": {"kvStoreGibibytes": 32}}
    assert limit_of(keys, "engine-host") == f"{8 * 65536 + 8 * 1024 + 32 * 1024 + 1024}Mi"
    container = render(keys).container("DaemonSet", "rose-engine-host", "engine-host")
    assert {"--kv-store=/run/rose-keys", "--kv-store-mib=32768"} <= set(container["args"])
    assert {"name": "keys", "mountPath": "/run/rose-keys"} in container["volumeMounts"]
    plain = render(LENDING).container("DaemonSet", "rose-engine-host", "engine-host")["args"]
    assert not [word for word in plain if word.startswith("--kv-store")]
    own: Object = {"kvStoreGibibytes": 32, "engines": {"firstUser": 0}}
    with pytest.raises(CommandFailed, match="could read other leases' keys"):
        render({**LENDING, "engineHost": own})


def test_keys_leave_their_node_where_the_platform_names_a_pool() -> None:
    pool: Object = {"master": "mooncake.store:50051"}
    named: Object = {"kvStoreGibibytes": 32, "kvPool": pool}
    words = render({**LENDING, "engineHost": named}).container(
        "DaemonSet", "rose-engine-host", "engine-host"
    )["args"]
    assert [word for word in words if word.startswith("--kv-pool")] == [
        *("--kv-pool=mooncake.store:50051", "--kv-pool-protocol=tcp")
    ]
    plain = render({**LENDING, "engineHost": {"kvStoreGibibytes": 32}})
    args = plain.container("DaemonSet", "rose-engine-host", "engine-host")["args"]
    assert not [word for word in args if word.startswith("--kv-pool")]
    with pytest.raises(CommandFailed, match=r"kvPool.master needs engineHost.kvStoreGibibytes"):
        render({**LENDING, "engineHost": {"kvPool": pool}})
    closed: Object = {**LENDING, "engineHost": named, "networkPolicy": {"enabled": True}}
    with pytest.raises(CommandFailed, match=r"name its master's .* in networkPolicy.kvPool"):
        render(closed)
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "store"}}}
    closed["networkPolicy"] = {"enabled": True, "kvPool": [peer]}
    policy = render(closed).one("NetworkPolicy", "rose-engine-host")["spec"]
    assert {"to": [peer]} in policy["egress"]
    assert not [rule for rule in policy["ingress"] if peer in rule["from"]]


KV_POOL: Object = {**LENDING, "kvPool": {"enabled": True}}


def test_one_value_runs_a_pool_of_keys_and_has_all_engine_hosts_use_it() -> None:
    rendered = render({**KV_POOL, "networkPolicy": {"enabled": True}})
    host = rendered.container("DaemonSet", "rose-engine-host", "engine-host")
    assert {
        *("--kv-pool=rose-kv-pool.rose-system.svc:50051", "--kv-pool-protocol=tcp"),
        *("--kv-store=/run/rose-keys", "--kv-store-mib=32768"),
    } <= set(host["args"])
    service = rendered.one("Service", "rose-kv-pool")["spec"]
    master = rendered.one("Deployment", "rose-kv-pool")["spec"]
    assert service["selector"].items() <= master["template"]["metadata"]["labels"].items()
    assert service["ports"][0]["port"] == 50051
    client = rendered.container("Deployment", "rose-kv-memory", "kv-memory")
    words = client["command"]
    assert words[0] == "mooncake_client"
    assert words[words.index("-master_server_address") + 1] == "rose-kv-pool.rose-system.svc:50051"
    assert words[words.index("-global_segment_size") + 1] == "64 GB"
    assert client["resources"]["limits"]["memory"] == "67584Mi"
    egress = rendered.one("NetworkPolicy", "rose-engine-host")["spec"]["egress"]
    for name in ("rose-kv-pool", "rose-kv-memory"):
        here = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": name}}}
        assert {"to": [here]} in egress


def test_nobody_but_engine_hosts_reaches_the_pool_of_keys_that_the_chart_runs() -> None:
    rendered = render(KV_POOL)  # also where the other ports stay open
    callers = {"rose-gpu.dev/engine-host", "app.kubernetes.io/name"}
    for name in ("rose-kv-pool", "rose-kv-memory"):
        policy = rendered.one("NetworkPolicy", name)["spec"]
        pods = rendered.one("Deployment", name)["spec"]["template"]["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= pods.items()
        peers = [peer for rule in policy["ingress"] for peer in rule["from"]]
        assert {key for peer in peers for key in peer["podSelector"]["matchLabels"]} == callers
        assert not [peer for peer in peers if "namespaceSelector" in peer]
    assert not [one for one in render(LENDING).objects if "kv-" in one["metadata"]["name"]]


def test_a_pool_of_keys_takes_the_programs_and_the_room_that_are_named() -> None:
    named: Object = {"kvStoreGibibytes": 8, "kvPool": {"python": "/opt/mooncake/bin/python"}}
    rendered = render({**KV_POOL, "engineHost": named})
    args = rendered.container("DaemonSet", "rose-engine-host", "engine-host")["args"]
    assert {"--kv-store-mib=8192", "--kv-pool-python=/opt/mooncake/bin/python"} <= set(args)
    for name, program in (("kv-pool", "mooncake_master"), ("kv-memory", "mooncake_client")):
        command = rendered.container("Deployment", f"rose-{name}", name)["command"]
        assert command[0] == f"/opt/mooncake/bin/{program}"
    own: Object = {"kvPool": {"master": "mooncake.store:50051"}, "kvStoreGibibytes": 8}
    with pytest.raises(CommandFailed, match="unset one of them"):
        render({**KV_POOL, "engineHost": own})
    with pytest.raises(CommandFailed, match=r"without lending\.enabled"):
        render({"kvPool": {"enabled": True}})


def test_limits_that_are_written_count_and_engines_without_one_leave_their_host_none() -> None:
    own = {"limits": {"memory": "9Gi", "cpu": "2"}}
    written = {**LENDING, "engineHost": {"resources": own, "weightSync": {"resources": own}}}
    for name in ("engine-host", "weight-sync"):
        assert limit_of(written, name) == "9Gi"
    free: Object = {"engines": {"memoryMebibytes": 0}, "weightSync": {"versionGibibytes": 0}}
    for name in ("engine-host", "weight-sync"):
        assert limit_of({**LENDING, "engineHost": free}, name) is None
    cpu: Object = {"resources": {"limits": {"cpu": "2"}}}
    container = render({**LENDING, "engineHost": cpu}).container(
        *WORKLOADS["engine-host"], "engine-host"
    )
    assert container["resources"]["limits"].keys() == {"cpu", "memory"}


def test_every_scratch_volume_has_a_size() -> None:
    sizes = {}
    for kind in ("Deployment", "DaemonSet", "StatefulSet"):
        for item in render({**EVERYTHING, "mps": {"enabled": True}}).all(kind):
            for volume in item["spec"]["template"]["spec"]["volumes"]:
                if "emptyDir" in volume:
                    name = f"{item['metadata']['name']}/{volume['name']}"
                    sizes[name] = volume["emptyDir"].get("sizeLimit")
    assert sizes
    assert [name for name, size in sizes.items() if size is None] == []
    assert sizes["rose-engine-host/scratch"] == "64Gi"
    shared = render(LENDING).one("DaemonSet", "rose-engine-host")["spec"]["template"]["spec"]
    (memory,) = (one for one in shared["volumes"] if one["name"] == "shared-memory")
    assert memory["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


def test_every_value_is_explained() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    previous = ""
    for number, line in enumerate(lines, 1):
        text = line.strip()
        key = text and not text.startswith(("#", "-"))
        if key and not text.endswith(":") and not line.startswith("      requests"):
            owner = "requests" in text or "limits" in text or "operator: Exists" in text
            assert owner or previous.startswith("# --"), f"values.yaml:{number}: {text}"
        previous = text


def test_the_schema_knows_every_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def known(value: object, schema: Object, path: str) -> None:
        properties = schema.get("properties")
        if isinstance(value, dict) and properties is not None:
            assert set(value) <= set(properties), path
            for key, child in value.items():
                known(child, properties[key], f"{path}.{key}")

    known(values, schema, "values")
    assert Path(CHART / "Chart.yaml").exists()


def test_runs_of_teams_are_kept_apart_by_the_list_of_stores() -> None:
    runs = {"team-a": ["a-*"]}
    store = {"name": "main", "address": "a:1", "runs": runs}
    relay = {"enabled": True, "upstream": "s:1", "storeName": "relay", "runs": runs}
    rendered = render(
        {
            "stores": [store],
            "relay": relay,
            "router": {"turnSecrets": True, "lentWeight": 0.5},
        }
    )
    found = yaml.safe_load(rendered.one("ConfigMap", "rose-config")["data"]["stores.yaml"])
    assert found["main"] == {"address": "a:1", "runs": runs}
    assert found["relay"]["runs"] == runs
    arguments = rendered.container("Deployment", "rose-operator", "operator")["args"]
    listed = {"--router-authentication=enforced", "--turn-secrets", "--lent-weight=0.5"}
    assert listed <= set(arguments)


def test_a_cluster_of_one_team_may_let_anybody_call() -> None:
    rendered = render({"router": {"authentication": False}})
    arguments = rendered.container("Deployment", "rose-operator", "operator")["args"]
    assert "--router-authentication=off" in arguments
