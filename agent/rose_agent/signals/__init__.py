"""Readers of what serving engines publish about themselves, beside the tap.

- ``reader``: what the guard holds of a replica's reader; ``messages`` is what they say.
- ``confined``: the processes that read, which are not the guard.
- ``http``: ``/metrics`` and the engine's load page.
- ``snapshot``: SGLang's load snapshot in shared memory.
- ``feed``: the same snapshot, pushed over ZeroMQ (``zmtp``).
- ``verify``: compares the tap's request count with the engine's own.

The dialects are in ``rose_core.telemetry.dialects``.
"""
