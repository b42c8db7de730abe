"""Delta directories ``weight_vNNNNNN`` as slime and miles publish and read them.

A directory holds safetensors files whose tensors are zstd frames: per changed tensor either the XOR
of its old and new bytes, or the changed byte positions (u32 count, u32 each) and the new bytes. The
files' metadata maps tensor name to a checksum of its new bytes; ``model.safetensors.index.json``
names version, base version, encoding and checksum. Tensors that did not change are not listed.
Reading checks every checksum, so a delta applied to the wrong base is refused.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import zstandard

from rose_core.delta.safetensors import StoredTensor
from rose_weights.checkpoint import read_file, write_safetensors
from rose_weights.disk import Disk
from rose_weights.errors import Damaged

INDEX = "model.safetensors.index.json"
Encoding = Literal["xor", "overwrite"]
Bytes = npt.NDArray[np.uint8]


def _adler32(data: Bytes) -> str:
    return f"{zlib.adler32(data.data):08x}"


def _xxh3(data: Bytes) -> str:
    import xxhash  # noqa: PLC0415  # needed for these directories only

    return str(xxhash.xxh3_128_hexdigest(data.data))


CHECKSUMS: dict[str, Callable[[Bytes], str]] = {"adler32": _adler32, "xxh3-128": _xxh3}


@dataclass(frozen=True)
class DeltaDir:
    """One version's directory, opened.

    Attributes:
        version, base_version: the trainer's numbers.
        encoding: ``xor`` or ``overwrite``.
        checksum: a key of ``CHECKSUMS``.
    """

    folder: Path
    version: int
    base_version: int
    encoding: str
    checksum: str
    _files: Mapping[str, str]

    @classmethod
    def open(cls, folder: Path) -> DeltaDir:
        """Read a directory's index.

        Raises:
            Damaged: no such directory, or a kind that is not read here; says which.
        """
        try:
            index = json.loads((folder / INDEX).read_bytes())
            about = index["metadata"]
            found = cls(
                folder,
                int(about["version"]),
                int(about["base_version"]),
                str(about["delta_encoding"]),
                str(about["checksum_format"]),
                dict(index["weight_map"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            message = f"{folder} is no delta directory: {type(error).__name__}: {error}"
            raise Damaged(message) from error
        if found.encoding not in {"xor", "overwrite"} or about["compression_format"] != "zstd":
            message = (
                f"{folder}: {found.encoding} in {about['compression_format']} is not read here"
            )
            raise Damaged(message)
        if found.checksum not in CHECKSUMS:
            message = f"{folder}: checksum {found.checksum!r}; readable: {', '.join(CHECKSUMS)}"
            raise Damaged(message)
        return found

    def apply(self, old: Callable[[str], Bytes]) -> Iterator[tuple[str, Bytes]]:
        """New bytes of every changed tensor, checked.

        Args:
            old: bytes of a tensor in the base.

        Raises:
            Damaged: a frame is broken, or the base is not the one the delta was made from.
        """
        for file in sorted(set(self._files.values())):
            header, body = read_file(self.folder / file)
            for name, place in header.places.items():
                frame = bytes(body[place.begin : place.end])
                yield name, self._one(name, frame, old(name), header.metadata.get(name))

    def _one(self, name: str, frame: bytes, before: Bytes, wanted: str | None) -> Bytes:
        most = 5 * before.nbytes + 4
        try:
            plain = zstandard.ZstdDecompressor().decompress(frame, max_output_size=most)
            after = _decode(np.frombuffer(plain, np.uint8), before, self.encoding)
        except (zstandard.ZstdError, ValueError, IndexError) as error:
            message = f"{self.folder}: {name}: {error}"
            raise Damaged(message) from error
        found = CHECKSUMS[self.checksum](after)
        if found != wanted:
            message = (
                f"{self.folder}: {name} has {self.checksum} {found} instead of {wanted}; it starts "
                f"from version {self.base_version}, is that what you have?"
            )
            raise Damaged(message)
        return after


class DeltaDirWriter:
    """Writes one version's directory; the index last, so a directory with an index is whole.

    Args:
        root: the folder in which ``weight_vNNNNNN`` is made.
        version: its number; the base is the one before.
    """

    def __init__(
        self, root: Path, version: int, *, encoding: Encoding = "xor", checksum: str = "xxh3-128"
    ) -> None:
        self.folder = root / f"weight_v{version:06d}"
        self._version = version
        self._encoding = encoding
        self._checksum = checksum
        self._frames: dict[str, StoredTensor] = {}
        self._sums: dict[str, str] = {}

    def add(self, name: str, old: Bytes, new: Bytes) -> None:
        """Add a tensor's bytes; an unchanged one leaves no trace."""
        if np.array_equal(old, new):
            return
        plain = _encode(old, new, self._encoding)
        frame = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(plain.data), np.uint8)
        self._frames[name] = StoredTensor("U8", frame.shape, frame)
        self._sums[name] = CHECKSUMS[self._checksum](new)

    def finish(self) -> Path:
        """Write files and index.

        Raises:
            OSError: the disk is full or broken.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        file = "model-00000-of-00001.safetensors"
        write_safetensors(self.folder / file, self._frames, metadata=self._sums)
        about = {
            "version": f"{self._version:06d}",
            "base_version": f"{self._version - 1:06d}",
            "delta_encoding": self._encoding,
            "compression_format": "zstd",
            "checksum_format": self._checksum,
        }
        index = {"metadata": about, "weight_map": dict.fromkeys(self._frames, file)}
        Disk().write(self.folder / INDEX, json.dumps(index).encode(), durable=True)
        return self.folder


def _encode(old: Bytes, new: Bytes, encoding: Encoding) -> Bytes:
    if encoding == "xor":
        return old ^ new
    where = np.flatnonzero(old != new).astype("<u4")
    count = np.array([where.size], "<u4")
    return np.concatenate([count.view(np.uint8), where.view(np.uint8), new[where]])


def _decode(plain: Bytes, before: Bytes, encoding: str) -> Bytes:
    if encoding == "xor":
        return before ^ plain
    count = int(plain[:4].view("<u4")[0])
    where = plain[4 : 4 + 4 * count].view("<u4")
    after = before.copy()
    after[where] = plain[4 + 4 * count :]
    return after
