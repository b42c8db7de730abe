"""A small model whose every version is known in advance, for the fault suite and benchmarks.

The bits at a step are a function of the step alone, so a look at an engine shows which
version its weights are, or that they are none.
"""

from __future__ import annotations

import numpy as np

from rose_core.delta import TensorSpec
from rose_core.delta.bits import Bits

SPECS = (
    TensorSpec("model.embed_tokens.weight", "BF16", (512, 64)),
    TensorSpec("model.layers.0.self_attn.q_proj.weight", "BF16", (1024, 256)),
    TensorSpec("model.layers.0.mlp.down_proj.weight", "BF16", (256, 1024)),
    TensorSpec("model.norm.weight", "BF16", (256,)),
)
SHARE = 0.01
"""Elements that a step moves to a neighbouring value."""


def first() -> dict[str, Bits]:
    """Bits at step 0: small normal numbers."""
    random = np.random.default_rng(0)
    state: dict[str, Bits] = {}
    for spec in SPECS:
        values = 0.02 * random.standard_normal(int(np.prod(spec.shape)), np.float32)
        state[spec.name] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return state


def advance(state: dict[str, Bits], step: int) -> None:
    """From the step before to ``step``, in place."""
    random = np.random.default_rng(step)
    for bits in state.values():
        bits[random.random(bits.size) < SHARE] += bits.dtype.type(1)


def state_at(step: int) -> dict[str, Bits]:
    """Bits at a step."""
    state = first()
    for number in range(1, step + 1):
        advance(state, number)
    return state
