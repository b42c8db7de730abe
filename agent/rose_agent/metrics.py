"""The registry of every process that runs on serving nodes.

Each room declares its own in its ``metrics`` module.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

REGISTRY = CollectorRegistry()
