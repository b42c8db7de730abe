"""Compiled loops that are kept: an environment's are not discarded by another's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import sys
import numba
numba.__version__ = sys.argv[1]
from rose_core.delta import kernels, loops
import numpy as np
fast = kernels.compiled(loops.digest_at)
fast(np.zeros(1, np.int64), np.zeros(1, np.uint16), np.uint64(1))
print(sum(fast.stats.cache_hits.values()), repr(numba.config.CACHE_DIR))
"""


def _run(release: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, release],
        env={"NUMBA_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_two_releases_of_numba_keep_their_loops_beside_each_other(tmp_path: Path) -> None:
    """Each would discard the other's, and an engine would compile at every start."""
    hits = [_run(release, tmp_path).split()[0] for release in ("0.1", "0.2", "0.1")]
    assert hits == ["0", "0", "1"]


def test_numbas_own_folder_is_left_as_it_was(tmp_path: Path) -> None:
    """Whoever imports ROSE may cache functions of their own."""
    assert _run("0.1", tmp_path).endswith(repr(str(tmp_path)))
