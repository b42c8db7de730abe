"""The registry of every process that runs on serving nodes.

Sections by room: ``rose_agent.host.metrics`` and ``rose_agent.weightsync.metrics``.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

REGISTRY = CollectorRegistry()
