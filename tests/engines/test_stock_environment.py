"""ROSE joins the engine's Python and leaves every distribution of it as SGLang pins it.

The folder that the image puts on the engine's path is made here from the checkout, and the real
engine environment is asked, distribution by distribution, with it and without it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import rose_engines
from rose_dev.engine_environment import engine_python, is_ready
from rose_dev.image import checkout, code_files
from rose_engines.process import launch
from rose_engines.sglang import arguments
from rose_engines.sglang.arguments import python_path

ROOT = Path(__file__).resolve().parents[2]
_ASK = """
import importlib.metadata, importlib.util, json, sys
found = {}
for one in importlib.metadata.distributions():
    name = one.metadata["Name"].lower().replace("_", "-")
    found.setdefault(name, [one.version, str(one.locate_file(""))])
modules = {}
for name in sys.argv[1:]:
    spec = importlib.util.find_spec(name)
    modules[name] = None if spec is None else spec.origin
json.dump([found, modules], sys.stdout)
"""
# What ROSE's environments bring along too, and the engine must get from SGLang's side.
SHARED = ("numpy", "numba", "llvmlite", "msgspec", "zstandard", "aiohttp", "pydantic", "xxhash")


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """As ``/opt/rose/packages`` of the image."""
    folder = tmp_path / "packages"
    for source, name in code_files(checkout()):
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, place)
    return folder


def test_the_engines_path_holds_rose_and_nothing_that_it_needs(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "OWN_PACKAGES", packages)
    installed = packages / "site-packages/rose_engines/__init__.py"
    monkeypatch.setattr(rose_engines, "__file__", str(installed))
    asked = launch.Launch(Path("python3"), Path("model"), 1, permit=Path("permit"), device="cuda")
    path = python_path(asked)
    assert path[-1] == packages
    entries = {entry.name for folder in path for entry in folder.iterdir()}
    strangers = {name for name in entries if not name.startswith(("rose_", "rose-"))}
    assert not strangers


def test_the_image_gives_the_host_an_environment_of_its_own() -> None:
    """With the base's packages in sight, ROSE's numpy and numba replaced those that SGLang pins."""
    stage = (ROOT / "Dockerfile").read_text().split("FROM ${ENGINE_BASE} AS engine\n")[1]
    assert "--system-site-packages" not in stage
    assert "--no-deps --target /opt/rose/packages /source" in stage
    assert re.search(r"^ENV PATH=/opt/rose/bin:\$\{PATH\}", stage, re.MULTILINE)
    assert "/opt/rose/engine-python" in stage


@pytest.mark.engine
def test_every_distribution_of_the_real_engine_stays_as_it_is(packages: Path) -> None:
    if not is_ready():
        pytest.fail("no engine environment; run `make engine`")
    plugin = Path(arguments.__file__).with_name("paths") / "plugin"
    alone, alone_modules = asked("")
    joined, joined_modules = asked(f"{plugin}:{packages}")
    assert {name: joined.get(name) for name in alone} == alone
    assert {name for name in joined if name not in alone} <= {"rose-gpu", "rose-engine-plugin"}
    assert joined_modules == alone_modules
    assert all(alone_modules[name] for name in ("numpy", "numba", "msgspec", "zstandard"))


def asked(path: str) -> tuple[dict[str, list[str]], dict[str, str | None]]:
    """Every distribution with version and place, and where modules come from."""
    environment = {"PATH": "/usr/bin:/bin"} | ({"PYTHONPATH": path} if path else {})
    done = subprocess.run(
        [engine_python(), "-c", _ASK, *SHARED],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found, modules = json.loads(done.stdout)
    return found, modules
