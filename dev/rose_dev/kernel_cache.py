"""Keeps the compiled weight kernels outside the checkout, so that a fresh clone need not compile.

numba writes machine code beside the sources. As a pytest plugin this takes it from
``$ROSE_CACHE/kernels`` where a checkout has none, and puts it there after a session that compiled
more than is kept. A folder's name says which sources made it, and those below it which release of
numba: an engine's environment has another one than the checkout's. numba itself checks source and
processor once more, function by function.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

import rose_core.delta
from rose_dev.cluster.parts import cache_root

SOURCES = Path(rose_core.delta.__file__).parent
_RELEASES = "numba-*"


def kept(sources: Path, cache: Path) -> Path:
    """Where the machine code of these sources is kept, a folder for each release of numba."""
    made_by = f"Python {sys.version_info}"
    texts = [path.name.encode() + path.read_bytes() for path in sorted(sources.glob("*.py"))]
    return cache / hashlib.sha256(b"\0".join([made_by.encode(), *texts])).hexdigest()[:32]


def code_of(sources: Path, release: str) -> Path:
    """Where a release of numba keeps the machine code (``rose_core.delta.kernels.compiled``).

    numba names a folder by the whole path of the sources, so each checkout has another.
    """
    name = hashlib.sha1(str(sources).encode(), usedforsecurity=False).hexdigest()
    return sources / "__pycache__" / release / f"{sources.name}_{name}"


def restore(sources: Path, cache: Path) -> None:
    """Give a checkout that has compiled nothing what another has compiled."""
    for folder in kept(sources, cache).glob(_RELEASES):
        code = code_of(sources, folder.name)
        if not _indexes(code):
            _copy(folder, code)


def save(sources: Path, cache: Path) -> None:
    """Keep what this checkout has compiled, if it is more than what is kept."""
    for release in (sources / "__pycache__").glob(_RELEASES):
        folder, code = kept(sources, cache) / release.name, code_of(sources, release.name)
        if len(_machine_code(code)) <= len(_machine_code(folder)):
            continue
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=cache))
        _copy(code, draft)
        # As a whole: an index of one session must never meet the code of another.
        shutil.rmtree(folder, ignore_errors=True)
        try:
            draft.rename(folder)
        except OSError:  # another session was faster
            shutil.rmtree(draft)


def _copy(source: Path, target: Path) -> None:
    """Indexes are read first and written last: whatever they name must be there."""
    indexes = {path.name: path.read_bytes() for path in _indexes(source)}
    target.mkdir(parents=True, exist_ok=True)
    for path in _machine_code(source):
        shutil.copyfile(path, target / path.name)
    for name, data in indexes.items():
        draft = target / f"{name}.{os.getpid()}"
        draft.write_bytes(data)
        draft.replace(target / name)


def _indexes(folder: Path) -> list[Path]:
    return list(folder.glob("*.nbi"))


def _machine_code(folder: Path) -> list[Path]:
    return list(folder.glob("*.nbc"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before any worker starts."""
    if not hasattr(session.config, "workerinput"):
        restore(SOURCES, cache_root() / "kernels")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """After the last worker has ended."""
    if not hasattr(session.config, "workerinput"):
        save(SOURCES, cache_root() / "kernels")
