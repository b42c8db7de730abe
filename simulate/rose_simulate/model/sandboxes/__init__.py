"""Agents' sandboxes on virtual time: a host that decides as production does, and its agents."""
