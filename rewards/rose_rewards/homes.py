"""Where workers' homes are, and who removes them when the gateway was killed.

All homes of a gateway lie in one folder ``rose-reward-...`` of the temporary one, on which it holds
a lock for as long as it lives. A lock ends with its process: the next gateway that starts removes
every such folder of its own user that nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

LOG = logging.getLogger(__name__)
_PREFIX = "rose-reward-"


@contextlib.contextmanager
def homes(root: Path | None = None) -> Iterator[Path]:
    """A folder for workers' homes, which others may pass through and not list.

    Args:
        root: above it; None = the system's temporary folder.

    Raises:
        OSError: it cannot be made.
    """
    above = Path(tempfile.gettempdir()) if root is None else root
    sweep(above)
    folder, lock = _held(above)
    try:
        folder.chmod(0o711)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep(above: Path) -> list[Path]:
    """Remove what gateways left that were killed; says what."""
    removed = []
    for folder in above.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # no folder, or nobody's that we may look into
        try:
            if os.fstat(lock).st_uid != os.geteuid():
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        except BlockingIOError:
            continue  # its gateway lives
        finally:
            os.close(lock)
    if removed:
        LOG.info("removed %d folders of gateways that were killed", len(removed))
    return removed


def _held(above: Path) -> tuple[Path, int]:
    """A new folder that is locked; one that a sweep took in between is let go."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=above))
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        if folder.exists():
            return folder, lock
        os.close(lock)
