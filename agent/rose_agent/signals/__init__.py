"""Readers of what serving engines publish about themselves, beside the tap.

- ``http``: ``/metrics`` and ``/v1/loads``.
- ``snapshot``: SGLang's load snapshot in shared memory.
- ``verify``: compares the tap's request count with the engine's own.

The dialects are in ``rose_core.telemetry.dialects``.
"""
