"""The images stay small: what they need is weighed as it is installed here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rose_dev import image_sizes

TEXT = (Path(__file__).resolve().parents[2] / "Dockerfile").read_text()
LIMIT = 200 * image_sizes.MEGABYTE


@pytest.mark.parametrize("image", ["operator", "agent"])
def test_operator_and_agent_stay_below_200_megabytes(image: str) -> None:
    found = image_sizes.packages(image)
    assert {"rose-gpu", "grpcio", "aiohttp"} <= set(found)
    assert sum(found.values()) < LIMIT, sorted(found.items(), key=lambda item: -item[1])[:10]


# Imports every module of the packages named, where numpy and zstandard are not installed.
WITHOUT = """
import importlib, importlib.abc, pkgutil, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "zstandard"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
for package in map(importlib.import_module, sys.argv[1:]):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(found.name)
"""


def test_what_reads_no_weights_does_without_numpy_and_zstandard() -> None:
    for image in ("operator", "router", "rewards"):
        assert not {"numpy", "zstandard"} & set(image_sizes.packages(image)), image
    rooms = ("rose_cli", "rose_operator", "rose_router", "rose_rewards", "rose_batches")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *rooms], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_image_but_the_engines_holds_torch() -> None:
    assert not [image for image in image_sizes.IMAGES if "torch" in image_sizes.packages(image)]


def test_the_extras_are_those_of_the_dockerfile() -> None:
    stages = re.findall(r"AS (\w+)-environment.*?/source\[([a-z,]+)\]", TEXT, re.DOTALL)
    assert {name: tuple(extras.split(",")) for name, extras in stages} == image_sizes.IMAGES
