"""Sandboxes: runs an agent's world, saves it and gives it back; start at ``runtimes.runtime``."""
