"""What a commit asks of a GPU while no turn computes, counted without one.

    python -m bench.weights.launches [--share 0.001]

Two ways side by side, over every tensor of a published model: tensor by tensor
(``DeviceTensor.put`` and ``holds``, as commits once were) and all at once
(``rose_engines.weights.fused_scatter``, as they are). Nothing runs on a GPU, and nothing here is a
time.

How it is counted. *Tensor by tensor* runs on torch's ``meta`` device under a dispatch mode: each
operation that a GPU would run counts as one launch (a comparison of two tensors as two: compare,
reduce), each transfer from or to memory that is not pinned as one pageable copy, and each
synchronise, and each answer that Python reads, as one wait; blocking copies wait besides and are
not counted as waits. *All at once* runs to the end behind the seam at which the product speaks to
the device (``fused_scatter.Lane``), and under the same mode, so that an operation that went past
the seam would be counted too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.record import Figure, figure, record
from rose_engines.tensors.parameters import DeviceTensor
from rose_engines.weights.fused_scatter import Arena, FusedScatter, StagedScatter

_EQUAL = torch.ops.aten.equal.default
_TO = torch.ops.aten._to_copy.default  # noqa: SLF001
# They make views or places and launch nothing.
_FREE = {
    torch.ops.aten.view.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.alias.default,
}


@dataclass
class Counts:
    """What was asked of the device.

    Attributes:
        launches: kernels.
        waits: times that the host waits for it.
        pageable: copies between it and memory that is not pinned.
        copied: their bytes.
        read: bytes of pinned memory that kernels read themselves.
    """

    launches: int = 0
    waits: int = 0
    pageable: int = 0
    copied: int = 0
    read: int = 0


@dataclass(frozen=True)
class Model:
    """A model's checkpoint tensors, as its authors publish them."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    experts: int
    vocabulary: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor."""
        for name in ("embed_tokens", "lm_head"):
            yield name, (self.vocabulary, self.hidden)
        yield "norm", (self.hidden,)
        for layer in range(self.layers):
            for name, shape in self._layer():
                yield f"{layer}.{name}", shape

    def _layer(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        head, hidden = 128, self.hidden
        yield "q_proj", (self.heads * head, hidden)
        yield "k_proj", (self.kv_heads * head, hidden)
        yield "v_proj", (self.kv_heads * head, hidden)
        yield "o_proj", (hidden, self.heads * head)
        yield from (("q_norm", (head,)), ("k_norm", (head,)))
        yield from (("input_norm", (hidden,)), ("post_norm", (hidden,)))
        if self.experts:
            yield "gate", (self.experts, hidden)
        for expert in range(self.experts or 1):
            yield from ((f"{expert}.{name}", (self.inner, hidden)) for name in ("gate", "up"))
            yield f"{expert}.down", (hidden, self.inner)


MODELS = (
    Model("Qwen3-8B", 36, 4096, 32, 8, 12288, 0, 151936),
    Model("Qwen3-30B-A3B", 48, 2048, 32, 4, 768, 128, 151936),
)


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch says no types
    """Counts what is dispatched for a device other than the CPU."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  # an operator of torch
        types: Any,  # noqa: ANN401  # subclasses, of which there are none
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        counts, given = self._counts, kwargs or {}
        if func is _TO:
            if (there := given.get("device")) is not None and there != args[0].device:
                counts.pageable += 1
                counts.copied += args[0].nbytes
            return func(*args, **given)
        if func in _FREE or not any(isinstance(one, torch.Tensor) and one.is_meta for one in args):
            return func(*args, **given)
        if func is _EQUAL:
            counts.launches += 2
            counts.waits += 1
            counts.pageable += 1  # one byte of answer
            counts.copied += 1
            return True
        counts.launches += 1
        return func(*args, **given)


@dataclass
class _OneByOne(DeviceTensor):
    """A tensor whose device is nowhere; its synchronise is counted."""

    counts: Counts = field(default_factory=Counts)

    def _wait(self) -> None:
        self.counts.waits += 1


@dataclass
class _Counted:
    """The seam of the product, with nothing behind it."""

    counts: Counts

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Ordinary memory stands in for pinned one."""
        return torch.zeros(count, dtype=dtype)

    def address(self, flat: torch.Tensor) -> int:  # noqa: ARG002  # as the seam has it
        """There is none."""
        return 0

    def scatter(self, arena: Arena) -> None:
        """One launch, which reads the arena."""
        self.counts.launches += 1
        self.counts.read += arena.nbytes

    def wait(self) -> None:
        """One."""
        self.counts.waits += 1


def staged_of(model: Model, share: float) -> list[tuple[StagedScatter, int]]:
    """A share of every tensor's elements, at least one, and each tensor's size."""
    draw = np.random.default_rng(0)
    found = []
    for name, shape in model.shapes():
        size = prod(shape)
        count = max(1, int(size * share))
        apart = size // count
        where = np.arange(count, dtype=np.int64) * apart + int(draw.integers(apart))
        bits = np.zeros(count, np.uint16)
        found.append((StagedScatter(name, where, bits, bits), size))
    return found


def count(model: Model, share: float) -> tuple[Counts, Counts]:
    """Tensor by tensor, and all at once."""
    staged = staged_of(model, share)
    before, after = Counts(), Counts()
    live = {
        one.name: _OneByOne(
            one.name,
            "BF16",
            (size,),
            torch.empty(size, dtype=torch.int16, device="meta"),
            counts=before,
        )
        for one, size in staged
    }
    with _Counting(before):
        for one, _ in staged:
            live[one.name].put(one.where, one.new)
            live[one.name].holds(one.where, one.new)
    fused = FusedScatter([one for one, _ in staged], live, _Counted(after))
    with _Counting(after):
        fused.put()
    return before, after


def main(argv: list[str]) -> int:
    """Count, print and record."""
    parser = argparse.ArgumentParser(prog="bench.weights.launches", description=__doc__)
    parser.add_argument("--share", type=float, default=0.001, help="of the elements that changed")
    share = parser.parse_args(argv).share
    figures: list[Figure] = []
    for model in MODELS:
        tensors = sum(1 for _ in model.shapes())
        before, after = count(model, share)
        for way, counts, held in (
            ("tensor by tensor", before, False),
            ("all at once", after, True),
        ):
            label = f"{model.name} ({tensors} tensors), {way}:"
            figures += [
                figure(f"{label} launches", counts.launches, ""),
                figure(f"{label} waits", counts.waits, "", at_most=1 if held else None),
                figure(
                    f"{label} pageable copies", counts.pageable, "", at_most=0 if held else None
                ),
                figure(f"{label} copied", counts.copied / 1e6, "MB"),
                figure(f"{label} read from pinned memory", counts.read / 1e6, "MB"),
            ]
    note = f"{share:.1%} of every tensor's elements; counted, no GPU ran and nothing is a time"
    record("launches", figures, notes=[note])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
