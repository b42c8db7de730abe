"""The safetensors format in memory: a header that says which tensor lies where behind it.

Eight bytes of length, a JSON object of that length, then the tensors. numpy knows no bfloat16, and
weights are bits here anyway, so a tensor is its dtype word, shape and a flat array of unsigned
integers. Pickled checkpoints are another format, which nobody here reads: reading it runs code.
Next step: ``rose_engines.tensors.safetensors`` and ``rose_weights.checkpoint`` open files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rose_core.delta.bits import Bits, number_format
from rose_core.delta.errors import HeaderError, ManifestError

LENGTH_BYTES = 8
LARGEST_HEADER = 100 << 20
"""What the library itself reads; a longer one is a file of another format."""
_METADATA = "__metadata__"
_ALIGNMENT = 8


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        dtype: safetensors' word for its type.
        shape: of the whole.
        bits: flat, as unsigned integers of its width.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: Bits


class TensorPlace(NamedTuple):
    """Where a tensor lies.

    Attributes:
        dtype, shape: as in ``StoredTensor``.
        begin, end: bytes behind the header.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def bits(self, body: Bits) -> Bits:
        """The tensor, of the bytes behind the header; a view where these are aligned."""
        data, kind = body[self.begin : self.end], number_format(self.dtype).unsigned
        if data.ctypes.data % kind.itemsize:  # older writers do not align
            data = data.copy()
        return data.view(kind)


class Header(NamedTuple):
    """What stands before the tensors.

    Attributes:
        places: by name, in the header's order.
        metadata: whatever the writer says of the file.
    """

    places: Mapping[str, TensorPlace]
    metadata: Mapping[str, str]


def header_length(start: bytes) -> int:
    """Length of the header in a file that starts with these bytes, in bytes.

    Raises:
        HeaderError: no such file starts so.
    """
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if len(start) < LENGTH_BYTES or not 0 < length <= LARGEST_HEADER:
        raise HeaderError("it does not start with the length of a header")
    return length


def read_header(text: bytes, body_bytes: int | None = None) -> Header:
    """Read a header.

    Args:
        text: the JSON object.
        body_bytes: that follow; None: the caller has the header alone, and looks at no bits. Then
            a type may be one that is not read here, as models that only serve have.

    Raises:
        HeaderError: it is none, or a tensor does not lie within what follows.
    """
    try:
        entries = json.loads(text)
        metadata = dict(entries.pop(_METADATA, {}))
        places = {name: _place(entry) for name, entry in entries.items()}
        if body_bytes is not None:
            _check_places(places, body_bytes)
    except (ValueError, KeyError, TypeError, AttributeError, ManifestError) as error:
        raise HeaderError(str(error)) from error
    return Header(places, metadata)


def _check_places(places: Mapping[str, TensorPlace], body_bytes: int) -> None:
    for name, place in places.items():
        size = math.prod(place.shape) * number_format(place.dtype).width
        within = place.begin >= 0 and place.end <= body_bytes
        if not within or place.end - place.begin != size:
            raise HeaderError(f"the offsets of {name!r} are wrong")


def _place(entry: Mapping[str, Any]) -> TensorPlace:
    begin, end = entry["data_offsets"]
    shape = tuple(int(length) for length in entry["shape"])
    return TensorPlace(str(entry["dtype"]), shape, int(begin), int(end))


def split(data: Bits) -> tuple[Header, Bits]:
    """The header of a whole file, and the bytes behind it.

    Raises:
        HeaderError: it is no such file.
    """
    begin = LENGTH_BYTES + header_length(bytes(data[:LENGTH_BYTES]))
    if begin > len(data):
        raise HeaderError("it ends within its header")
    return read_header(bytes(data[LENGTH_BYTES:begin]), len(data) - begin), data[begin:]


def tensors_of(data: Bits) -> dict[str, StoredTensor]:
    """Every tensor of a whole file, in the header's order.

    Raises:
        HeaderError: it is no such file.
    """
    header, body = split(data)
    return {
        name: StoredTensor(place.dtype, place.shape, place.bits(body))
        for name, place in header.places.items()
    }


def write_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """What a file of tensors (name, dtype word, shape) starts with; their bits follow in order."""
    entries: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * number_format(dtype).width
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
