"""Promises of the repository itself: folders, links and the two commands."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
).stdout.splitlines()
PAGES = [path for path in TRACKED if path.endswith(".md")]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


@pytest.mark.parametrize(
    "folder", ["operator", "agent", "engines", "weights", "router", "trainer", "wire", "cli", "dev"]
)
def test_folders_by_place_are_no_packages(folder: str) -> None:
    # A package `operator` on the path would hide the standard library's module of that name.
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_of_a_page_leads_somewhere(page: str) -> None:
    text = CODE.sub("", (ROOT / page).read_text())
    missing = [
        target
        for target in LINK.findall(text)
        if "://" not in target and not ((ROOT / page).parent / target).exists()
    ]
    assert not missing, f"{page} links to {missing}"


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_a_page_names_exists(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`make ([a-z][a-z-]*)", (ROOT / page).read_text()))
    missing = {target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)}
    assert not missing, f"{page} names {missing}"


def test_nothing_compiled_is_tracked() -> None:
    assert not [path for path in TRACKED if path.endswith((".pyc", ".so"))]


def test_python_files_stay_readable() -> None:
    long = {
        path: lines
        for path in TRACKED
        if path.endswith(".py")
        and (ROOT / path).exists()
        and (lines := len((ROOT / path).read_text().splitlines())) > 400
    }
    assert not long, f"split these: {long}"
