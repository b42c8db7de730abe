"""Which autoscalers of serving would react to rollouts, and whose pods they scale."""

from typing import Any

import pytest

from rose_core.lending.autoscalers import conflicting


def scaler(kind: str = "HorizontalPodAutoscaler", **spec: Any) -> dict[str, Any]:  # noqa: ANN401  # any field
    return {
        "kind": kind,
        "metadata": {"namespace": "s", "name": "chat"},
        "spec": {"scaleTargetRef": {"kind": "Deployment", "name": "chat"}} | spec,
    }


def pods_metric(name: str) -> dict[str, Any]:
    return scaler(metrics=[{"type": "Pods", "pods": {"metric": {"name": name}}}])


def keda(query: str) -> dict[str, Any]:
    return scaler("ScaledObject", triggers=[{"type": "prometheus", "metadata": {"query": query}}])


CONFLICTS = {
    "pods": pods_metric("DCGM_FI_DEV_GPU_UTIL"),
    "object": scaler(metrics=[{"type": "Object", "object": {"metric": {"name": "gpu_util"}}}]),
    "external": scaler(
        metrics=[
            {
                "type": "External",
                "external": {"metric": {"name": "kubernetes.io|container|accelerator|duty_cycle"}},
            }
        ]
    ),
    "keda": keda('avg(DCGM_FI_PROF_GR_ENGINE_ACTIVE{pod=~"chat.*"})'),
}
FINE = {
    "queue": pods_metric("sglang:num_queue_reqs"),
    "cpu": scaler(metrics=[{"type": "Resource", "resource": {"name": "cpu"}}]),
    "ours": keda('sum(rose_pool_serving_running_requests{pool="s/chat"})'),
    "kv": keda("avg(vllm:gpu_cache_usage_perc)"),
    "empty": {"metadata": {"namespace": "s", "name": "x"}, "spec": {}},
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_an_autoscaler_on_figures_of_the_whole_gpu_conflicts(name: str) -> None:
    (found,) = conflicting([CONFLICTS[name]])
    assert found.target == "chat"
    assert found.metrics


@pytest.mark.parametrize("name", FINE)
def test_an_autoscaler_on_figures_of_serving_does_not(name: str) -> None:
    assert conflicting([FINE[name]]) == ()


def test_pods_are_told_by_the_names_that_controllers_make() -> None:
    (found,) = conflicting([CONFLICTS["pods"]])
    for pod in ("chat-7d9f8b6c5d-x2x4z", "chat-x2x4z", "chat-0", "chat-11"):
        assert found.scales("s", pod)
    for namespace, pod in (
        ("other", "chat-0"),
        ("s", "chat"),
        ("s", "chatter-0"),
        ("s", "chat-embed-0"),
        ("s", "chat-embed-7d9f8b6c5d-x2x4z"),
    ):
        assert not found.scales(namespace, pod)
