"""``rose models``: which node has which model, and who may lease it."""

from typing import Any

from rose_cli.ops.models import borrowers, model_rows, node_rows, size_text
from rose_core.api import ServingPool, TenantPolicy
from rose_core.api.poolstatus import PoolModel
from tests.api.objects import POOL, changed

HELD: dict[str, Any] = {
    "name": "qwen3-8b",
    "digest": "abc",
    "sizeBytes": 17_179_869_184,
    "nodes": ["n1", "n2"],
    "missingNodes": 1,
}


def policy(name: str, **spec: object) -> TenantPolicy:
    return TenantPolicy.model_validate({"metadata": {"name": name}, "spec": spec})


def held() -> list[tuple[ServingPool, PoolModel]]:
    pool = ServingPool.model_validate(changed(POOL, {"status": {"models": [HELD]}}))
    return [(pool, model) for model in pool.status.models]


def test_a_model_is_told_with_its_nodes_and_those_that_lack_it() -> None:
    (row,) = model_rows(held(), [policy("a", namespaces={"names": ["research"]})])
    assert row == {
        "model": "qwen3-8b",
        "size": "16.0 GiB",
        "digest": "abc",
        "pool": "default/chat",
        "nodes": "2 of 3",
        "leased by": "research",
    }
    assert [row["node"] for row in node_rows(held())] == ["n1", "n2"]


def test_who_may_lease_it_is_the_policies_word() -> None:
    policies = [
        policy("a", namespaces={"names": ["research"]}, models=["qwen*"]),
        policy("b", namespaces={"matchLabels": {"rl": "yes"}}, pools=["default/*"]),
        policy("c", namespaces={"names": ["others"]}, models=["llama*"]),
        policy("d", namespaces={"names": ["far"]}, pools=["far/*"]),
    ]
    assert borrowers("qwen3-8b", "default/chat", policies) == "research, rl=yes"
    assert borrowers("qwen3-8b", "default/chat", []) == ""
    assert borrowers("qwen3-8b", "default/chat", None) == "?", "who may not read them"


def test_sizes_are_told_as_people_say_them() -> None:
    assert [size_text(n) for n in (12, 2048, 5 << 20, 3 << 50)] == [
        "12 B",
        "2.0 KiB",
        "5.0 MiB",
        "3072.0 TiB",
    ]
