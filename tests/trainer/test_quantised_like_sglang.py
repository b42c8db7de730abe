"""The FP8 lineage against SGLang itself: the same bits, and read back as they were meant."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rose_dev.engine_environment import engine_python
from rose_engines.process.launch import Launch
from rose_engines.sglang.arguments import python_path
from rose_trainer.quantised import blocks
from rose_trainer.staging import bits_of

pytestmark = pytest.mark.engine

CHILD = Path(__file__).with_name("quantise_process.py")


def matrices() -> dict[str, torch.Tensor]:
    """Usual weights, blocks of other sizes, tiny ones, zeros, and maxima at powers of two."""
    random = np.random.default_rng(11)

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.from_numpy(random.normal(0, scale, (rows, columns))).to(torch.bfloat16)

    edge = normal(256, 256, 0.01)
    edge[0, 0], edge[130, 0], edge[0, 130] = 448 * 2.0**-9, 449 * 2.0**-9, 230 * 2.0**-9
    return {
        "usual": normal(512, 384, 0.02),
        "odd": normal(300, 200, 1.0),
        "tiny": normal(128, 256, 1e-6),
        "zero": torch.zeros(130, 140, dtype=torch.bfloat16),
        "edge": edge,
    }


def meant(weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Factors times weights, block by block."""
    rows, columns = weight.shape
    whole = factors.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return weight.to(torch.float32) * whole


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What SGLang makes of the BF16 matrices, and how it reads ours under ``read NAME``."""
    folder = tmp_path_factory.mktemp("quantised")
    given = matrices()
    for name, matrix in matrices().items():
        weight, factors = blocks(name, matrix, "exact")
        given |= {f"read {name}": weight, f"read {name}_scale_inv": factors}
    save_file(given, folder / "given")
    launch = Launch(python=engine_python(), model=folder, port=0)
    environment = {
        **os.environ,
        "PYTHONPATH": ":".join(map(str, python_path(launch))),
        "OMP_NUM_THREADS": "1",
        "SGLANG_PLUGINS": "none",
    }
    program = [engine_python(), CHILD, folder / "given", folder / "made"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(folder / "made")


@pytest.mark.parametrize("name", sorted(matrices()))
def test_powers_of_two_are_the_bits_that_sglang_makes_of_the_same_weights(
    name: str, theirs: dict[str, torch.Tensor]
) -> None:
    weight, factors = blocks(name, matrices()[name], "power-of-two")
    assert torch.equal(factors, theirs[f"{name}_scale_inv"])
    assert np.array_equal(bits_of(weight), bits_of(theirs[name]))


@pytest.mark.parametrize("name", sorted(matrices()))
def test_sglang_reads_exact_factors_as_they_were_meant(
    name: str, theirs: dict[str, torch.Tensor]
) -> None:
    assert torch.equal(theirs[f"read {name}"], meant(*blocks(name, matrices()[name], "exact")))
