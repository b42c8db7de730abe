"""Reads and writes safetensors files as bit patterns, without copying and without a tensor library.

numpy knows no bfloat16, and weights are bits here anyway: each tensor comes back as its dtype word,
shape and a flat, memory-mapped array of unsigned integers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from rose_core.delta.bits import Bits, number_format
from rose_core.delta.errors import ManifestError
from rose_core.devices.model_size import Stored
from rose_engines.errors import UnsupportedEngine
from rose_engines.tensors.canonical import AT_ONCE, LiveTensor, WholeTensor

StoredTensor = tuple[str, tuple[int, ...], Bits]
_LARGEST_HEADER = 100 << 20


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
    data = np.memmap(path, np.uint8, mode="r")
    size = int(data[:8].view("<u8")[0]) if len(data) >= 8 else _LARGEST_HEADER
    if size > min(_LARGEST_HEADER, len(data) - 8):
        raise UnsupportedEngine(f"{path} is no safetensors file")
    body = data[8 + size :]
    try:
        header = json.loads(bytes(data[8 : 8 + size]))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            shape = tuple(int(length) for length in entry["shape"])
            kind = number_format(entry["dtype"])
            size_fits = end - start == math.prod(shape) * kind.width
            if not (size_fits and 0 <= start <= end <= len(body)):
                raise UnsupportedEngine(f"{path}: the header's offsets of {name!r} are wrong")
            yield name, (entry["dtype"], shape, _bits(body[start:end], kind.unsigned))
    except (ValueError, KeyError, TypeError, AttributeError, ManifestError) as error:
        raise UnsupportedEngine(f"{path}: its header is damaged: {error}") from error


def list_tensors(folder: Path) -> tuple[Stored, ...]:
    """Name, type and shape of every tensor of a model folder, from the files' headers alone.

    Raises:
        UnsupportedEngine: a file is damaged.
        OSError: a file cannot be read.
    """
    return tuple(one for file in sorted(folder.glob("*.safetensors")) for one in _listed(file))


def _listed(path: Path) -> Iterator[Stored]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 0 < size <= _LARGEST_HEADER:
            raise UnsupportedEngine(f"{path} is no safetensors file")
        text = file.read(size)
    try:
        for name, entry in json.loads(text).items():
            if name != "__metadata__":
                shape = tuple(int(length) for length in entry["shape"])
                yield Stored(name, str(entry["dtype"]), shape)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedEngine(f"{path}: its header is damaged: {error}") from error


def write_file(path: Path, tensors: Mapping[str, LiveTensor]) -> None:
    """Write tensors to one file, tensor by tensor.

    Raises:
        OSError: the file cannot be written.
    """
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in tensors.items():
        size = math.prod(tensor.shape) * number_format(tensor.dtype).width
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
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


def _bits(data: np.ndarray, kind: np.dtype) -> Bits:
    if data.ctypes.data % kind.itemsize:  # older writers do not align
        data = data.copy()
    return data.view(kind)
