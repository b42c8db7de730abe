"""The FP8 lineage: the hub's layout, the same bits whatever the way, small deltas."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from rose_trainer.errors import BadState
from rose_trainer.publisher import Publisher
from rose_trainer.quantised import BlockFp8, Scales, blocks
from rose_trainer.staging import bits_of
from tests.trainer.test_publisher import RunningStore, running

__all__ = ["running"]

NAME = "model.layers.0.mlp.up_proj.weight"
GOLDEN = "11407fafecf19178536f0a43a619f95adbcd51e0494f821e1168839531787c16"


def matrix(rows: int = 300, columns: int = 200) -> torch.Tensor:
    """The same on every machine: numpy keeps its generators' streams."""
    random = np.random.default_rng(7)
    return torch.from_numpy(random.normal(0, 0.02, (rows, columns)).astype(np.float32))


def model() -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": matrix(64, 32),
        NAME: matrix(),
        "model.layers.0.mlp.gate.weight": matrix(4, 200),
        "model.layers.0.input_layernorm.weight": matrix(1, 32).flatten(),
        "step": torch.tensor(3),
    }


def back(weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    whole = factors.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return weight.to(torch.float32) * whole


@pytest.mark.parametrize("scales", ["exact", "power-of-two"])
def test_every_block_comes_back_within_half_a_step(scales: Scales) -> None:
    weight, factors = blocks(NAME, matrix(), scales)
    assert (weight.dtype, weight.shape) == (torch.float8_e4m3fn, (300, 200))
    assert (factors.dtype, factors.shape) == (torch.float32, (3, 2))
    wanted = matrix().to(torch.bfloat16).to(torch.float32)
    # Three bits of mantissa: a sixteenth; below the smallest normal number a fixed step.
    allowed = torch.maximum(wanted.abs() / 16, back(torch.full(weight.shape, 2**-10), factors))
    assert bool(((back(weight, factors) - wanted).abs() <= allowed * 1.001).all())
    if scales == "power-of-two":
        assert bool((torch.frexp(factors).mantissa == 0.5).all())
    else:
        assert float(weight[:128, :128].to(torch.float32).abs().max()) == 448.0


def test_the_bits_are_these_on_every_machine() -> None:
    weight, factors = blocks(NAME, matrix(), "exact")
    found = hashlib.sha256(bits_of(weight).tobytes() + bits_of(factors).tobytes()).hexdigest()
    assert found == GOLDEN


def test_masters_their_casts_and_parts_of_whole_blocks_make_the_same_bits() -> None:
    weight, factors = blocks(NAME, matrix(), "exact")
    cast, cast_factors = blocks(NAME, matrix().to(torch.bfloat16), "exact")
    part, part_factors = blocks(NAME, matrix()[128:256], "exact")
    assert np.array_equal(bits_of(weight), bits_of(cast))
    assert torch.equal(factors, cast_factors)
    assert np.array_equal(bits_of(weight[128:256].contiguous()), bits_of(part))
    assert torch.equal(factors[1:2], part_factors)


def test_zeros_stay_zeros_and_what_is_no_number_is_refused_by_name() -> None:
    weight, factors = blocks(NAME, torch.zeros(130, 3), "exact")
    assert not bits_of(weight).any()
    assert torch.equal(factors, torch.ones(2, 1))
    for wrong in (float("nan"), float("inf")):
        broken = matrix()
        broken[290, 3] = wrong
        with pytest.raises(BadState, match="up_proj"):
            blocks(NAME, broken, "exact")


def test_only_matrices_of_layers_are_quantised() -> None:
    made = dict(BlockFp8()(model()))
    assert {name: tensor.dtype for name, tensor in made.items()} == {
        "model.embed_tokens.weight": torch.bfloat16,
        NAME: torch.float8_e4m3fn,
        f"{NAME}_scale_inv": torch.float32,
        "model.layers.0.mlp.gate.weight": torch.bfloat16,
        "model.layers.0.input_layernorm.weight": torch.bfloat16,
        "step": torch.int64,
    }


def test_the_lineage_is_published_like_any_other(running: RunningStore) -> None:
    state, quantise = model(), BlockFp8(scales="power-of-two")
    with Publisher(running.address, "run", token="t") as publisher:
        publisher.publish(0, quantise(state))
        state[NAME][::50, 7] *= 1.5
        changed = publisher.wait(publisher.publish(1, quantise(state)))
        same = publisher.wait(publisher.publish(2, quantise(state)))
    assert 0 < changed.changes <= 6
    assert (same.changes, same.digest) == (0, changed.digest)
