"""Decisions about GPUs: what may be lent of one, and whether what was taken back is really free.

Pure functions over figures that ``rose_agent.devices`` reads. ``None`` is unknown everywhere, and
unknown is never free, never healthy, never enough.
"""
