"""Reads and writes Hugging Face checkpoints (safetensors) as bit patterns, without torch.

The format is eight bytes of header length, a JSON header, then the tensors; files are mapped, so
only what is touched is read. Pickled checkpoints are refused: nothing here executes a file.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rose_core.delta import number_format
from rose_core.delta.bits import Bits
from rose_core.delta.digest import Digest, digest_run, total
from rose_core.delta.errors import ManifestError
from rose_weights.errors import Damaged

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
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


def digest_of(checkpoint: Checkpoint) -> Digest:
    """Digest of a model as engines measure it: without an output matrix that is the embedding's."""
    names = checkpoint.names()
    if _HEAD in names and _EMBEDDING in names:
        same = np.array_equal(checkpoint.bits(_HEAD), checkpoint.bits(_EMBEDDING))
        names = [name for name in names if not (same and name == _HEAD)]
    return total(digest_run(name, 0, np.ascontiguousarray(checkpoint.bits(name))) for name in names)


def _read(path: Path) -> Iterator[tuple[str, tuple[str, tuple[int, ...], Bits]]]:
    header, body = read_header(path)
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            kind, shape = number_format(entry["dtype"]), tuple(entry["shape"])
            bits = np.frombuffer(body[first:last], kind.unsigned)
            yield name, (entry["dtype"], shape, bits.reshape(math.prod(shape)))
    except (ValueError, KeyError, TypeError, ManifestError) as error:
        message = f"{path} is no safetensors file: {error}"
        raise Damaged(message) from error


def read_header(path: Path) -> tuple[dict[str, Any], memoryview]:
    """The JSON header of a safetensors file and its data, mapped.

    Raises:
        Damaged: it is no such file.
    """
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        (length,) = _LENGTH.unpack_from(data)
        start = _LENGTH.size + length
        header: dict[str, Any] = dict(json.loads(bytes(data[_LENGTH.size : start])))
    except (OSError, ValueError, TypeError, struct.error) as error:
        message = f"{path} is no safetensors file: {error}"
        raise Damaged(message) from error
    return header, data[start:]


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...], Bits]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors (element type, shape, bits) to one file.

    Raises:
        OSError: the disk is full or broken.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape, bits) in tensors.items():
        end = offset + bits.nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for _, _, bits in tensors.values():
            file.write(np.ascontiguousarray(bits).data)
