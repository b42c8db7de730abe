"""The digest's Triton kernel says what the host says, and compiles for the GPUs it is for.

No GPU: Triton's own interpreter runs it, and its own assembler translates it for Hopper.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rose_core.delta.digest import digest_run, total
from rose_dev.engine_environment import engine_python, is_ready

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not is_ready(), reason="the engine's environment is not there: make engine"),
]
ROOT = Path(__file__).parents[2]
# Width in bytes, first index, rows, columns, seed: less than a block, more, none, far away.
CASES: list[tuple[int, ...]] = [
    (2, 0, 1, 5, 1), (2, 7, 3, 5000, 2), (1, 1 << 40, 2, 4096, 3), (4, 3, 5, 1001, 4),
    (8, 0, 2, 300, 5), (2, 0, 1, 0, 6), (2, 1, 70, 1, 7),
]  # fmt: skip


def run(what: str, cases: list[tuple[int, ...]], **environment: str) -> list[str]:
    """Lines that the program prints in the engine's environment."""
    program = Path(__file__).parent / "digest_kernel_program.py"
    found: subprocess.CompletedProcess[str] = subprocess.run(
        [str(engine_python()), str(program), what, *(",".join(map(str, one)) for one in cases)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'engines'}", **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not found.returncode, found.stderr
    return found.stdout.split()


def test_the_kernel_says_what_the_host_says() -> None:
    wanted = []
    for width, first, rows, columns, seed in CASES:
        raw = np.random.default_rng(seed).integers(0, 256, rows * 2 * columns * width, np.uint8)
        bits = raw.view(f"u{width}").reshape(rows, 2 * columns)[:, :columns]
        parts = (
            digest_run("t", first + row * 2 * columns, np.ascontiguousarray(bits[row]))
            for row in range(rows)
        )
        wanted.append(str(total(parts)))
    assert run("interpret", CASES, TRITON_INTERPRET="1") == wanted


def test_the_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    widths: list[tuple[int, ...]] = [(1,), (2,), (4,), (8,)]
    assert all(int(size) for size in run("compile", widths, TRITON_CACHE_DIR=str(tmp_path)))
