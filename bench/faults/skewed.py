"""``python -m bench.faults.skewed FILE VERB ...``: ``rose`` with a wall clock put wrong by a file.

The file holds seconds; it may be written while the process runs, and the clock jumps by them. Only
this process is deceived: the machine's clock is everybody's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from rose_cli.main import main


def skewed(file: Path, clock: Callable[[], float]) -> Callable[[], float]:
    """A clock that is off by what the file says now."""

    def now() -> float:
        try:
            return clock() + float(file.read_text() or 0)
        except OSError:
            return clock()

    return now


if __name__ == "__main__":
    time.time = skewed(Path(sys.argv[1]), time.time)
    sys.exit(main(sys.argv[2:]))
