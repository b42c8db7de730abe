"""A bearer token that its file may bring late, or change: it is read at each call."""

from __future__ import annotations

import logging
from pathlib import Path

from rose_wire.flags import token

LOG = logging.getLogger(__name__)


class TokenFile:
    """What the file holds now.

    A Secret that is mounted changes in a running pod. Whoever reads it once shows, or asks for, a
    word that nobody else has any more.

    Args:
        path: of the file; None: there is no token.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._unreadable = False

    def __call__(self) -> str:
        """The token; empty while the file cannot be read, which is said once."""
        try:
            found = token(self._path)
        except OSError as error:
            if not self._unreadable:
                LOG.warning("no token in %s: %s", self._path, error.strerror)
            self._unreadable = True
            return ""
        if self._unreadable:
            LOG.info("%s has a token", self._path)
        self._unreadable = False
        return found
