"""A checkout elsewhere runs what another has compiled, and nothing that other sources made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from rose_core.delta import loops
from rose_core.delta.kernels import compiled
from rose_dev.kernel_cache import SOURCES, code_of, restore, save

RELEASE = f"numba-{version('numba')}"
_LOOP = "def loop(x):\n    return x + 1\n"
_RUN = """
import loops
from rose_core.delta.kernels import compiled
fast = compiled(loops.loop)
fast(1)
print(sum(fast.stats.cache_hits.values()))
"""


def hits(sources: Path) -> int:
    """Calls that were served from machine code on disk."""
    command = [sys.executable, "-c", _RUN]
    env = os.environ | {"NUMBA_CACHE_DIR": str(sources / "__pycache__")}  # as beside its sources
    done = subprocess.run(command, cwd=sources, env=env, check=True, capture_output=True)
    return int(done.stdout)


@pytest.fixture
def first(tmp_path: Path) -> Path:
    sources = tmp_path / "first"
    sources.mkdir()
    (sources / "loops.py").write_text(_LOOP)
    assert hits(sources) == 0
    save(sources, tmp_path / "cache")
    return sources


def test_what_is_kept_is_what_the_weight_plane_compiles() -> None:
    dispatcher: Any = compiled(loops.digest_at)
    assert dispatcher.stats.cache_path == str(code_of(SOURCES, RELEASE))


def test_a_second_checkout_compiles_nothing(first: Path, tmp_path: Path) -> None:
    second = shutil.copytree(first, tmp_path / "second", ignore=lambda *_: ["__pycache__"])
    restore(second, tmp_path / "cache")
    assert hits(second) == 1
    (second / "loops.py").write_text(_LOOP.replace("+ 1", "+ 2"))
    assert hits(second) == 0


def test_each_release_of_numba_gets_its_own(first: Path, tmp_path: Path) -> None:
    """An engine's environment has another one than the checkout's."""
    code_of(first, "numba-0").mkdir(parents=True)
    (code_of(first, "numba-0") / "loops.of-another.nbi").touch()
    (code_of(first, "numba-0") / "loops.of-another.nbc").touch()
    save(first, tmp_path / "cache")
    second = shutil.copytree(first, tmp_path / "second", ignore=lambda *_: ["__pycache__"])
    restore(second, tmp_path / "cache")
    found = [path.name for path in code_of(second, "numba-0").iterdir()]
    assert sorted(found) == ["loops.of-another.nbc", "loops.of-another.nbi"]
    assert hits(second) == 1


def test_other_sources_get_nothing(first: Path, tmp_path: Path) -> None:
    (first / "rest.py").write_text("CONSTANT = 2\n")
    shutil.rmtree(first / "__pycache__")
    restore(first, tmp_path / "cache")
    assert not code_of(first, RELEASE).exists()


def test_what_a_checkout_has_compiled_is_left_alone_and_kept_when_it_is_more(
    first: Path, tmp_path: Path
) -> None:
    code = code_of(first, RELEASE)
    (index,) = code.glob("*.nbi")
    (kept,) = (tmp_path / "cache").glob("*/*")
    index.write_bytes(b"ours")
    restore(first, tmp_path / "cache")
    assert index.read_bytes() == b"ours"
    save(first, tmp_path / "cache")
    assert (kept / index.name).read_bytes() != b"ours"
    (code / "loops.more.nbc").write_bytes(b"more")
    save(first, tmp_path / "cache")
    assert (kept / index.name).read_bytes() == b"ours"
    assert list((tmp_path / "cache").iterdir()) == [kept.parent]
