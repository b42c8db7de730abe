"""The images stay small: what they need is weighed as it is installed here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rose_dev import sizes

TEXT = (Path(__file__).resolve().parents[2] / "Dockerfile").read_text()
LIMIT = 200 * sizes.MEGABYTE


@pytest.mark.parametrize("image", ["operator", "agent"])
def test_operator_and_agent_stay_below_200_megabytes(image: str) -> None:
    found = sizes.packages(image)
    assert {"rose-gpu", "grpcio", "aiohttp"} <= set(found)
    assert sum(found.values()) < LIMIT, sorted(found.items(), key=lambda item: -item[1])[:10]


def test_no_image_but_the_engines_holds_torch() -> None:
    assert not [image for image in sizes.IMAGES if "torch" in sizes.packages(image)]


def test_the_extras_are_those_of_the_dockerfile() -> None:
    stages = re.findall(r"AS (\w+)-environment.*?/source\[([a-z,]+)\]", TEXT, re.DOTALL)
    assert {name: tuple(extras.split(",")) for name, extras in stages} == sizes.IMAGES
