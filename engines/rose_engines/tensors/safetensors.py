"""Reads and writes the safetensors files of models, without copying and without a tensor library.

Files are mapped, so only what is touched is read (``rose_core.delta.safetensors`` has the format).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from rose_core.delta.bits import Bits
from rose_core.delta.errors import HeaderError
from rose_core.delta.safetensors import (
    LENGTH_BYTES,
    StoredTensor,
    header_length,
    read_header,
    tensors_of,
    write_header,
)
from rose_core.devices.model_size import Stored
from rose_engines.errors import UnsupportedEngine
from rose_engines.tensors.canonical import AT_ONCE, LiveTensor, WholeTensor


def read_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model folder: HF name -> (dtype word, shape, flat bits).

    Raises:
        UnsupportedEngine: the folder holds no safetensors, or a damaged one.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedEngine(f"{folder} holds no safetensors files, the only format allowed")
    return {name: tensor for file in files for name, tensor in read_file(file)}


def read_file(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor of one file, in the order of its header.

    Raises:
        UnsupportedEngine: the file is damaged.
    """
    try:
        yield from tensors_of(np.memmap(path, np.uint8, mode="r")).items()
    except (ValueError, HeaderError) as error:  # the former where it is empty
        raise UnsupportedEngine(f"{path} is no safetensors file: {error}") from error


def list_tensors(folder: Path) -> tuple[Stored, ...]:
    """Name, type and shape of every tensor of a model folder, from the files' headers alone.

    Raises:
        UnsupportedEngine: a file is damaged.
        OSError: a file cannot be read.
    """
    return tuple(one for file in sorted(folder.glob("*.safetensors")) for one in _listed(file))


def _listed(path: Path) -> Iterator[Stored]:
    try:
        with path.open("rb") as file:
            header = read_header(file.read(header_length(file.read(LENGTH_BYTES))))
    except HeaderError as error:
        raise UnsupportedEngine(f"{path} is no safetensors file: {error}") from error
    for name, place in header.places.items():
        yield Stored(name, place.dtype, place.shape)


def write_file(path: Path, tensors: Mapping[str, LiveTensor]) -> None:
    """Write tensors to one file, tensor by tensor.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("wb") as file:
        file.write(write_header((name, one.dtype, one.shape) for name, one in tensors.items()))
        for tensor in tensors.values():
            for bits in _in_order(tensor):
                file.write(np.ascontiguousarray(bits).tobytes())


def _in_order(tensor: LiveTensor) -> Iterator[Bits]:
    """Every element in the checkpoint's order, which need not be that of the engine's boxes."""
    if isinstance(tensor, WholeTensor):
        yield tensor.all_bits()
        return
    size = math.prod(tensor.shape)
    for first in range(0, size, AT_ONCE):
        where, _ = tensor.own(slice(first, min(first + AT_ONCE, size)))
        yield tensor.take(where)
