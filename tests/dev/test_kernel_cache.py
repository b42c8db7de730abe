"""A checkout elsewhere runs what another has compiled, and nothing that other sources made."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rose_dev.kernel_cache import restore, save

_LOOP = "import numba\n\n\n@numba.njit(cache=True)\ndef loop(x):\n    return x + 1\n"
_RUN = "import loops; loops.loop(1); print(sum(loops.loop.stats.cache_hits.values()))"


def hits(sources: Path) -> int:
    """Calls that were served from machine code on disk."""
    command = [sys.executable, "-c", _RUN]
    return int(subprocess.run(command, cwd=sources, check=True, capture_output=True).stdout)


@pytest.fixture
def first(tmp_path: Path) -> Path:
    sources = tmp_path / "first"
    sources.mkdir()
    (sources / "loops.py").write_text(_LOOP)
    assert hits(sources) == 0
    save(sources, tmp_path / "cache")
    return sources


def test_a_second_checkout_compiles_nothing(first: Path, tmp_path: Path) -> None:
    second = shutil.copytree(first, tmp_path / "second", ignore=lambda *_: ["__pycache__"])
    restore(second, tmp_path / "cache")
    assert hits(second) == 1
    (second / "loops.py").write_text(_LOOP.replace("+ 1", "+ 2"))
    assert hits(second) == 0


def test_other_sources_get_nothing(first: Path, tmp_path: Path) -> None:
    (first / "rest.py").write_text("CONSTANT = 2\n")
    shutil.rmtree(first / "__pycache__")
    restore(first, tmp_path / "cache")
    assert not (first / "__pycache__").exists()


def test_what_a_checkout_has_compiled_is_left_alone_and_kept_when_it_is_more(
    first: Path, tmp_path: Path
) -> None:
    code = first / "__pycache__"
    (index,) = code.glob("*.nbi")
    (kept,) = (tmp_path / "cache").iterdir()
    index.write_bytes(b"ours")
    restore(first, tmp_path / "cache")
    assert index.read_bytes() == b"ours"
    save(first, tmp_path / "cache")
    assert (kept / index.name).read_bytes() != b"ours"
    (code / "loops.more.nbc").write_bytes(b"more")
    save(first, tmp_path / "cache")
    assert (kept / index.name).read_bytes() == b"ours"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [kept.name]
