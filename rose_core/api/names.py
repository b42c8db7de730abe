"""Patterns of names and the modes of a pool: what those need of the kinds who read no object."""

from __future__ import annotations

from enum import StrEnum

DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
MODEL_NAME = r"^[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?$"


class PoolMode(StrEnum):
    """What ROSE may do with the pool's replicas."""

    OBSERVE = "Observe"
    LEND = "Lend"
    PAUSED = "Paused"
