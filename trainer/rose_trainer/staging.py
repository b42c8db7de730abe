"""Snapshots of a model's tensors in host memory, as bit patterns.

A ``Snapshot`` owns one buffer per tensor and is used again and again: taking one copies the
tensors, nothing else, so the trainer stands still for one copy of the model.

Tied tensors (one storage under several names) are found at the first take and copied once. Every
take looks at them again: names that have parted are refused, because the run's readers would go on
to give both the bits of one. An iterator's tensors are not all alive at once, and storage that
comes twice may be a tie or a buffer used again for the next bucket: the first take refuses it.
"""

from __future__ import annotations

import itertools
from collections.abc import ItemsView, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from rose_core.delta import Builder, TensorSpec
from rose_core.delta.bits import Bits, Indices
from rose_core.delta.casting import cast
from rose_trainer.errors import BadState

Tensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""Hugging Face names and tensors, for example ``model.state_dict()``."""

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Element types that can be published, as safetensors writes them."""

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Layout:
    """Which tensors a model has; fixed for the life of a publisher.

    Args:
        tensors: the model's tensors, all alive at once (ties are seen by their storage).
        dtype: when given, floating-point tensors are cast to it as they are copied.
        streamed: they came out of an iterator, which may have used one buffer for several.

    Raises:
        BadState: a tensor that cannot be published.
    """

    def __init__(
        self,
        tensors: Sequence[tuple[str, torch.Tensor]],
        dtype: torch.dtype | None = None,
        *,
        streamed: bool = False,
    ) -> None:
        if streamed:
            refuse_shared(tensors)
        self.dtype = dtype
        self.tied: dict[str, str] = {}
        specs: dict[str, TensorSpec] = {}
        storages: dict[tuple[object, ...], str] = {}
        for name, tensor in tensors:
            _check(name, tensor)
            first = storages.setdefault(place_of(tensor), name) if tensor.numel() else name
            if first != name:
                self.tied[name] = first
                continue
            dtype_name = DTYPE_NAMES.get(self.target(tensor))
            if dtype_name is None:
                message = (
                    f"{name} is {tensor.dtype}; publishable: {', '.join(DTYPE_NAMES.values())}"
                )
                raise BadState(message)
            specs[name] = TensorSpec(name, dtype_name, tuple(tensor.shape))
        if not specs:
            message = "no tensors; pass model.state_dict() or pairs of name and tensor"
            raise BadState(message)
        self.specs = tuple(specs.values())
        self._known = specs

    def check(self, name: str, tensor: torch.Tensor) -> TensorSpec | None:
        """The tensor's entry, None for a tied name.

        Raises:
            BadState: it is not the tensor this layout knows.
        """
        _check(name, tensor)
        if name in self.tied:
            return None
        spec = self._known.get(name)
        found = TensorSpec(name, DTYPE_NAMES.get(self.target(tensor), "?"), tuple(tensor.shape))
        if spec is None or spec != found:
            message = f"{name} is {found[1:]}, was {spec[1:] if spec else 'not there'} at first"
            raise BadState(message)
        return spec

    def parted(self, name: str) -> BadState:
        """What is wrong with a tied name that has other bits than the tensor it was tied to."""
        return BadState(
            f"{name} was tied to {self.tied[name]} when this publisher began, and differs from it "
            "now: readers would give both the same bits. Tie them again, or publish from a new "
            "Publisher whose first state has them apart"
        )

    def target(self, tensor: torch.Tensor) -> torch.dtype:
        """Element type the tensor is published in."""
        if self.dtype is not None and tensor.is_floating_point():
            return self.dtype
        return tensor.dtype


class Taken(Protocol):
    """A state that was taken from a model, on the host (``Snapshot``) or where it lies."""

    layout: Layout

    def take(self, tensors: Tensors, since: Taken | None = None) -> None:
        """Take a state; returns when the model may change."""

    def bits(self, name: str) -> Bits:
        """A tensor's bits, flat, of a state that has none before it."""

    def add_to(self, builder: Builder, name: str, before: Taken) -> None:
        """Add what changed in a tensor, the next of the builder's table."""


class Snapshot:
    """One copy of a model in host memory (pinned where the model is on a GPU)."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._buffers: dict[str, torch.Tensor] = {}
        self._since: Taken | None = None
        self._changed: dict[str, Indices] = {}

    def take(self, tensors: Tensors, since: Taken | None = None) -> None:
        """Copy every tensor; returns when all copies are complete.

        Args:
            tensors: the model's.
            since: the snapshot taken before this one; tensors that are cast from FP32 on the host
                are compared with it on the way.

        Raises:
            BadState: the tensors are not those of the layout.
        """
        missing = {spec.name for spec in self.layout.specs}
        devices: set[torch.device] = set()
        places: dict[str, object] = {}
        ties: list[tuple[str, torch.Tensor]] = []
        streamed = not holds_all(tensors)
        self._since, self._changed = since, {}
        for name, tensor in pairs(tensors):
            spec = self.layout.check(name, tensor)
            if spec is not None:
                missing.discard(name)
                places[name] = None if streamed else place_of(tensor)
                if not self._cast(name, tensor):
                    self._copy(name, tensor)
                devices.add(tensor.device)
            else:  # of an iterator, it may be overwritten by whatever comes next
                ties.append((name, tensor.detach().clone() if streamed else tensor))
        if missing:
            message = f"{len(missing)} tensors are missing, first {min(missing)}"
            raise BadState(message)
        _wait_for_copies(devices)
        for name, tensor in ties:
            if place_of(tensor) != places[self.layout.tied[name]]:
                self._check_tie(name, tensor)

    def _check_tie(self, name: str, tensor: torch.Tensor) -> None:
        kept = self._buffers[self.layout.tied[name]]
        mine = tensor.detach().to(device="cpu", dtype=kept.dtype).contiguous()
        if mine.shape != kept.shape or not np.array_equal(bits_of(mine), bits_of(kept)):
            raise self.layout.parted(name)

    def bits(self, name: str) -> Bits:
        """A tensor's bits, flat; a view of the buffer."""
        return bits_of(self._buffers[name])

    def add_to(self, builder: Builder, name: str, before: Taken) -> None:
        """Add a tensor; it is compared now, unless it was while it was cast."""
        changed = self._changed.get(name) if before is self._since else None
        builder.add(before.bits(name), self.bits(name), changed)

    def _cast(self, name: str, tensor: torch.Tensor) -> bool:
        """Cast and compare in one pass; False where that is not how this tensor is copied."""
        buffer, since = self._buffers.get(name), self._since
        castable = tensor.dtype is torch.float32 and tensor.is_contiguous() and not tensor.is_cuda
        if since is None or buffer is None or not castable or buffer.dtype is not torch.bfloat16:
            return False
        self._changed[name] = cast(bits_of(tensor.detach()), since.bits(name), self.bits(name))
        return True

    def _copy(self, name: str, tensor: torch.Tensor) -> None:
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = torch.empty(
                tensor.shape,
                dtype=self.layout.target(tensor),
                pin_memory=tensor.is_cuda,
            )
            self._buffers[name] = buffer
        buffer.copy_(tensor.detach(), non_blocking=True)


def _wait_for_copies(devices: Iterable[torch.device]) -> None:
    """Copies from a GPU run beside us."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def bits_of(buffer: torch.Tensor) -> Bits:
    """A contiguous host tensor's bits, flat; a view."""
    flat = buffer.view(_SIGNED[buffer.element_size()]).reshape(-1).numpy()
    return flat.view(np.dtype(f"u{buffer.element_size()}"))


def holds_all(tensors: Tensors) -> bool:
    """Whether the caller holds all the tensors at once."""
    return isinstance(tensors, Mapping | Sequence | ItemsView)


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where a tensor lies; tensors alive at once that have the same are one."""
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())


def refuse_shared(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse tensors that share memory: out of an iterator nobody can tell what that means.

    Raises:
        BadState: two of them do; names both.
    """
    ends: list[tuple[str, int, int, str]] = []
    for name, tensor in tensors:
        _check(name, tensor)
        if tensor.numel():
            reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            end = begin + (reach + 1) * tensor.element_size()
            ends.append((str(tensor.device), begin, end, name))
    ends.sort()
    for (device, _, end, first), (other, begin, _, second) in itertools.pairwise(ends):
        if device == other and begin < end:
            message = (
                f"{first} and {second} came out of an iterator with the same memory: tied, or a "
                "buffer that the next tensor overwrites. Pass a mapping such as state_dict() or a "
                "list where they are tied; give each tensor memory of its own where they are not"
            )
            raise BadState(message)


def pairs(tensors: Tensors) -> Iterable[tuple[str, torch.Tensor]]:
    """Names and tensors, whatever form they came in."""
    return tensors.items() if isinstance(tensors, Mapping) else tensors


def _check(name: str, tensor: torch.Tensor) -> None:
    if hasattr(tensor, "to_local"):
        message = f"{name} is a sharded DTensor; publish shards with ShardedPublisher on every rank"
        raise BadState(message)
    if tensor.is_meta or tensor.is_sparse:
        message = f"{name} has no dense values ({tensor.layout}, {tensor.device})"
        raise BadState(message)
