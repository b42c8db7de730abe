"""Readers of what serving engines publish about themselves, beside the tap.

- ``http``: ``/metrics`` and the engine's load page.
- ``snapshot``: SGLang's load snapshot in shared memory.
- ``feed``: the same snapshot, pushed over ZeroMQ (``zmtp``).
- ``verify``: compares the tap's request count with the engine's own.

The dialects are in ``rose_core.telemetry.dialects``.
"""
