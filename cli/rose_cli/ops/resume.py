"""``rose resume``: see ``pause``."""

from rose_cli.ops.pause import resume as main

__all__ = ["main"]
