"""What the wheel holds, and so every image: the product, and nothing that develops or shows it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = {
    "rose_agent",
    "rose_batches",
    "rose_cli",
    "rose_core",
    "rose_engines",
    "rose_operator",
    "rose_rewards",
    "rose_router",
    "rose_sandbox",
    "rose_simulate",
    "rose_trainer",
    "rose_weights",
    "rose_wire",
}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_the_product_and_neither_development_nor_demo(names: set[str]) -> None:
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == PRODUCT


def test_the_wheel_holds_what_is_no_python_too(names: set[str]) -> None:
    needed = {"rose_agent/tap/tokens.bpf.c", "rose_cli/sbom.py", "rose_core/py.typed"}
    assert needed <= names
    assert not [name for name in names if name.endswith(".pyc")]
