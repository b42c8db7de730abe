"""A second lineage for engines that serve FP8: quantised once and always to the same bits.

The layout is that of FP8 checkpoints on the Hugging Face hub (``quant_method: fp8``): a weight
becomes ``F8_E4M3`` and beside it stands ``NAME_scale_inv``, one FP32 factor per block of 128 x 128.
Every engine of the lineage then holds bits that were attested; engines that quantise for
themselves hold bits that nobody can compare. Publish it as a run of its own beside the BF16 one.

Weights are rounded to BF16 first, so FP32 masters and their BF16 casts make the same bits. A
block's factor depends on its largest magnitude only and every other operation is per element, so
the order of work makes no difference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from rose_trainer.errors import BadState
from rose_trainer.staging import Tensors, pairs

BLOCK = 128
LARGEST = 448.0
"""Of E4M3 without infinities."""

_LEAST = 1e-4
"""A block whose largest magnitude is below has the factor of this one, with powers of two: so
SGLang and DeepGEMM quantise, and their bits are then these."""

KEPT = r"(embed_tokens|lm_head|norm|mlp\.gate|router)\b"
"""Names that stay as they are, besides vectors: what FP8 checkpoints leave out."""

Scales = Literal["exact", "power-of-two"]


@dataclass(frozen=True)
class BlockFp8:
    """Quantises a model's tensors; give the result to ``Publisher.publish``, without its ``dtype``.

    Attributes:
        kept: regular expression of names that are not quantised; found anywhere in the name.
        scales: ``exact`` uses the whole range of every block. ``power-of-two`` rounds factors up to
            one, as engines with such scales want: the bits are those that SGLang makes of the same
            weights by itself. Factors, and so weights, then change less often.
        rest: element type of the other floating-point tensors; None leaves them.
    """

    kept: str = KEPT
    scales: Scales = "exact"
    rest: torch.dtype | None = torch.bfloat16

    def __call__(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of the quantised model, one after the other.

        Raises:
            BadState: a weight that is no number, or a shard of one.
        """
        for name, tensor in pairs(tensors):
            value = tensor.detach()
            if self._quantises(name, value):
                weight, factors = blocks(name, value, self.scales)
                yield name, weight
                yield f"{name}_scale_inv", factors
            elif self.rest is not None and value.is_floating_point():
                yield name, value.to(self.rest)
            else:
                yield name, value

    def _quantises(self, name: str, tensor: torch.Tensor) -> bool:
        weight = name.endswith(".weight") and tensor.dim() == 2 and tensor.is_floating_point()
        return weight and not re.search(self.kept, name)


def blocks(name: str, weight: torch.Tensor, scales: Scales) -> tuple[torch.Tensor, torch.Tensor]:
    """One matrix as E4M3 and the factors that bring it back.

    Args:
        name: for errors.
        weight: a whole matrix.
        scales: as in ``BlockFp8``.

    Raises:
        BadState: it holds a NaN or an infinity, or is sharded.
    """
    if hasattr(weight, "to_local"):
        message = f"{name} is sharded; blocks cross shards, so pass full_tensor()"
        raise BadState(message)
    rows, columns = weight.shape
    down, across = math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)
    padded = torch.zeros(down * BLOCK, across * BLOCK, dtype=torch.float32, device=weight.device)
    padded[:rows, :columns] = weight.to(torch.bfloat16)
    tiled = padded.view(down, BLOCK, across, BLOCK)
    largest = tiled.abs().amax(dim=(1, 3))
    if not bool(torch.isfinite(largest).all()):
        message = f"{name} holds a NaN or an infinity; nothing sensible can be quantised from it"
        raise BadState(message)
    factors = _factors(largest, scales)
    scaled = (tiled / factors[:, None, :, None]).clamp(-LARGEST, LARGEST)
    whole = scaled.reshape(down * BLOCK, across * BLOCK)[:rows, :columns]
    return whole.contiguous().to(torch.float8_e4m3fn), factors


def _factors(largest: torch.Tensor, scales: Scales) -> torch.Tensor:
    if scales == "exact":
        return torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
    exact = largest.clamp(min=_LEAST) / LARGEST
    # The next power of two, from the bits: log2 is not the same on every device.
    mantissa, exponent = torch.frexp(exact)
    return torch.ldexp(torch.ones_like(exact), exponent - (mantissa == 0.5).to(exponent.dtype))
