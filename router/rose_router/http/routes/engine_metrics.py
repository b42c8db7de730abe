"""The lease's gauges under the names of vLLM and SGLang, for trainers and dashboards that read one.

A lease is told as one engine. prime-rl sizes its episodes by ``vllm:`` gauges, slime's dashboards
and routers read ``sglang:`` ones.

| told | is |
|---|---|
| running, waiting | turns of this replica that an engine computes, and those in its queue |
| KV capacity | of the engines whose gate is open; those that serving has closed would mislead |
| KV usage | tokens of running turns, of that capacity |
| preemptions | turns that had to leave an engine |
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rose_router import metrics
from rose_router.turns.service import Service

_Load = tuple[int, int, int, int]
_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


def registry(service: Service) -> CollectorRegistry:
    """The process's own metrics, and the lease as one engine."""
    made = CollectorRegistry()
    made.register(_Both(service))
    return made


class _Both(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets."""
        yield from metrics.REGISTRY.collect()
        load = _load(self._service)
        yield from _vllm(self._service, load)
        yield from _sglang(self._service, load)


def _vllm(service: Service, load: _Load) -> Iterator[Metric]:
    running, waiting, capacity, used = load
    totals = service.ledger.totals
    labels = {"engine": "0", "model_name": service.settings.model}
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    rows: list[tuple[_Family, str, str, float, dict[str, str]]] = [
        (gauge, "num_requests_running", "Turns that an engine computes.", running, {}),
        (gauge, "num_requests_waiting", "Turns in the queue.", waiting, {}),
        (gauge, "num_requests_waiting_by_reason", "The same.", waiting, {"reason": "capacity"}),
        (gauge, "kv_cache_usage_perc", "Share of KV tokens in use.", used / (capacity or 1), {}),
        (counter, "num_preemptions", "Turns that left an engine.", totals.moves, {}),
        (counter, "prompt_tokens", "Tokens of prompts.", totals.prompt_tokens, {}),
        (counter, "generation_tokens", "Tokens sampled.", totals.tokens, {}),
    ]
    if capacity:
        block = {"block_size": "1", "num_gpu_blocks": str(capacity)}
        rows.append((gauge, "cache_config_info", "Size of the KV cache.", 1, block))
    for kind, name, text, value, more in rows:
        yield _family(kind, f"vllm:{name}", text, value, {**labels, **more})


def _sglang(service: Service, load: _Load) -> Iterator[Metric]:
    running, waiting, capacity, used = load
    totals = service.ledger.totals
    labels = {"model_name": service.settings.model}
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    for kind, name, text, value in (
        (gauge, "num_running_reqs", "Turns that an engine computes.", running),
        (gauge, "num_queue_reqs", "Turns in the queue.", waiting),
        (gauge, "num_used_tokens", "KV tokens in use.", used),
        (gauge, "max_total_num_tokens", "KV tokens.", capacity),
        (gauge, "token_usage", "Share of KV tokens in use.", used / (capacity or 1)),
        (counter, "prompt_tokens", "Tokens of prompts.", totals.prompt_tokens),
        (counter, "generation_tokens", "Tokens sampled.", totals.tokens),
    ):
        yield _family(kind, f"sglang:{name}", text, value, labels)


def _load(service: Service) -> _Load:
    """Turns running and waiting; KV tokens that there are, and that are in use."""
    live = list(service.ledger)
    legs = [turn for turn in live if turn.leg is not None]
    capacity = sum(engine.update.kv_tokens for engine in service.fleet if engine.gate_open)
    used = sum(
        len(turn.request.prompt) + turn.held + (turn.leg.placed if turn.leg is not None else 0)
        for turn in legs
    )
    return len(legs), len(live) - len(legs), capacity, min(used, capacity)


def _family(kind: _Family, name: str, text: str, value: float, labels: dict[str, str]) -> Metric:
    made = kind(name, text, labels=list(labels))
    made.add_metric(list(labels.values()), value)
    return made
