"""Checkpoint tensors inside a running model, as the weight plane sees them.

``layout`` says where the engine's own loader puts each checkpoint tensor. What it says is *proved*
here at every start: the live bytes must equal the checkpoint's, every live parameter must be
covered once, and what is left over must be zero padding. A layout that is not such a permutation
(converted, quantised or repacked weights) is refused by name, before any turn is served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rose_core.delta.bits import Bits
from rose_core.delta.digest import Digest
from rose_core.delta.safetensors import StoredTensor
from rose_engines.errors import UnsupportedEngine
from rose_engines.ondevice import device_digest
from rose_engines.tensors.canonical import (
    STALE,
    HostTensor,
    LiveTensor,
    Where,
    WholeTensor,
    always_current,
    do_nothing,
)
from rose_engines.tensors.slices import Box, SlicedTensor

if TYPE_CHECKING:
    import torch

Layout = Mapping[str, tuple[Box, ...]]
"""Checkpoint tensor -> where this rank holds it; no box at all: other ranks hold it."""


class Renewal(NamedTuple):
    """What an engine keeps that is made of a parameter.

    Attributes:
        renew: to be called when the parameter was overwritten.
        current: whether what is kept is what would be made now.
    """

    renew: Callable[[], object]
    current: Callable[[], bool]


Renewals = Mapping[str, Renewal]
"""Parameter -> what is made of it."""


class Computed(NamedTuple):
    """What a loader computes from checkpoint tensors and how it follows them.

    Attributes:
        made: paths of the engine's tensors that are made.
        kept: checkpoint tensors that the engine has no place for, kept beside it to make them of.
        renewals: of what is made, by checkpoint tensor that is kept, or by parameter.
        into: parameters that are made.
        feeds: those that are made of a tensor.
    """

    made: tuple[str, ...] = ()
    kept: Mapping[str, torch.Tensor] = MappingProxyType({})
    renewals: Renewals = MappingProxyType({})
    into: frozenset[str] = frozenset()
    feeds: Mapping[str, tuple[str, ...]] = MappingProxyType({})


NOTHING_COMPUTED = Computed()


def live_tensors(
    parameters: Mapping[str, torch.Tensor],
    checkpoint: Mapping[str, StoredTensor],
    layout: Layout,
    renewals: Renewals = MappingProxyType({}),
    computed: Computed = NOTHING_COMPUTED,
) -> dict[str, LiveTensor]:
    """The proved map: checkpoint name -> its elements inside the running model.

    Args:
        parameters: the model's parameters by name.
        checkpoint: what the engine was started from.
        layout: what ``layout.derive`` found; tensors it leaves out are tied to others.
        renewals: what ``layout.renewals`` found.
        computed: what ``layout.find`` found.

    Raises:
        UnsupportedEngine: names the tensor or parameter whose layout is no permutation.
    """
    flats = {name: flat_of(name, tensor) for name, tensor in parameters.items()}
    following = _following(renewals, computed)
    found: dict[str, LiveTensor] = {
        name: storage(name, *checkpoint[name][:2], flat_of(name, kept), following[name])
        for name, kept in computed.kept.items()
    }
    for name, boxes in layout.items():
        dtype, shape, bits = checkpoint[name]
        _check_bounds(name, bits, boxes, flats)
        tensor = _live(name, dtype, shape, boxes, flats, following)
        if not np.array_equal(tensor.all_bits(), _held(bits, boxes)):
            raise UnsupportedEngine(
                f"checkpoint tensor {name!r} does not lie in {boxes[0].parameter!r} as it is: the "
                f"engine converted or repacked it"
            )
        found[name] = tensor
    _check_cover(layout, {name: flat for name, flat in flats.items() if name not in computed.into})
    return {name: found[name] for name in checkpoint if name in found}


def _following(renewals: Renewals, computed: Computed) -> Renewals:
    """What follows each parameter and each checkpoint tensor that is kept."""
    found = {**renewals, **computed.renewals}
    for name in computed.renewals:
        # What is made of a parameter that is made itself comes behind it.
        behind = [renewals[one] for one in (name, *computed.feeds.get(name, ())) if one in renewals]
        for one in behind:
            found[name] = both(found[name], one)
    return found


def both(first: Renewal, second: Renewal) -> Renewal:
    """One after the other."""

    def renew() -> None:
        first.renew()
        second.renew()

    return Renewal(renew, lambda: first.current() and second.current())


def _check_bounds(
    name: str, bits: Bits, boxes: tuple[Box, ...], flats: Mapping[str, torch.Tensor]
) -> None:
    """Boxes may come from a file: none may reach outside the tensors."""
    for box in boxes:
        strides = min(box.source_stride, box.target_stride, box.target_step)
        sizes = min(box.rows, box.columns, strides)
        starts = min(box.first, box.target_first)
        flat = flats.get(box.parameter)
        fits = flat is not None and box.target_end <= flat.numel() and box.end <= bits.size
        if sizes < 1 or starts < 0 or not fits:
            raise UnsupportedEngine(f"the layout of {name!r} does not fit {box.parameter!r}")


def flat_of(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's storage as a flat tensor of signed integers of the same width."""
    import torch  # noqa: PLC0415  # only inside engines

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    data = parameter.detach()
    if not data.is_contiguous():
        raise UnsupportedEngine(f"engine parameter {name!r} is not contiguous")
    return data.view(-1).view(integers[data.element_size()])


def _live(  # noqa: PLR0917
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    boxes: tuple[Box, ...],
    flats: Mapping[str, torch.Tensor],
    renewals: Renewals,
) -> LiveTensor:
    if not boxes:  # this rank holds nothing of it
        return SlicedTensor(name, dtype, shape, (), HostTensor(name, dtype, (0,), _NO_BITS))
    names = {box.parameter for box in boxes}
    if len(names) > 1:
        raise UnsupportedEngine(
            f"checkpoint tensor {name!r} lies in several parameters: {', '.join(sorted(names))}"
        )
    flat, first = flats[boxes[0].parameter], boxes[0].target_first
    renewal = renewals.get(boxes[0].parameter)
    if dtype == "BF16" and flat.element_size() == 4:
        flat, renewal = _widened(name, flat, renewal)
    whole = len(boxes) == 1 and boxes[0].rows == boxes[0].target_step == 1
    if whole and boxes[0].columns == math.prod(shape):
        return storage(name, dtype, shape, flat[first : boxes[0].target_end], renewal)
    return SlicedTensor(name, dtype, shape, boxes, storage(name, dtype, shape, flat, renewal))


def _widened(
    name: str, flat: torch.Tensor, renewal: Renewal | None
) -> tuple[torch.Tensor, Renewal]:
    """The upper halves of 32-bit floats that were loaded from BF16, which are its bits.

    The lower halves are zero, or the engine computes with something else: they are zeroed with
    every write, since memory that was given back and taken again holds anything.
    """
    import torch  # noqa: PLC0415  # only inside engines

    halves = flat.view(torch.int16)
    lower = halves[0::2]
    if bool(lower.any()):
        raise UnsupportedEngine(f"the engine holds {name!r} in 32 bits that are not BF16's")

    def renew() -> None:
        lower.zero_()
        if renewal is not None:
            renewal.renew()

    def current() -> bool:
        return not bool(lower.any()) and (renewal is None or renewal.current())

    return halves[1::2], Renewal(renew, current)


def storage(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    flat: torch.Tensor,
    renewal: Renewal | None = None,
) -> HostTensor | DeviceTensor:
    """A run of a live parameter as a tensor of its own.

    Args:
        name: canonical.
        dtype: as safetensors writes it.
        shape: of the tensor.
        flat: its elements, as ``flat_of`` gives them.
        renewal: of what is made of it.
    """
    if flat.device.type == "cpu":
        array = flat.numpy()
        bits = array.view(f"u{array.itemsize}")
        return HostTensor(name, dtype, shape, bits, *(renewal or ()))
    return DeviceTensor(name, dtype, shape, flat, *(renewal or ()))


_NO_BITS = np.zeros(0, np.uint8)


def _held(bits: Bits, boxes: tuple[Box, ...]) -> Bits:
    """Those bits of a checkpoint tensor that the boxes hold, box by box."""
    parts = [
        np.lib.stride_tricks.as_strided(
            bits[box.first :],
            (box.rows, box.columns),
            (box.source_stride * bits.itemsize, bits.itemsize),
            writeable=False,
        ).reshape(-1)
        for box in boxes
    ]
    return np.concatenate(parts) if parts else _NO_BITS


@dataclass
class DeviceTensor(WholeTensor):
    """A tensor on an accelerator; the changed elements and two sums alone travel.

    Attributes:
        flat: flat view of the storage, signed integers.
        written: called after each ``put``; renews what the engine keeps that is made of it.
        current: whether what it keeps is what would be made now.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    flat: torch.Tensor
    written: Callable[[], object] = do_nothing
    current: Callable[[], bool] = always_current

    def device_bits(self) -> torch.Tensor:
        """The storage itself."""
        return self.flat

    def take(self, where: Where) -> Bits:
        """A copy of these elements in host memory."""
        return self._to_host(self.flat[self._index(where)])

    def put(self, where: Where, bits: Bits) -> None:
        """Overwrite these elements; done when it returns. Commits put all in at once instead."""
        self.flat[self._index(where)] = self._there(bits)
        self.written()
        self._wait()

    def _wait(self) -> None:
        import torch  # noqa: PLC0415  # only inside engines

        if self.flat.is_cuda:
            torch.cuda.synchronize(self.flat.device)

    def holds(self, where: Where, bits: Bits) -> bool:
        """Whether these elements are these bits; compared on the device."""
        import torch  # noqa: PLC0415  # only inside engines

        return torch.equal(self.flat[self._index(where)], self._there(bits))

    def _there(self, bits: Bits) -> torch.Tensor:
        """Bits on the device, as the integers that ``flat`` holds."""
        import torch  # noqa: PLC0415  # only inside engines

        signed = np.ascontiguousarray(bits)
        if signed.itemsize > 1:
            signed = signed.view(f"i{signed.itemsize}")
        return torch.from_numpy(signed).to(self.flat.device)

    def all_bits(self) -> Bits:
        """A copy of every element in host memory."""
        return self._to_host(self.flat)

    def span(self, first: int, end: int) -> Bits:
        """A copy of a run in host memory."""
        return self._to_host(self.flat[first:end])

    def digest(self) -> Digest:
        """Digest of the whole tensor, computed on the device, with what is made of it."""
        found = device_digest.digest_run(self.name, 0, self.flat)
        return found if self.current() else found.plus(STALE)

    def digest_box(self, name: str, box: Box) -> Digest:
        """Digest of a box of the canonical tensor ``name``, computed on the device."""
        apart = self.flat.stride(0)
        rows = self.flat.as_strided(
            (box.rows, box.columns),
            (box.target_stride * apart, box.target_step * apart),
            self.flat.storage_offset() + box.target_first * apart,
        )
        return device_digest.digest_rows(name, (box.first, box.source_stride), rows)

    def _index(self, where: Where) -> Any:  # noqa: ANN401  # what torch takes between brackets
        import torch  # noqa: PLC0415  # only inside engines

        return where if isinstance(where, slice) else torch.from_numpy(where).to(self.flat.device)

    @staticmethod
    def _to_host(part: torch.Tensor) -> Bits:
        array = part.cpu().numpy()
        return array.view(f"u{array.itemsize}")


def _check_cover(layout: Layout, flats: Mapping[str, torch.Tensor]) -> None:
    """Every element of every live parameter comes from one checkpoint element, or is zero."""
    covers = {name: np.zeros(flat.numel(), np.bool_) for name, flat in flats.items()}
    for name, boxes in layout.items():
        for box in boxes:
            place = np.lib.stride_tricks.as_strided(
                covers[box.parameter][box.target_first :],
                (box.rows, box.columns),
                (box.target_stride, box.target_step),
            )
            if place.any():
                raise UnsupportedEngine(
                    f"engine parameter {box.parameter!r} is loaded twice, also from {name!r}"
                )
            place[:] = True
    for name, flat in flats.items():
        _check_padding(name, flat, covers[name])


def _check_padding(name: str, flat: torch.Tensor, cover: np.ndarray) -> None:
    import torch  # noqa: PLC0415  # only inside engines

    if not cover.any():
        raise UnsupportedEngine(f"engine parameter {name!r} comes from no checkpoint tensor")
    if cover.all():
        return
    left = flat[torch.from_numpy(np.flatnonzero(~cover)).to(flat.device)]
    if bool(left.any()):
        raise UnsupportedEngine(f"engine parameter {name!r} holds more than the checkpoint")
