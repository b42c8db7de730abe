"""The kinds as models: generated files, conditions, arguments, width of `kubectl get`."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from rose_core import api
from rose_core.api import (
    ConditionType,
    Reason,
    RolloutLease,
    RolloutSlot,
    ServingPool,
    TenantPolicy,
)
from rose_core.api.arguments import ALLOWED, refusals
from rose_core.api.conditions import Statement, find, merge, transitions
from rose_core.api.crd import KINDS, Kind
from rose_core.api.reasons import MEANING, REPLICA_REFUSALS, replica_refusal
from rose_core.api.schema import structural
from rose_core.host_reasons import TROUBLE
from rose_dev import generate
from tests.api.objects import LEASE, POOL, SLOT

ROOT = Path(__file__).parents[2]
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize("process", ["rose_agent.guard.main", "rose_agent.host.main"])
def test_what_runs_on_nodes_starts_without_building_the_models(process: str) -> None:
    code = "import importlib, sys; importlib.import_module(sys.argv[1]); "
    code += "sys.exit('rose_core.api.common' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, process], check=False).returncode == 0


def test_each_name_of_the_package_is_there_and_no_other() -> None:
    assert [name for name in api.__all__ if not hasattr(api, name)] == []
    assert not hasattr(api, "PoolModel")


def test_generated_files_are_current() -> None:
    # The page of metrics is `make check`'s: it changes with every package.
    assert [path for path in generate.drift() if path != "docs/metrics.md"] == []


def test_drift_is_named_and_written_once(tmp_path: Path) -> None:
    written = generate.write(tmp_path)
    assert "crds/servingpools.yaml" in written
    (tmp_path / "crds/servingpools.yaml").write_text("changed by hand")
    assert generate.drift(tmp_path) == ["crds/servingpools.yaml"]
    assert generate.write(tmp_path) == ["crds/servingpools.yaml"]
    assert generate.write(tmp_path) == []


def test_the_charts_copy_follows(tmp_path: Path) -> None:
    (tmp_path / generate.CHART_CRDS).mkdir(parents=True)
    assert str(generate.CHART_CRDS / "rolloutslots.yaml") in generate.write(tmp_path)


def nodes(schema: dict[str, Any], path: str) -> list[tuple[str, dict[str, Any]]]:
    found = [(path, schema)]
    for name, child in schema.get("properties", {}).items():
        found += nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found += nodes(schema[key], f"{path}[]")
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_field_is_described_and_bounded(kind: Kind) -> None:
    for model in filter(None, (kind.spec, kind.status)):
        for path, node in nodes(structural(model), model.__name__):
            if not path.endswith("[]"):
                assert node.get("description"), path
            kind_of = node["type"]
            assert kind_of != "number", f"{path} is a float"
            if kind_of == "string":
                assert "enum" in node or "maxLength" in node, path
            if kind_of == "integer":
                assert {"minimum", "maximum", "format"} <= node.keys(), path
            if kind_of == "array":
                assert {"maxItems", "x-kubernetes-list-type"} <= node.keys(), path
            if kind_of == "object" and "properties" not in node:
                assert "maxProperties" in node, path


# One row of usual cells per kind.
WIDEST = {
    "servingpools": "chat-night-0 Observe 64 Unknown Unknown False LendingEnabled",
    "rolloutleases": "grpo-main 16 16 16 False NoReplicaQualifies 14d",
    "tenantpolicies": "research-night 1000 10000 -1000 false 14d",
    "rolloutslots": "research-grpo-0a1b2c3d grpo-main Releasing grpo@1.1234 False 14d",
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kubectl_get_fits_80_characters(kind: Kind) -> None:
    heads = ["NAME", *(column.name for column in kind.columns if not column.wide)]
    row = WIDEST[kind.plural].split()
    assert len(row) == len(heads)
    width = sum(max(len(head), len(cell)) + 3 for head, cell in zip(heads, row, strict=True)) - 3
    assert width <= 80


def test_samples_are_valid_models() -> None:
    models = {one.__name__: one for one in (ServingPool, RolloutLease, TenantPolicy)}
    samples = sorted((ROOT / "crds/samples").glob("*.yaml"))
    assert len(samples) >= 3
    for sample in samples:
        raw = yaml.safe_load(sample.read_text())
        parsed = models[raw["kind"]].model_validate(raw)
        assert parsed.as_dict()["metadata"]["name"] == raw["metadata"]["name"]


def test_models_read_what_they_write() -> None:
    for model, raw in ((ServingPool, POOL), (RolloutLease, LEASE), (RolloutSlot, SLOT)):
        parsed = model.model_validate(raw)
        assert model.model_validate(parsed.as_dict()) == parsed


def test_every_reason_has_a_meaning_and_agents_words_are_known() -> None:
    assert set(MEANING) == set(Reason)
    assert set(Reason) >= REPLICA_REFUSALS
    assert replica_refusal("") is None
    assert replica_refusal("NoGPU") is Reason.NO_GPU
    assert replica_refusal("SomethingNew") is Reason.OTHER


def test_every_reason_is_used_somewhere() -> None:
    folders = ("rose_core", "operator", "agent")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    text = "\n".join(p.read_text() for p in sources if p.name != "reasons.py")
    of_nodes = REPLICA_REFUSALS | {Reason(word.value) for word in TROUBLE}
    unused = {reason.name for reason in set(Reason) - of_nodes if f".{reason.name}" not in text}
    assert unused == set()


def test_a_conditions_time_moves_only_with_its_status() -> None:
    ready = Statement(ConditionType.READY, False, Reason.NO_REPLICAS, "none")
    first = merge((), [ready], generation=1, now=NOW)
    later = NOW + timedelta(hours=1)
    other = Statement(ConditionType.READY, False, Reason.PAUSED_BY_OWNER)
    (second,) = merge(first, [other], generation=2, now=later)
    assert second.last_transition_time == first[0].last_transition_time
    assert (second.reason, second.observed_generation) == ("PausedByOwner", 2)
    yes = Statement(ConditionType.READY, True, Reason.LENDING_ENABLED)
    (third,) = merge((second,), [yes], generation=2, now=later)
    assert third.last_transition_time == "2026-01-02T04:04:05Z"
    assert transitions(first, (second,)) == (second,)
    assert transitions((third,), (third,)) == ()
    assert find((third,), ConditionType.READY) == third
    assert find((third,), ConditionType.PAUSED) is None


def test_a_moving_message_alone_changes_nothing() -> None:
    def reported(text: str) -> Statement:
        return Statement(
            ConditionType.SERVING_PROTECTED, True, Reason.WITHIN_OBJECTIVE, text, moving=True
        )

    first = merge((), [reported("1 of 100")], generation=1, now=NOW)
    assert merge(first, [reported("2 of 110")], generation=1, now=NOW) == first


def test_a_message_is_cut_to_its_bound() -> None:
    long = Statement(ConditionType.READY, None, Reason.INVALID_SPEC, "x" * 5000)
    (made,) = merge((), [long], generation=1, now=NOW)
    assert len(made.message) == 1024
    assert made.status == "Unknown"


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ({}, True),
        ({"dtype": "bfloat16", "disable-cuda-graph": "", "random-seed": "7"}, True),
        ({"dtype": "bfloat16; rm -rf /"}, False),
        ({"dtype": "bfloat16\n"}, False),
        ({"chunked-prefill-size": "-1"}, False),
        ({"model-path": "/models/other"}, False),
        ({"custom-weight-loader": "evil.module"}, False),
        ({"trust-remote-code": ""}, False),
        ({"host": "0.0.0.0"}, False),
        ({"--dtype": "auto"}, False),
    ],
)
def test_an_engine_argument_is_allowed_by_its_name_and_value(
    arguments: dict[str, str], allowed: bool
) -> None:
    assert (refusals(arguments) == ()) is allowed


def test_nothing_on_the_allow_list_takes_a_path_or_an_address() -> None:
    for name, argument in ALLOWED.items():
        for text in ("/etc/passwd", "http://host:1", "a.b:c", "../x", "$(id)", "--host", "x y"):
            assert not argument.check(text), name
