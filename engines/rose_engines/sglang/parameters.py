"""Where each checkpoint tensor lies inside a running SGLang model.

SGLang fuses q, k, v and gate, up into one parameter each and pads the vocabulary, so a tensor of
the checkpoint is a block of rows inside a live parameter. The map is proposed by name and then
*proved* at start: the live bytes must equal the checkpoint's, every live parameter must be covered,
and what is left over must be zero padding. A layout that is not such a permutation (quantised and
repacked weights, expert stacks, other ranks' slices) is refused by name, before any turn is served.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rose_core.delta.bits import Bits
from rose_engines.errors import UnsupportedEngine
from rose_engines.live import HostTensor, LiveTensor, Where
from rose_engines.safetensors import StoredTensor

if TYPE_CHECKING:
    import torch

# checkpoint's module -> (fused module, parts in the order SGLang stacks them)
_FUSED = {
    "q_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "k_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "v_proj": ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    "gate_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
    "up_proj": ("gate_up_proj", ("gate_proj", "up_proj")),
}
_MODULE = re.compile(r"^(?P<head>.*\.)?(?P<module>\w+)\.(?P<leaf>weight|bias)$")


@dataclass(frozen=True)
class Place:
    """A checkpoint tensor's elements ``first <= i < end`` of a flat live parameter."""

    parameter: str
    first: int
    end: int


def propose(sizes: Mapping[str, int], parameters: Iterable[str]) -> dict[str, Place]:
    """Place of every checkpoint tensor, by name.

    Args:
        sizes: checkpoint tensor -> number of elements.
        parameters: names of the live parameters.

    Raises:
        UnsupportedEngine: names the first tensor that has no place.
    """
    live = set(parameters)
    return {name: _place(name, sizes, live) for name in sizes}


def _place(name: str, sizes: Mapping[str, int], live: set[str]) -> Place:
    if name in live:
        return Place(name, 0, sizes[name])
    match = _MODULE.match(name)
    fused = _FUSED.get(match["module"]) if match else None
    if match is None or fused is None:
        raise UnsupportedEngine(f"the engine has no parameter for checkpoint tensor {name!r}")
    head, leaf = match["head"] or "", match["leaf"]
    target = f"{head}{fused[0]}.{leaf}"
    parts = [f"{head}{part}.{leaf}" for part in fused[1]]
    lacking = [part for part in parts if part not in sizes]
    if target not in live or lacking:
        raise UnsupportedEngine(
            f"checkpoint tensor {name!r} should be part of {target!r}, which the engine or the "
            f"checkpoint does not have whole"
        )
    first = sum(sizes[part] for part in parts[: parts.index(name)])
    return Place(target, first, first + sizes[name])


def live_tensors(
    parameters: Mapping[str, torch.Tensor], checkpoint: Mapping[str, StoredTensor]
) -> dict[str, LiveTensor]:
    """The proved map: checkpoint name -> its elements inside the running model.

    Args:
        parameters: the model's parameters by name.
        checkpoint: what the engine was started from.

    Raises:
        UnsupportedEngine: names the tensor whose layout is not a plain block of rows.
    """
    places = propose({n: math.prod(s[1]) for n, s in checkpoint.items()}, parameters)
    flats = {name: _flat(name, tensor) for name, tensor in parameters.items()}
    found: dict[str, LiveTensor] = {}
    for name, (dtype, shape, bits) in checkpoint.items():
        place = places[name]
        tensor = _live(name, dtype, shape, flats[place.parameter], place)
        if not np.array_equal(tensor.all_bits(), bits):
            raise UnsupportedEngine(
                f"checkpoint tensor {name!r} does not lie in {place.parameter!r} as it is: the "
                f"engine converted, repacked or sliced it"
            )
        found[name] = tensor
    _check_cover(places, flats)
    return found


def _flat(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's storage as a flat tensor of signed integers of the same width."""
    import torch  # noqa: PLC0415  # only inside engines

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    data = parameter.detach()
    if not data.is_contiguous():
        raise UnsupportedEngine(f"engine parameter {name!r} is not contiguous")
    return data.view(-1).view(integers[data.element_size()])


def _live(
    name: str, dtype: str, shape: tuple[int, ...], flat: torch.Tensor, place: Place
) -> LiveTensor:
    part = flat[place.first : place.end]
    if flat.device.type == "cpu":
        array = part.numpy()
        return HostTensor(name, dtype, shape, array.view(f"u{array.itemsize}"))
    return DeviceTensor(name, dtype, shape, part)


@dataclass
class DeviceTensor:
    """A tensor on an accelerator; the changed elements alone travel.

    Attributes:
        flat: flat view of the storage, signed integers.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    flat: torch.Tensor

    def take(self, where: Where) -> Bits:
        """A copy of these elements in host memory."""
        return self._to_host(self.flat[self._index(where)])

    def put(self, where: Where, bits: Bits) -> None:
        """Overwrite these elements; done when it returns."""
        import torch  # noqa: PLC0415  # only inside engines

        signed = np.ascontiguousarray(bits)
        if signed.itemsize > 1:
            signed = signed.view(f"i{signed.itemsize}")
        self.flat[self._index(where)] = torch.from_numpy(signed).to(self.flat.device)
        if self.flat.is_cuda:
            torch.cuda.synchronize(self.flat.device)

    def all_bits(self) -> Bits:
        """A copy of every element in host memory."""
        return self._to_host(self.flat)

    def _index(self, where: Where) -> Any:  # noqa: ANN401  # what torch takes between brackets
        import torch  # noqa: PLC0415  # only inside engines

        return where if isinstance(where, slice) else torch.from_numpy(where).to(self.flat.device)

    @staticmethod
    def _to_host(part: torch.Tensor) -> Bits:
        array = part.cpu().numpy()
        return array.view(f"u{array.itemsize}")


def _check_cover(places: Mapping[str, Place], flats: Mapping[str, torch.Tensor]) -> None:
    """Every live parameter is made of checkpoint tensors and zero padding at its end."""
    covered: dict[str, list[Place]] = defaultdict(list)
    for place in places.values():
        covered[place.parameter].append(place)
    for name, flat in flats.items():
        end = 0
        for place in sorted(covered[name], key=lambda place: place.first):
            if place.first != end:
                raise UnsupportedEngine(f"engine parameter {name!r} has a gap at element {end}")
            end = place.end
        if end == 0:
            raise UnsupportedEngine(f"engine parameter {name!r} comes from no checkpoint tensor")
        if bool(flat[end:].any()):
            raise UnsupportedEngine(f"engine parameter {name!r} holds more than the checkpoint")
