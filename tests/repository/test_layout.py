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
BLOCK = re.compile(r"```.*?```", re.DOTALL)
ANCHOR = re.compile(r"\]\(([^)#\s]*)#([^)\s]+)\)")


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


def anchors(page: Path) -> set[str]:
    """What a link may name on a page: its headings, as the site spells them."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", one) for one in words}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_into_a_page_leads_to_a_heading(page: str) -> None:
    here = ROOT / page
    missing = [
        f"{target}#{anchor}"
        for target, anchor in ANCHOR.findall(BLOCK.sub("", here.read_text()))
        if "://" not in target and anchor not in anchors(here.parent / target if target else here)
    ]
    assert not missing, f"{page} links to {missing}"


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs/decisions"
    listed = (folder / "README.md").read_text()
    assert [one.name for one in folder.glob("0*.md") if f"({one.name})" not in listed] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_a_page_names_exists(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`make ([a-z][a-z-]*)", (ROOT / page).read_text()))
    missing = {target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)}
    assert not missing, f"{page} names {missing}"


def test_nothing_compiled_is_tracked() -> None:
    assert not [path for path in TRACKED if path.endswith((".pyc", ".so"))]


def test_python_files_stay_one_thing() -> None:
    # A long file about one thing reads better than four short ones; past this it is rarely one.
    long = {
        path: lines
        for path in TRACKED
        if path.endswith(".py")
        and (ROOT / path).exists()
        and (lines := len((ROOT / path).read_text().splitlines())) > 800
    }
    assert not long, f"is each of these one thing? {long}"
