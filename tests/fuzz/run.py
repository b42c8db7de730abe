"""``python -m tests.fuzz.run``: look for inputs that break a target, for a bounded time.

Each target runs in a process of its own (``one``), as many at once as there are cores. It begins
with its folder below ``corpus`` and what it found here before (``out/fuzz``), and may take
``--seconds``. An input that breaks a target is written to ``out/fuzz/TARGET/crash-*`` and named:
copy it to the corpus.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).with_name("corpus")
_MEMORY_MIB = 2048
# An input longer than this shows nothing that a shorter one does not.
_LONGEST = 16384


def main() -> int:
    """Run the targets; the number of broken ones is the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--only", nargs="*", choices=sorted(TARGETS), default=sorted(TARGETS))
    parser.add_argument("--out", type=Path, default=Path("out/fuzz"))
    options = parser.parse_args()
    run = partial(_run, seconds=options.seconds, out=options.out)
    with ThreadPoolExecutor(os.cpu_count()) as cores:
        held = cores.map(run, options.only)
        broken = [name for name, holds in zip(options.only, held, strict=True) if not holds]
    for name in broken:
        print(f"{name}: broken; its input is in {options.out / name}, kept as crash-*")
    print(f"{len(options.only) - len(broken)} passed, {len(broken)} failed")
    return len(broken)


def _run(name: str, seconds: int, out: Path) -> bool:
    found = out / name
    found.mkdir(parents=True, exist_ok=True)
    known = CORPUS / name
    command = [
        *(sys.executable, "-m", "tests.fuzz.one", name),
        str(found),
        *([str(known)] if known.is_dir() else []),
        *(f"-max_total_time={seconds}", f"-max_len={_LONGEST}", f"-rss_limit_mb={_MEMORY_MIB}"),
        *("-timeout=10", f"-artifact_prefix={found}/", "-print_final_stats=1", "-verbosity=0"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    runs = [one.split()[-1] for one in done.stderr.splitlines() if "number_of_executed" in one]
    print(f"{name}: {runs[0] if runs else 0} inputs, {len(list(found.iterdir()))} kept", flush=True)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:], sep="\n")
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
