"""Reads and writes Hugging Face checkpoints (safetensors) as bit patterns, without torch.

Files are mapped, so only what is touched is read (``rose_core.delta.safetensors`` has the format).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rose_core.delta.bits import Bits
from rose_core.delta.digest import Digest, digest_run, total
from rose_core.delta.errors import HeaderError
from rose_core.delta.safetensors import Header, StoredTensor, split, write_header
from rose_weights.errors import Damaged

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


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
        self._tensors: dict[str, StoredTensor] = {}
        for file in files:
            header, body = read_file(file)
            for name, place in header.places.items():
                self._tensors[name] = StoredTensor(place.dtype, place.shape, place.bits(body))

    def names(self) -> list[str]:
        """Tensor names in order."""
        return sorted(self._tensors)

    def dtype(self, name: str) -> str:
        """Element type of a tensor, in safetensors' word."""
        return self._tensors[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._tensors[name].shape

    def bits(self, name: str) -> Bits:
        """The tensor's bits, flat; a read-only view of the file."""
        return self._tensors[name].bits


def digest_of(checkpoint: Checkpoint) -> Digest:
    """Digest of a model as engines measure it: without an output matrix that is the embedding's."""
    names = checkpoint.names()
    if _HEAD in names and _EMBEDDING in names:
        same = np.array_equal(checkpoint.bits(_HEAD), checkpoint.bits(_EMBEDDING))
        names = [name for name in names if not (same and name == _HEAD)]
    return total(digest_run(name, 0, np.ascontiguousarray(checkpoint.bits(name))) for name in names)


def read_file(path: Path) -> tuple[Header, Bits]:
    """The header of a safetensors file and the bytes behind it, mapped.

    Raises:
        Damaged: it is no such file.
    """
    try:
        return split(np.memmap(path, np.uint8, mode="r"))
    except (OSError, ValueError, HeaderError) as error:
        message = f"{path} is no safetensors file: {error}"
        raise Damaged(message) from error


def write_safetensors(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to one file.

    Raises:
        OSError: the disk is full or broken.
    """
    header = write_header(((name, one.dtype, one.shape) for name, one in tensors.items()), metadata)
    with path.open("wb") as file:
        file.write(header)
        for one in tensors.values():
            file.write(np.ascontiguousarray(one.bits).data)
