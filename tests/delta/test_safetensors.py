"""The header of a safetensors file, without any file."""

import json

import numpy as np
import pytest

from rose_core.delta.errors import HeaderError
from rose_core.delta.safetensors import (
    LARGEST_HEADER,
    header_length,
    read_header,
    split,
    tensors_of,
    write_header,
)

WEIGHT = np.array([1, 2, 3, 4, 5, 6], np.uint16)
SCALE = np.array([7], np.uint8)


def file() -> np.ndarray:
    header = write_header([("scale", "U8", (1,)), ("weight", "BF16", (2, 3))], {"format": "pt"})
    return np.frombuffer(header + SCALE.tobytes() + WEIGHT.tobytes(), np.uint8)


def test_a_tensor_that_is_not_aligned_is_read_like_one_that_is() -> None:
    found = tensors_of(file())
    assert [*found] == ["scale", "weight"]
    assert (found["weight"].dtype, found["weight"].shape) == ("BF16", (2, 3))
    assert found["weight"].bits.tolist() == WEIGHT.tolist()
    assert found["scale"].bits.tolist() == SCALE.tolist()


def test_metadata_is_no_tensor() -> None:
    header, _ = split(file())
    assert header.metadata == {"format": "pt"}
    assert "__metadata__" not in header.places


@pytest.mark.parametrize("missing", [1, 12])
def test_a_file_that_lacks_bytes_is_refused_by_the_tensor_that_lacks_them(missing: int) -> None:
    with pytest.raises(HeaderError, match="'weight'"):
        split(file()[:-missing])


@pytest.mark.parametrize(
    "start", [b"", b"\1" * 7, bytes(8), (LARGEST_HEADER + 1).to_bytes(8, "little")]
)
def test_a_length_that_no_header_has_is_refused(start: bytes) -> None:
    with pytest.raises(HeaderError, match="length"):
        header_length(start)


def test_a_list_of_pairs_is_no_header() -> None:
    entry = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    with pytest.raises(HeaderError):
        read_header(json.dumps([["t", entry]]).encode())
