"""Golden vectors: what other implementations of ``docs/weight-format.md`` must reproduce.

``golden.json`` holds, per case: tensor name, element type, bits before and after (hexadecimal,
little endian), the three streams before compression, one valid block, the digests of both states.
Compressed bytes may differ between builds of zstd, so the block is only read, never compared.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from rose_core.delta import Manifest, decode_block, digest_change, digest_run, number_format
from rose_core.delta.codec import encode_on_base, encode_tile, find_changes
from rose_core.delta.kernels import Backend, kernels
from tests.delta.strategies import BACKENDS, backend_name

CASES = json.loads((Path(__file__).parent / "golden.json").read_text())


@pytest.mark.parametrize("backend", BACKENDS, ids=backend_name)
@pytest.mark.parametrize("case", CASES["blocks"], ids=lambda case: case["case"])
def test_golden_blocks_are_decoded_and_written_byte_for_byte(
    case: dict[str, str], backend: Backend
) -> None:
    kind = number_format(case["dtype"])
    old, new = (
        np.frombuffer(bytes.fromhex(case[side]), kind.unsigned).copy() for side in ("old", "new")
    )
    changes = decode_block(bytes.fromhex(case["block"]), kind, len(old), backend)
    where = slice(None) if changes.indices is None else changes.indices
    result = old.copy()
    result[where] = changes.resolve(old[where], kind)
    assert np.array_equal(result, new)
    found = find_changes(old, new, kind, backend)
    assert found.indices is not None
    assert found.steps is not None
    streams = kernels(backend).pack(found.indices, found.steps)
    assert [stream.tobytes().hex() for stream in streams] == [
        case["gaps"],
        case["codes"],
        case["escapes"],
    ]
    block, count = encode_tile(old, new, kind, backend)
    assert block[0] == bytes.fromhex(case["block"])[0]
    assert count == len(found)
    before = digest_run(case["name"], 0, old, backend)
    assert str(before) == case["digest_old"]
    assert str(digest_run(case["name"], 0, new, backend)) == case["digest_new"]
    moved = digest_change(
        case["name"], found.indices, old[found.indices], new[found.indices], backend
    )
    assert str(before.plus(moved)) == case["digest_new"]


@pytest.mark.parametrize("backend", BACKENDS, ids=backend_name)
def test_block_coded_on_its_base(backend: Backend) -> None:
    case = CASES["rice"]
    kind = number_format(case["dtype"])
    old, new = (
        np.frombuffer(bytes.fromhex(case[side]), kind.unsigned).copy() for side in ("old", "new")
    )
    found = find_changes(old, new, kind, backend)
    block = encode_on_base(old, found, kind, backend)
    assert block.hex() == case["block"]
    changes = decode_block(block, kind, len(old), backend, base=old)
    assert changes.indices is not None
    old[changes.indices] = changes.resolve(old[changes.indices], kind)
    assert np.array_equal(old, new)


def test_the_golden_manifest_is_written_byte_for_byte() -> None:
    data = bytes.fromhex(CASES["manifest"])
    manifest = Manifest.decode(data)
    assert manifest.encode() == data
    assert manifest.name == CASES["manifest_name"]
    assert str(manifest.target) == "golden@3.14"
    assert str(manifest.base) == "golden@3.13"
    assert manifest.digest == CASES["manifest_digest"]
