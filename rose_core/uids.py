"""Types of the uids that travel: a swapped pair is an error of types, where all are text.

Apart from ``identity``: the check of a bare GPU machine has the standard library alone.
"""

from __future__ import annotations

from typing import NewType

LeaseUid = NewType("LeaseUid", str)
"""Kubernetes' uid of a RolloutLease; one deleted and made anew has another."""

SlotUid = NewType("SlotUid", str)
"""Kubernetes' uid of a RolloutSlot, or the name of a dedicated engine on its node."""

GpuUuid = NewType("GpuUuid", str)
"""NVIDIA's name of a GPU, ``GPU-...``; in a static list whatever stands there."""

PodUid = NewType("PodUid", str)
"""Kubernetes' uid of a serving pod: what telemetry, grants and the planner call a replica."""
