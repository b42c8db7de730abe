"""Digests computed by torch, where the weights are: the host's numbers, whatever the layout.

On a GPU where there is one; on the CPU the same operations on the same integers.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_core.delta.bits import Bits
from rose_core.delta.digest import digest_run, total
from rose_engines.ondevice import device_digest
from rose_engines.tensors.canonical import HostTensor
from rose_engines.tensors.parameters import DeviceTensor
from rose_engines.tensors.slices import Box, SlicedTensor

CASES = json.loads((Path(__file__).parents[1] / "delta" / "golden.json").read_text())["blocks"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def on_device(bits: Bits) -> torch.Tensor:
    signed = bits if bits.itemsize == 1 else bits.view(f"i{bits.itemsize}")
    return torch.from_numpy(signed.copy()).to(DEVICE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["case"]))
def test_digests_on_the_device_equal_the_golden_vectors(case: dict[str, str]) -> None:
    width = {"BF16": 2, "F32": 4, "I64": 8}.get(case["dtype"], 1)
    for side in ("old", "new"):
        bits = np.frombuffer(bytes.fromhex(case[side]), f"<u{width}")
        found = device_digest.digest_run(case["name"], 0, on_device(bits))
        assert str(found) == case[f"digest_{side}"]


@given(
    st.sampled_from([1, 2, 4, 8]), st.integers(0, 1 << 40), st.integers(1, 300), st.integers(0, 99)
)
@settings(max_examples=60, deadline=None)
def test_any_bits_anywhere_in_a_tensor(width: int, first: int, count: int, seed: int) -> None:
    raw = np.random.default_rng(seed).integers(0, 256, count * width, np.uint8)
    bits = raw.view(f"u{width}")
    bits[:1] = -1 % (1 << 8 * width)
    assert device_digest.digest_run("t", first, on_device(bits)) == digest_run("t", first, bits)


def test_the_digest_does_not_depend_on_the_size_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 16, (7, 50), np.uint16)
    whole = digest_run("t", 3, bits.reshape(-1))
    for chunk in (1, 16, 50, 120, 1 << 22):
        monkeypatch.setattr(device_digest, "CHUNK", chunk)
        assert device_digest.digest_run("t", 3, on_device(bits.reshape(-1))) == whole
        assert device_digest.digest_rows("t", (3, 50), on_device(bits)) == whole


def test_a_ranks_columns_inside_a_fused_parameter() -> None:
    """Rows apart in the checkpoint and apart in the parameter, at another place in each."""
    held = np.random.default_rng(1).integers(0, 1 << 16, 400, np.uint16)
    box = Box(
        "qkv", first=8, rows=6, columns=8, source_stride=16, target_first=30, target_stride=20
    )
    host = SlicedTensor("q", "BF16", (6, 16), (box,), HostTensor("q", "BF16", (6, 16), held))
    flat = torch.cat([torch.zeros(5, dtype=torch.int16, device=DEVICE), on_device(held)])[5:]
    device = SlicedTensor("q", "BF16", (6, 16), (box,), DeviceTensor("q", "BF16", (6, 16), flat))
    wanted = total(
        digest_run("q", 8 + 16 * row, held[30 + 20 * row : 38 + 20 * row]) for row in range(6)
    )
    assert host.digest() == device.digest() == wanted


def test_a_tensor_on_a_device_is_never_copied_to_be_attested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bits = np.arange(64, dtype=np.uint16)
    tensor = DeviceTensor("t", "BF16", (64,), on_device(bits))
    monkeypatch.setattr(DeviceTensor, "_to_host", None)
    assert tensor.digest() == digest_run("t", 0, bits)
