"""The Dockerfile names every package of the distribution and every image the chart can use."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()


def test_every_image_has_a_target() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", TEXT, re.MULTILINE))
    assert {"operator", "router", "agent", "weights", "rewards", "engine"} <= stages
    for copied in re.findall(r"--from=(\S+)", TEXT):
        assert copied in stages


def test_every_package_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    copied = set(re.findall(r"^COPY (\S+) /source/\S+$", TEXT, re.MULTILINE))
    assert {package.split("/")[0] for package in packages} <= copied
    for folder in copied:
        assert (ROOT / folder).is_dir()


def test_every_extra_that_an_image_installs_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    known = set(project["project"]["optional-dependencies"])
    for names in re.findall(r"/source\[([a-z,]+)\]", TEXT):
        assert set(names.split(",")) <= known


def test_what_needs_no_rights_is_not_root() -> None:
    for target in ("operator", "router"):
        stage = TEXT.split(f" AS {target}\n")[1].split("\nFROM ")[0]
        assert "USER 65532:65532" in stage
