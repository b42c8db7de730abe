import numpy as np
import pytest

from rose_core.delta import Tiling, tiling
from rose_core.delta.tiles import SMALLEST_TILE_ELEMENTS, TILE_ELEMENTS

NAMES = {
    "model.embed_tokens.weight": (151936, 1024),
    "model.layers.3.self_attn.q_proj.weight": (4096, 4096),
    "model.layers.3.self_attn.o_proj.weight": (4096, 4096),
    "model.layers.3.mlp.down_proj.weight": (1024, 3072),
    "model.layers.3.mlp.gate_proj.weight": (12288, 4096),
    "model.layers.3.mlp.experts.gate_up_proj": (16, 1536, 2048),
    "model.norm.weight": (4096,),
    "odd": (1009, 1013),
    "number": (),
    "nothing": (0, 5),
}


@pytest.mark.parametrize(("name", "shape"), NAMES.items())
def test_tiles_cover_every_element_once(name: str, shape: tuple[int, ...]) -> None:
    cut = tiling(name, shape)
    elements = int(np.prod(shape, dtype=np.int64))
    assert sum(box.elements for box in cut.boxes()) == elements
    if elements > 5_000_000:
        return
    flat = np.arange(elements)
    seen = np.zeros(elements, bool)
    for tile, box in enumerate(cut.boxes()):
        where = cut.flat(tile, np.arange(box.elements))
        assert np.array_equal(cut.cut(flat, tile), where)
        seen[where] = True
    assert seen.all()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_own_whole_tiles(ranks: int) -> None:
    rows = tiling("model.layers.0.mlp.gate_proj.weight", (12288, 4096))
    assert rows.tile_columns == 4096
    assert (12288 // ranks) % rows.tile_rows == 0
    columns = tiling("model.layers.0.mlp.down_proj.weight", (4096, 12288))
    assert (12288 // ranks) % columns.tile_columns == 0
    embedding = tiling("model.embed_tokens.weight", (151936, 1024))
    assert (151936 // ranks) % embedding.tile_rows == 0


def test_tiles_are_neither_too_large_nor_too_small() -> None:
    for name, shape in NAMES.items():
        cut = tiling(name, shape)
        elements = int(np.prod(shape, dtype=np.int64))
        for box in cut.boxes():
            assert box.elements <= 2 * TILE_ELEMENTS
        if elements < 8 * SMALLEST_TILE_ELEMENTS:
            assert cut.count <= 1


def test_edges_may_be_smaller() -> None:
    cut = Tiling(10, 7, 4, 3)
    assert cut.count == 9
    assert cut.box(8).elements == 2 * 1
