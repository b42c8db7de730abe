"""The Dockerfile names every package of the distribution and every image the chart can use."""

import re
import tomllib
from pathlib import Path

from rose_dev.release import TARGETS
from rose_sandbox.runtimes.parts import GVISOR, PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
# Of Debian, for what a host of sandboxes runs; the rest comes with ``make sandbox``.
OF_THE_IMAGE = {
    "tar": "tar",
    "gzip": "gzip",
    "ip": "iproute2",
    "mount": "mount",
    "umount": "mount",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
OF_THE_NODE = {"runc", "criu", "runsc", "btrfs", "mkfs.btrfs"}
BUILDAH = {"from", "add", "commit", "bud", "push", "run"}
"""Its commands in Debian 12, with which the page was followed."""


def test_every_image_has_a_target() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", TEXT, re.MULTILINE))
    assert set(TARGETS) <= stages
    for copied in re.findall(r"--from=(\S+)", TEXT):
        assert copied in stages


def test_every_package_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    copied = set(re.findall(r"^COPY (\S+) /source/\S+$", TEXT, re.MULTILINE))
    assert {package.split("/")[0] for package in packages} <= copied
    for folder in copied:
        assert (ROOT / folder).is_dir()


def test_an_image_holds_nothing_of_development_and_runs_nothing_that_the_wheel_lacks() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert "COPY dev" not in TEXT
    run = set(re.findall(r"-m (rose_\w+)", TEXT))
    assert "rose_cli" in run
    assert run <= {package.rpartition("/")[2] for package in wheel}


def test_every_extra_that_an_image_installs_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    known = set(project["project"]["optional-dependencies"])
    for names in re.findall(r"/source\[([a-z,]+)\]", TEXT):
        assert set(names.split(",")) <= known


def test_what_needs_no_rights_is_not_root() -> None:
    for target in ("operator", "router"):
        stage = TEXT.split(f" AS {target}\n")[1].split("\nFROM ")[0]
        assert "USER 65532:65532" in stage


def test_the_sandbox_image_has_every_program_that_the_nodes_folder_does_not_bring() -> None:
    assert {*PROGRAMS, *GVISOR} == {*OF_THE_IMAGE, *OF_THE_NODE}
    stage = TEXT.split(" AS sandbox\n")[1].split("\nFROM ")[0]
    (packages,) = re.findall(r"apt-get install --no-install-recommends -y (.*) \\\n", stage)
    # runc and the inspector's library are linked with these.
    assert {*OF_THE_IMAGE.values(), "libseccomp2", "libelf1"} <= set(packages.split())


def test_the_page_builds_by_commands_that_buildah_has() -> None:
    page = (ROOT / "docs" / "images.md").read_text()
    assert set(re.findall(r"(?:\$ |\$\(|&& |^ +)buildah (\S+)", page, re.MULTILINE)) <= BUILDAH
    assert "buildah bud" in page
