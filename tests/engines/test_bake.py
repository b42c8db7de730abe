"""Kernels baked without a GPU are what Triton looks up, by its own keys; nobody writes there."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from rose_agent.host.users import kernel_caches
from rose_dev.engine_environment import engine_python, is_ready
from rose_engines.bake import ARCHITECTURES

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not is_ready(), reason="the engine's environment is not there: make engine"),
    pytest.mark.skipif(os.geteuid() != 0, reason="giving users needs root"),
]
ROOT = Path(__file__).parents[2]
HOPPER, AMPERE = "90", "80"
UID = 42_600


def python(*words: str, **variables: str) -> str:
    """What the engine's Python prints."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [str(engine_python()), *words],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'engines'}", **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the image's build makes it, for Hopper only."""
    made = tmp_path_factory.mktemp("image") / "made"
    python("-m", "rose_engines.bake", str(made), "--architectures", HOPPER)
    # An image's layer need not lie where it was made.
    return made.rename(made.with_name("kernels"))


def launches(folder: Path, architecture: str, *widths: str) -> tuple[int, int, str]:
    """Kernels that were found, those that were compiled, and Triton's library for the driver."""
    program = str(Path(__file__).parent / "bake_program.py")
    words = python(program, architecture, *widths, **kernel_caches.environment(folder)).split()
    return int(words[0]), int(words[1]), words[2]


def contents(folder: Path) -> dict[str, str]:
    """Every file with its digest and the time of its last change."""
    return {
        str(path.relative_to(folder)): f"{hashlib.sha256(path.read_bytes()).hexdigest()} "
        f"{path.stat().st_mtime_ns}"
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_an_engine_finds_every_baked_kernel_and_compiles_none(baked: Path, tmp_path: Path) -> None:
    folder = kernel_caches.open_for("slot", UID, tmp_path / "host/made-by", baked)
    found, compiled, helper = launches(folder, HOPPER, "1", "2", "4", "8")
    assert (found, compiled) == (json.loads((baked / "baked.json").read_text())["machine_codes"], 0)
    assert helper.startswith(str(folder))


def test_what_is_not_baked_is_compiled_once_beside_it_by_each_slot(
    baked: Path, tmp_path: Path
) -> None:
    before, root = contents(baked), tmp_path / "host/made-by"
    folder = kernel_caches.open_for("slot", UID, root, baked)
    found, compiled, _ = launches(folder, AMPERE, "2")
    assert not found
    assert compiled
    kernel_caches.close("slot", root)  # the engine has ended, and another one starts
    kernel_caches.prune(["slot"], root)
    again = kernel_caches.open_for("slot", UID + 1, root, baked)
    assert launches(again, AMPERE, "2")[:2] == (compiled, 0)
    other = kernel_caches.open_for("other", UID + 2, root, baked)
    assert launches(other, AMPERE, "2")[:2] == (0, compiled)
    assert contents(baked) == before


def test_the_image_holds_kernels_for_the_gpus_that_are_documented() -> None:
    page = (ROOT / "docs/engine-image.md").read_text()
    for architecture in ARCHITECTURES:
        assert f"| {architecture // 10}.{architecture % 10} |" in page


def test_a_base_without_triton_builds_and_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(engine_python()), "-S", "-m", "rose_engines.bake", str(tmp_path / "kernels")],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'engines'}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    assert "nothing is baked" in done.stderr
