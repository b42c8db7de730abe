"""Snapshots of a model that is compared where it lies: only changes leave the device.

``Base`` is the state that was taken last, in pinned host memory (``keep_on="host"``: it goes to the
device band by band, the next one while this one is compared) or on the devices of the tensors
(``keep_on="device"``: one more copy of the model there, and nothing but changes on the bus).
``take`` compares the tensors with it, keeps what was found as coded streams, and moves the base on;
so a version is told from the one taken before it, and versions go out in the order in which they
were taken. The first one has no base: it is a copy, which leaves in full.

A comparison that breaks off (the device has no memory left) leaves a base that is neither state.
Nothing is published from it any more: a new Publisher begins from the digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from rose_core.delta import Builder, FoundTile, TensorSpec, number_format, tiling
from rose_core.delta.bits import Bits
from rose_engines.device_loops import SIGNED, here
from rose_engines.device_stage import ahead
from rose_trainer.device_diff import Band, Found, Region, bands, differences
from rose_trainer.errors import BadState
from rose_trainer.staging import Layout, Tensors, pairs

Place = Literal["host", "device"]


class Base:
    """The state that was taken last, tensor by tensor.

    Args:
        layout: the model's tensors.
        keep_on: where it lies.
    """

    def __init__(self, layout: Layout, keep_on: Place = "host") -> None:
        self.layout = layout
        self._keep_on = keep_on
        self._flat: dict[str, torch.Tensor] = {}
        self.whole = False
        self.torn = False

    def fill(self, tensors: Sequence[tuple[TensorSpec, torch.Tensor]]) -> None:
        """Copy a model; returns when all copies are complete."""
        for spec, tensor in tensors:
            device = tensor.device if self._keep_on == "device" else torch.device("cpu")
            pin = device.type == "cpu" and tensor.is_cuda
            kept = torch.empty(
                tensor.numel(), dtype=self.layout.target(tensor), device=device, pin_memory=pin
            )
            kept.copy_(tensor.detach().reshape(-1), non_blocking=True)
            self._flat[spec.name] = integers(kept)
        for device in {tensor.device for _, tensor in tensors if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        self.whole = True

    def part(self, name: str, band: Band) -> torch.Tensor:
        """A band of a tensor's bits."""
        return self._flat[name][band.span]

    def move(self, name: str, band: Band, found: Found) -> None:
        """Take new bits over."""
        part = self.part(name, band)
        part[found.where.to(part.device)] = found.after.to(part.device)

    def bits(self, name: str) -> Bits:
        """A tensor's bits on the host."""
        return here(self._flat[name])


class DeviceSnapshot:
    """What one ``take`` found; used again and again, as ``staging.Snapshot`` is.

    Args:
        base: the state before; shared by all snapshots of a publisher.
        ranked: find exponent classes too, for blocks coded on their base.
    """

    def __init__(self, base: Base, *, ranked: bool = False) -> None:
        self.layout = base.layout
        self._base = base
        self._ranked = ranked
        self._found: dict[str, list[FoundTile]] = {}

    def take(self, tensors: Tensors, since: object = None) -> None:
        """Compare every tensor with the base, which then is this state.

        Args:
            tensors: the model's.
            since: not needed; the base is what was taken last.

        Raises:
            BadState: the tensors are not those of the layout, or an earlier ``take`` broke off.
        """
        del since
        if self._base.torn:
            message = "the state before is lost, a comparison broke off; start a new Publisher"
            raise BadState(message)
        checked = _checked(self.layout, tensors)
        self._found = {}
        self._base.torn = True
        if self._base.whole:
            self._compare(checked)
        else:
            self._base.fill(checked)
        self._base.torn = False

    def bits(self, name: str) -> Bits:
        """A tensor's bits on the host, flat; only while this is the state taken last."""
        return self._base.bits(name)

    def add_to(self, builder: Builder, name: str, before: object) -> None:
        """Add a tensor's changes to a manifest in the making."""
        del before
        builder.add_found(self._found.get(name, []))

    def _compare(self, tensors: Sequence[tuple[TensorSpec, torch.Tensor]]) -> None:
        regions = [(region_of(spec), tensor) for spec, tensor in tensors]
        olds = ahead(
            (self._base.part(region.name, band), tensor.device)
            for region, tensor in regions
            for band in bands(region.cut)
        )
        for region, tensor in regions:
            flat, kind = tensor.detach().reshape(-1), self.layout.target(tensor)
            for band in bands(region.cut):
                new = integers(flat[band.span].to(kind))
                for found in differences(region, band, next(olds), new, ranked=self._ranked):
                    self._base.move(region.name, band, found)
                    self._found.setdefault(region.name, []).extend(found.tiles)


def region_of(spec: TensorSpec) -> Region:
    """A whole tensor, cut as the Publisher cuts it."""
    cut = tiling(spec.name, spec.shape)
    return Region(spec.name, number_format(spec.dtype), cut.columns, 0, 0, cut)


def integers(flat: torch.Tensor) -> torch.Tensor:
    """The bits of a contiguous tensor as signed integers of its width."""
    return flat.view(SIGNED[flat.element_size()])


def _checked(layout: Layout, tensors: Tensors) -> list[tuple[TensorSpec, torch.Tensor]]:
    """The tensors of the layout without tied ones, before anything is touched."""
    found = []
    for name, tensor in pairs(tensors):
        spec = layout.check(name, tensor)
        if spec is not None:
            found.append((spec, tensor))
    missing = {spec.name for spec in layout.specs} - {spec.name for spec, _ in found}
    if missing:
        message = f"{len(missing)} tensors are missing, first {min(missing)}"
        raise BadState(message)
    return found
