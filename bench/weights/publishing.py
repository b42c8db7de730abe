"""A publisher's work on an accelerator: comparing and coding a model where it lies.

A synthetic BF16 model of a size lies on the device, in the shape of large matrices; one element in
a hundred moves by one unit in the last place. Measured is what ``rose_trainer.ondevice`` does:
``take`` is the time for which the trainer stands still, ``blocks`` what is left to the host (zstd,
names, manifest), and the memory is what torch's allocator had beside model and state before. Once
with the state before on the host, from where it comes band by band, once with it on the device.
Before that the blocks of one tensor are compared with the host's own. ``make gpu-check`` runs this;
on the CPU it shows that it runs, and its times mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from rose_core.delta import Builder, Manifest, TensorEntry, table
from rose_core.identity import WeightVersion
from rose_trainer.device_diff import working_bytes
from rose_trainer.ondevice import Base, DeviceSnapshot, Place
from rose_trainer.staging import Layout, bits_of

SHARE = 0.01
SIZES = {"8B": 8_000_000_000}
_COLUMNS = 1 << 12
_TENSOR = 1 << 27


class WrongBlocks(Exception):
    """The device's blocks are not the host's: no figure counts."""


def measure(elements: int, device: str) -> dict[str, Any]:
    """One size with the state before on the host and on the device.

    Raises:
        WrongBlocks: the device's blocks differ from the host's.
    """
    check(device)
    return {keep_on: _measure(elements, device, keep_on) for keep_on in ("host", "device")}


def check(device: str) -> None:
    """Compare the blocks of a small model, made there and made here.

    Raises:
        WrongBlocks: they differ.
    """
    model = dict(_model(1 << 18, device))
    before = {name: tensor.cpu().clone() for name, tensor in model.items()}
    snapshot = DeviceSnapshot(Layout(list(model.items())), Base())
    snapshot.take(model)
    change(model, SHARE)
    snapshot.take(model)
    tensors, base = _bare(snapshot)
    blocks: list[list[bytes]] = [[], []]
    there, here = (Builder(tensors, base, some.append) for some in blocks)
    for name, tensor in model.items():
        snapshot.add_to(there, name, snapshot)
        here.add(bits_of(before[name]), bits_of(tensor.cpu()))
    if blocks[0] != blocks[1]:
        raise WrongBlocks(f"the blocks made on {device} are not the host's")


def _measure(elements: int, device: str, keep_on: Place) -> dict[str, Any]:
    model = dict(_model(elements, device))
    snapshot = DeviceSnapshot(Layout(list(model.items())), Base(keep_on))
    snapshot.take(model)
    tensors, base = _bare(snapshot)
    change(model, SHARE)
    settle(device)
    held = _allocated(device)
    began = time.perf_counter()
    snapshot.take(model)
    settle(device)
    taken = time.perf_counter() - began
    peak = _peak(device) - held
    blocks: list[int] = []
    builder = Builder(tensors, base, lambda data: blocks.append(len(data)))
    began = time.perf_counter()
    for name in model:
        snapshot.add_to(builder, name, snapshot)
    manifest = builder.finish(WeightVersion("bench", 1, 1))
    coded = time.perf_counter() - began
    size = 2 * sum(tensor.numel() for tensor in model.values())
    return {
        "state_bytes": size,
        "changes": manifest.changes,
        "take_ms": 1000 * taken,
        "take_gb_per_second": size / taken / 1e9,
        "blocks_ms": 1000 * coded,
        "bytes_per_change": sum(blocks) / max(manifest.changes, 1),
        "device_memory_bytes": peak,
        "device_memory_stated_bytes": working_bytes(2),
    }


def _bare(snapshot: DeviceSnapshot) -> tuple[tuple[TensorEntry, ...], Manifest]:
    """The tensor table and a manifest to start from; its digests do not matter here."""
    tensors = table(snapshot.layout.specs)
    tiles = sum(tensor.tiling.count for tensor in tensors)
    version = WeightVersion("bench", 1, 0)
    return tensors, Manifest(
        target=version, digest="0" * 32, tensors=tensors, tiles=bytes(16 * tiles)
    )


def _model(elements: int, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    for number, first in enumerate(range(0, elements, _TENSOR)):
        rows = min(_TENSOR, elements - first) // _COLUMNS
        shape = (rows, _COLUMNS)
        bits = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16, device=device)
        name = "down_proj" if number % 3 == 2 else "up_proj"
        yield f"model.layers.{number}.mlp.{name}.weight", bits.view(torch.bfloat16)


def change(model: dict[str, torch.Tensor], share: float) -> None:
    """Move this share of the elements by one unit in the last place."""
    for tensor in model.values():
        flat = tensor.view(torch.int16).view(-1)
        count = max(1, int(flat.numel() * share))
        where = torch.randint(0, flat.numel(), (count,), device=flat.device)
        flat[where] ^= 1


def settle(device: str) -> None:
    """Wait until the device has done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _allocated(device: str) -> int:
    if not device.startswith("cuda"):
        return 0
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def _peak(device: str) -> int:
    return int(torch.cuda.max_memory_allocated()) if device.startswith("cuda") else 0
