"""Small weights and bundles without any engine."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rose_core.delta.safetensors import StoredTensor
from rose_dev.engine_testing import State


def random_state(seed: int = 0) -> State:
    """A matrix that is cut into tiles along its columns, one along its rows, and a vector."""
    draw = np.random.default_rng(seed)

    def drawn(*shape: int) -> StoredTensor:
        bits = draw.integers(0, 1 << 16, int(np.prod(shape)), dtype=np.uint16)
        return StoredTensor("BF16", shape, bits)

    return {
        "a.down_proj.weight": drawn(256, 1024),
        "a.q_proj.weight": drawn(1024, 256),
        "a.norm.weight": drawn(96),
    }


def step(state: State, share: float, seed: int = 1) -> State:
    """The state with a share of its elements changed."""
    draw = np.random.default_rng(seed)
    return {
        name: StoredTensor(
            dtype, shape, np.where(draw.random(bits.size) < share, bits + 1, bits).astype("<u2")
        )
        for name, (dtype, shape, bits) in state.items()
    }


@pytest.fixture
def old() -> State:
    return random_state()


@pytest.fixture
def sparse(old: State) -> State:
    return step(old, 0.02)


@pytest.fixture
def flip() -> Callable[[Path], None]:
    """Flips one bit in the middle of a file."""

    def flip_bit(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))

    return flip_bit
