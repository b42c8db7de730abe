"""``rose operator`` under a profiler of processor time: ``python -m bench.operator.profiled FILE``.

SIGUSR2 writes what was seen so far to FILE, for ``python -m pstats FILE``. The profiler sees the
main thread, where passes, agents' calls and writes happen; it slows them by about a half, so a
profiled run says where the time goes, not how much it is.
"""

from __future__ import annotations

import cProfile
import signal
import sys
import time
from pathlib import Path

from rose_cli.main import main


def profiled(file: Path, argv: list[str]) -> int:
    """Run ``rose`` with these arguments; its exit code."""
    profile = cProfile.Profile(time.thread_time)

    def dump(*_: object) -> None:
        # The file appears whole: whoever waits for it must not read half of it.
        fresh = file.with_suffix(".new")
        profile.disable()
        profile.dump_stats(fresh)
        fresh.rename(file)
        profile.enable()

    signal.signal(signal.SIGUSR2, dump)
    profile.enable()
    return main(argv)


if __name__ == "__main__":
    sys.exit(profiled(Path(sys.argv[1]), sys.argv[2:]))
