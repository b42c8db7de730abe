"""Models that a commit in place leaves exact to the last tensor: a part of ``make atlas``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.atlas.__main__ import PROGRAM, examined
from rose_dev.engine_testing import ended_well, start_beside_engines

pytestmark = pytest.mark.engine

# Plain; with tensors that are made of weights (MLA, whose two projections are loaded as one, and
# norms); with a router in 32 bits; transposed; computed; and a loader that cannot be
# called again.
EXPECTED = {
    "qwen3": "exact",
    "deepseek-v3": "exact after refresh",
    "gemma2": "exact after refresh",
    "glm4-moe-lite": "exact after refresh",
    "gpt-oss": "exact",
    "granite-hybrid": "exact after refresh",
    "minicpm3": "exact after refresh",
}


def among_engines(arguments: list[str], folder: Path) -> None:
    log = folder / "log"
    ended_well({log: start_beside_engines(PROGRAM, arguments, log)}, 300)


def test_named_models_are_exact_as_the_page_says(tmp_path: Path) -> None:
    examined(list(EXPECTED), tmp_path, among_engines)
    found = {name: json.loads((tmp_path / f"{name}.result.json").read_bytes()) for name in EXPECTED}
    assert {name: one["result"] for name, one in found.items()} == EXPECTED
    assert all(one["tensors"] > 30 for one in found.values())
    page = (Path(__file__).parents[2] / "docs" / "atlas.md").read_text()
    for name, one in found.items():
        assert f"| `{one['architecture']}` | {name} | {one['result']} |" in page
