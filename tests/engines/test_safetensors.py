"""Reading and writing safetensors as bits, against the reference library."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rose_engines.errors import UnsupportedEngine
from rose_engines.tensors.canonical import host_tensors
from rose_engines.tensors.safetensors import (
    list_tensors,
    read_checkpoint,
    read_file,
    write_file,
)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return {
        "a": torch.randn(3, 5, generator=draw).to(torch.bfloat16),
        "b": torch.randn(7, generator=draw),
        "c": torch.tensor(2.0),
        "empty": torch.zeros(0, 4),
    }


def test_reads_what_the_library_writes(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    found = read_checkpoint(tmp_path)
    assert found.keys() == tensors.keys()
    dtype, shape, bits = found["a"]
    assert (dtype, shape) == ("BF16", (3, 5))
    assert np.array_equal(bits, tensors["a"].view(torch.int16).numpy().view(np.uint16).ravel())
    assert found["b"][0] == "F32"
    assert found["c"][1] == ()


def test_library_reads_what_we_write(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "m.safetensors")
    write_file(
        tmp_path / "copy.safetensors", host_tensors(dict(read_file(tmp_path / "m.safetensors")))
    )
    copy = load_file(tmp_path / "copy.safetensors")
    assert copy.keys() == tensors.keys()
    assert all(torch.equal(copy[name], tensors[name]) for name in tensors)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedEngine, match="safetensors"):
        read_checkpoint(tmp_path)


def header(**entry: object) -> bytes:
    text = json.dumps({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}})
    return len(text).to_bytes(8, "little") + text.encode() + b"\0" * 8


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x" * 3,
        b"\xff" * 64,
        (200).to_bytes(8, "little") + b"{}",
        (8).to_bytes(8, "little") + b"notjson!",
        header(data_offsets=[0, 4]),
        header(data_offsets=[4, 12]),
        header(data_offsets=[-8, 0]),
        header(dtype="Q9"),
        header(shape="x"),
        (2).to_bytes(8, "little") + b"[]",
    ],
    ids=range(11),
)
def test_a_damaged_checkpoint_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(UnsupportedEngine, match=r"m\.safetensors"):
        read_checkpoint(tmp_path)


def test_a_model_with_a_type_that_is_not_read_here_is_listed_for_its_size(tmp_path: Path) -> None:
    file = header(dtype="F8_E8M0", data_offsets=[0, 2])
    (tmp_path / "m.safetensors").write_bytes(file)
    assert [(one.dtype, one.shape) for one in list_tensors(tmp_path)] == [("F8_E8M0", (2,))]
    with pytest.raises(UnsupportedEngine, match="F8_E8M0"):
        read_checkpoint(tmp_path)
