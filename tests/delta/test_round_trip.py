import numpy as np

from rose_core.delta import FORMATS, decode_block, encode_tile


def test_a_tile_comes_back_bit_for_bit() -> None:
    kind = FORMATS["BF16"]
    old = np.arange(5000, dtype=np.uint16)
    new = old.copy()
    new[[0, 7, 4999]] = [0x8000, 0xFFFF, 1]
    block, changed = encode_tile(old, new, kind)
    changes = decode_block(block, kind, len(old))
    assert changed == 3
    assert changes.indices is not None
    old[changes.indices] = changes.resolve(old[changes.indices], kind)
    assert np.array_equal(old, new)
