"""Reads Hugging Face checkpoints (safetensors) as bit patterns, without torch.

The format is eight bytes of header length, a JSON header, then the tensors; files are mapped, so
only what is touched is read. Pickled checkpoints are refused: nothing here executes a file.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rose_core.delta import number_format
from rose_core.delta.bits import Bits
from rose_core.delta.errors import ManifestError
from rose_weights.errors import Damaged

_LENGTH = struct.Struct("<Q")


class Checkpoint:
    """A folder of ``*.safetensors`` files, or one file.

    Raises:
        Damaged: no safetensors there, or a header that cannot be.
    """

    def __init__(self, path: Path) -> None:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            message = f"{path} holds no *.safetensors; other formats are not read"
            raise Damaged(message)
        self._tensors: dict[str, tuple[str, tuple[int, ...], Bits]] = {}
        for file in files:
            self._tensors.update(_read(file))

    def names(self) -> list[str]:
        """Tensor names in order."""
        return sorted(self._tensors)

    def dtype(self, name: str) -> str:
        """Element type of a tensor, in safetensors' word."""
        return self._tensors[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._tensors[name][1]

    def bits(self, name: str) -> Bits:
        """The tensor's bits, flat; a read-only view of the file."""
        return self._tensors[name][2]


def _read(path: Path) -> Iterator[tuple[str, tuple[str, tuple[int, ...], Bits]]]:
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        (length,) = _LENGTH.unpack_from(data)
        start = _LENGTH.size + length
        header = json.loads(bytes(data[_LENGTH.size : start]))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            kind, shape = number_format(entry["dtype"]), tuple(entry["shape"])
            bits = np.frombuffer(data[start + first : start + last], kind.unsigned)
            yield name, (entry["dtype"], shape, bits.reshape(math.prod(shape)))
    except (OSError, ValueError, KeyError, TypeError, struct.error, ManifestError) as error:
        message = f"{path} is no safetensors file: {error}"
        raise Damaged(message) from error
