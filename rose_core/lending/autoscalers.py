"""Autoscalers of serving that would react to borrowed load, from their objects as they stand.

A rollout engine raises the utilisation of a GPU, and with it every figure that a device exporter
takes from the GPU as a whole. An autoscaler on such a figure would add serving replicas because of
rollouts, so a pool with one is not lent from. Figures of the serving engine itself (requests,
queue, KV use) do not rise and are fine.

A HorizontalPodAutoscaler or KEDA's ScaledObject names a workload; the workload's pods carry its
name, then what the controller has appended.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Raw = Mapping[str, Any]

# What exporters call figures of a whole GPU (DCGM, GKE, NVML exporters, AMD's).
_OF_THE_GPU = re.compile(
    r"DCGM_FI_(DEV_(GPU_UTIL|MEM_COPY_UTIL|FB_USED|FB_FREE|POWER_USAGE|SM_CLOCK|GPU_TEMP)"
    r"|PROF_[A-Z0-9_]+)"
    r"|duty_cycle|gpu_utili[sz]ation|gpu_util\b|gpu_memory_us|gpu_power|nvidia_smi_",
    re.IGNORECASE,
)
# <deployment>-<replica set>-<pod>, <replica set>-<pod>, <stateful set>-<number>; controllers take
# generated parts from these characters alone.
_SAFE = "[bcdfghjklmnpqrstvwxz2456789]"
_APPENDED = re.compile(rf"^((-{_SAFE}{{6,10}})?-{_SAFE}{{5}}|-\d{{1,5}})$")


@dataclass(frozen=True)
class Autoscaler:
    """One autoscaler that follows figures of whole GPUs."""

    kind: str
    namespace: str
    name: str
    target: str
    metrics: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.name} scales {self.target} on {', '.join(self.metrics)}"

    def scales(self, namespace: str, pod: str) -> bool:
        """Whether a pod of this name belongs to its workload."""
        ours = namespace == self.namespace and pod.startswith(self.target)
        return ours and bool(_APPENDED.match(pod.removeprefix(self.target)))


def conflicting(raws: Iterable[Raw]) -> tuple[Autoscaler, ...]:
    """Those of these objects that follow figures of whole GPUs."""
    return tuple(found for raw in raws if (found := _read(raw)) is not None)


def _read(raw: Raw) -> Autoscaler | None:
    spec = raw.get("spec") or {}
    target = (spec.get("scaleTargetRef") or {}).get("name")
    metrics = sorted({metric for text in _texts(spec) for metric in _named(text)})
    if not target or not metrics:
        return None
    metadata = raw["metadata"]
    return Autoscaler(
        str(raw.get("kind") or "HorizontalPodAutoscaler"),
        metadata["namespace"],
        metadata["name"],
        target,
        tuple(metrics),
    )


def _texts(spec: Raw) -> Iterable[str]:
    """Where an autoscaler names what it follows."""
    for metric in spec.get("metrics") or ():
        source = metric.get(_field(metric.get("type", ""))) or {}
        yield str((source.get("metric") or {}).get("name", ""))
        yield str(source.get("name", ""))
    for trigger in spec.get("triggers") or ():
        metadata = trigger.get("metadata") or {}
        yield str(metadata.get("query", ""))
        yield str(metadata.get("metricName", ""))


def _field(kind: str) -> str:
    return kind[:1].lower() + kind[1:]


def _named(text: str) -> Iterable[str]:
    """The metric names in a text or query that speak of the whole GPU."""
    return (
        metric for metric in re.findall(r"[A-Za-z_:][\w:]*", text) if _OF_THE_GPU.search(metric)
    )
