"""The table of findings in ``tests/gpu_node/README.md`` names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "tests" / "gpu_node" / "README.md"
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", README.read_text())


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_a_finding_has_its_test(file: str, test: str) -> None:
    text = (ROOT / file).read_text()
    assert re.search(rf"^(async )?def {test or 'test_'}", text, re.MULTILINE)


def test_every_finding_is_in_the_table() -> None:
    rows = re.findall(r"^\| ([DW]\d+) \|", README.read_text(), re.MULTILINE)
    assert set(rows) == {*(f"D{n}" for n in range(1, 10)), *(f"W{n}" for n in range(1, 12))}


def test_every_file_on_the_node_is_described() -> None:
    files = {path.name for path in README.parent.glob("test_*.py")}
    assert set(re.findall(r"^\| `(test_\w+\.py)` \|", README.read_text(), re.MULTILINE)) == files
