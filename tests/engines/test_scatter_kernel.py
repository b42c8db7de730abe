"""The scatter's Triton kernel puts in what it should, sees what is not kept, compiles for Hopper.

No GPU: Triton's own interpreter runs it, and its own assembler translates it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rose_dev.engine_environment import engine_python, is_ready

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not is_ready(), reason="the engine's environment is not there: make engine"),
]
ROOT = Path(__file__).parents[2]


def run(what: str, cases: list[str], **environment: str) -> list[str]:
    """Lines that the program prints in the engine's environment."""
    program = Path(__file__).parent / "scatter_kernel_program.py"
    found: subprocess.CompletedProcess[str] = subprocess.run(
        [str(engine_python()), str(program), what, *cases],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'engines'}", **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not found.returncode, found.stderr
    return found.stdout.split()


def test_the_kernel_puts_in_and_sees_what_is_not_kept() -> None:
    cases = ["1,1", "2,2", "4,3", "8,4"]
    assert run("interpret", cases, TRITON_INTERPRET="1") == ["right"] * 4


def test_the_kernel_compiles_for_hopper_and_reads_memory_again(tmp_path: Path) -> None:
    sizes = run("compile", ["1", "2", "4", "8"], TRITON_CACHE_DIR=str(tmp_path))
    assert all(int(size) for size in sizes)
