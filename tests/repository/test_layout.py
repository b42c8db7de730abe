"""Promises of the repository itself: folders, links and the two commands."""

import ast
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePath

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
    "folder",
    [
        "operator",
        "agent",
        "engines",
        "weights",
        "router",
        "trainer",
        "batches",
        "rewards",
        "wire",
        "cli",
        "dev",
    ],
)
def test_folders_by_place_are_no_packages(folder: str) -> None:
    # A package `operator` on the path would hide the standard library's module of that name.
    assert not (ROOT / folder / "__init__.py").exists()


def test_every_relative_link_of_a_page_leads_somewhere() -> None:
    missing = [
        f"{page}: {target}"
        for page in PAGES
        for target in LINK.findall(CODE.sub("", (ROOT / page).read_text()))
        if "://" not in target and not ((ROOT / page).parent / target).exists()
    ]
    assert missing == []


def test_what_strangers_send_may_be_wrong_in_every_way() -> None:
    # msgspec's own errors are half of what it raises: rose_core.unreadable has all.
    half = re.compile(r"^\s*except .*msgspec\.(?:MsgspecError|DecodeError)", re.MULTILINE)
    code = [
        path for path in TRACKED if path.endswith(".py") and not path.startswith(("tests/", "dev/"))
    ]
    assert [path for path in code if half.search((ROOT / path).read_text())] == []


@cache
def anchors(page: Path) -> set[str]:
    """What a link may name on a page: its headings, as the site spells them."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", one) for one in words}


def test_every_link_into_a_page_leads_to_a_heading() -> None:
    missing = [
        f"{page}: {target}#{anchor}"
        for page in PAGES
        for target, anchor in ANCHOR.findall(BLOCK.sub("", (ROOT / page).read_text()))
        if "://" not in target
        and anchor not in anchors((ROOT / page).parent / target if target else ROOT / page)
    ]
    assert missing == []


def test_every_decision_is_listed_and_has_a_number_of_its_own() -> None:
    folder = ROOT / "docs/decisions"
    listed = (folder / "README.md").read_text()
    assert [one.name for one in folder.glob("0*.md") if f"({one.name})" not in listed] == []
    numbers = Counter(one.name.partition("-")[0] for one in folder.glob("0*.md"))
    assert [number for number, count in numbers.items() if count > 1] == []


def test_every_make_target_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = [
        f"{page}: {target}"
        for page in PAGES
        for target in re.findall(r"`make ([a-z][a-z0-9-]*)", (ROOT / page).read_text())
        if target not in targets
    ]
    assert missing == []


def resolves(name: str) -> bool:
    """Whether a dotted name or a path leads to a module, and to a word in it."""
    parts = re.split(r"[./]", name.removesuffix(".py"))
    for length in range(len(parts), 0, -1):
        within = "/".join(parts[:length])
        for place in (f"{within}.py", f"{within}/__init__.py"):
            for found in (path for path in TRACKED if path == place or path.endswith(f"/{place}")):
                text = (ROOT / found).read_text()
                return all(re.search(rf"\b{word}\b", text) for word in parts[length:])
    return False


NAMED = re.compile(r"`(rose_[a-z]+(?:[./][A-Za-z_]\w*)+)`")
SOURCES = [path for path in TRACKED if path.endswith(".py")]


def test_every_module_and_class_that_a_page_or_a_docstring_names_exists() -> None:
    present = [path for path in (*PAGES, *SOURCES) if path != "CHANGELOG.md"]
    texts = {
        path: (ROOT / path).read_text()
        for path in present
        if "docs/decisions/" not in path and (ROOT / path).exists()
    }
    missing = {
        f"{path}: {name}"
        for path, text in texts.items()
        for name in NAMED.findall(text)
        if not name.endswith((".yaml", ".json", ".md"))
        and f'getLogger("{name}")' not in text  # a logger's name looks like a module's
        and not resolves(name)
    }
    assert not missing


RETIRED = frozenset(
    {
        "WaitingRoom",
        "Door",
        "Doors",
        "Answering",
        "Pulse",
        "Body",
        "Twins",
        "Courtesy",
        "Teller",
        "Renewing",
        "Surroundings",
        "Toggles",
        "Loads",
        "Kept",
        "Listings",
        "Tidying",
        "Following",
        "Ears",
        "Manners",
        "Sight",
        "Around",
        "Tank",
        "World",
        "Verdict",
        "Found",
        "Outcome",
        "Place",
        "Held",
        "Rest",
        "Shares",
        "Scene",
        "Wish",
        "Ways",
    }
)


def test_the_glossarys_words_have_not_gone_back_to_a_dialect() -> None:
    # One word, one thing: each of these named two to seven classes, or nothing that is known.
    # bench/gpu has verdicts and outcomes of its own.
    named = re.compile(r"^class (\w+)", re.MULTILINE)
    found = {
        f"{path}: {name}"
        for path in SOURCES
        if not path.startswith(("tests/", "bench/gpu/")) and (ROOT / path).exists()
        for name in named.findall((ROOT / path).read_text())
        if name in RETIRED
    }
    assert not found
    rows = (ROOT / "docs/concepts.md").read_text().split("## Glossary")[1].split("\n## ")[0]
    assert len([row for row in rows.splitlines() if row.startswith("| ")]) > 40


ROOM = re.compile(r"^\| module of `([\w.]+)` \|.*\n\|[-| ]+\n((?:\|.*\n)+)", re.MULTILINE)


def test_the_tables_of_what_is_where_name_modules_that_exist() -> None:
    tables = [
        (page, package, rows)
        for page in PAGES
        for package, rows in ROOM.findall((ROOT / page).read_text())
    ]
    assert len(tables) >= 2
    named = [
        (page, f"{package}.{name.replace('/', '.')}")
        for page, package, rows in tables
        for row in rows.splitlines()
        for name in re.findall(r"`([\w/]+)`", row.split("|")[1])
    ]
    assert [one for one in named if not resolves(one[1])] == []


FILE = re.compile(r"`([\w*./-]+\.py)`")


def files_named(line: str) -> list[str]:
    """Files that a line of a page names, as patterns; after a path, a bare name is its sibling."""
    found: list[str] = []
    for name in FILE.findall(line):
        sibling = "/" not in name and found and "/" in found[-1]
        found.append(f"{found[-1].rpartition('/')[0]}/{name}" if sibling else name)
    return found


def called(name: str) -> list[str]:
    """Sources with this file name, or all of them for a pattern."""
    return [path for path in SOURCES if "*" in name or path.endswith(name)]


def test_every_file_of_python_that_a_page_names_is_in_the_folder_it_says() -> None:
    history = [page for page in PAGES if page.startswith(("CHANGELOG.md", "docs/decisions/"))]
    missing = [
        f"{page}: {one}"
        for page in PAGES
        if page not in history
        for one in {o for line in (ROOT / page).read_text().splitlines() for o in files_named(line)}
        if not any(PurePath("/", path).match(f"**/{one}") for path in called(PurePath(one).name))
    ]
    assert missing == []


def test_the_map_of_the_rooms_names_folders_and_modules_that_exist() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    rows = page.split("| room |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    named = [
        (room, inner)
        for row in rows
        for room in re.findall(r"`(\w+/rose_\w+)`", row.split("|")[1])[:1]
        for inner in re.findall(r"`([a-z_]+)`", row.split("|")[2])
    ]
    assert len(named) > 20
    missing = [
        f"{room}/{inner}"
        for room, inner in named
        if not any((ROOT / room / place).exists() for place in (inner, f"{inner}.py"))
    ]
    assert not missing


CHANGED = {
    "a new reason for a closed gate": "class GateReason",
    "a new OpenAI field": "_SAMPLING: ",
    "another weight codec": "class Codec",
    "a column in `kubectl get rlease`": "Column(",
    "a new trainer adapter": "class Workflow",
    "how long a permit lasts": "permit_ns",
}
"""What stands in the file that CONTRIBUTING names: whoever opens it is at the right place."""


def test_a_newcomer_finds_the_files_that_contributing_names() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert "CONTRIBUTING.md#where-do-i-change" in (ROOT / "README.md").read_text()
    section = page.split("## Where do I change", 1)[1].split("\n## ", 1)[0]
    named = re.findall(r"`([\w./-]+/[\w./-]+)`", section)
    assert [path for path in named if not (ROOT / path).exists()] == []
    rows = dict(re.findall(r"^\| ([^|]+) \| `([^`]+)`", section, re.MULTILINE))
    for wanted, word in CHANGED.items():
        assert word in (ROOT / rows[wanted]).read_text(), wanted


INTERVAL = re.compile(r"\d[\d.]* \[[\d.]+, [\d.]+\]")


def test_each_interval_of_the_claims_stands_on_a_page_that_its_row_names() -> None:
    docs = ROOT / "docs"
    rows = [row for row in (docs / "claims.md").read_text().splitlines() if row.startswith("|")]
    claimed = [(row, one) for row in rows for one in INTERVAL.findall(row)]
    assert len(claimed) > 10
    for row, interval in claimed:
        pages = [docs / link for link in re.findall(r"\]\(([^)#]+)", row)]
        assert any(interval in page.read_text() for page in pages), f"{interval} of: {row}"


PROOF = re.compile(r"`(tests/[\w/]+(?:\.py)?)(?:::(\w+))?`")


def test_every_attempt_of_the_threat_model_names_a_test_that_exists() -> None:
    page = (ROOT / "docs/threat-model.md").read_text()
    tables = re.findall(
        r"^\|.*\| (?:proof|shown by) \|\n\|[-| ]+\|\n((?:\|.*\n)+)", page, re.MULTILINE
    )
    rows = [row for table in tables for row in table.splitlines()]
    assert len(tables) == 3
    assert [row for row in rows if not PROOF.search(row.rsplit(" | ", 1)[1])] == []
    named = PROOF.findall(page)
    assert [file for file, _ in named if not (ROOT / file).exists()] == []
    assert [
        f"{file}::{name}"
        for file, name in named
        if name
        and not re.search(rf"^(?:async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
    ] == []


def test_the_suite_of_attacks_runs_what_the_threat_model_names_for_it() -> None:
    page = (ROOT / "docs/threat-model.md").read_text()
    section = page.split("## The suite of attacks", 1)[1].split("\n## ", 1)[0]
    makefile = (ROOT / "Makefile").read_text()
    suite = makefile.split("ATTACKS := ", 1)[1].split("\n\n", 1)[0].replace("\\\n", " ").split()
    assert [name for name in suite if not (ROOT / name).exists()] == []
    named = {file for file, _ in PROOF.findall(section)}
    assert {file for file in named if not file.startswith(tuple(suite))} == set()


def test_processes_of_a_lane_keep_what_they_compile() -> None:
    rule = "shown: ; @printenv PYTHONDONTWRITEBYTECODE || true"
    words = ["make", "-s", "-C", str(ROOT), "--eval", rule, "shown"]
    variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    assert subprocess.check_output(words, env=variables, text=True).strip() == ""


def test_nothing_compiled_is_tracked() -> None:
    assert not [path for path in TRACKED if path.endswith((".pyc", ".so"))]


FRAGMENT = re.compile(r"(?:Of|Its|Whose|As|Those)\b")
# What is parsed: a thousand files would be parsed for the few that could have a fragment.
SUSPECT = re.compile(
    rf"\"\"\"\s*(?={FRAGMENT.pattern}|.*'s\.)\S+(?: \S+){{0,3}} *(?:\"\"\"|$)", re.MULTILINE
)


def docstrings(path: str) -> Iterator[tuple[str, str]]:
    """Where a docstring stands, and its first line."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield f"{path}:{node.body[0].lineno}", text.splitlines()[0]


def test_the_first_line_of_a_docstring_says_something_by_itself() -> None:
    # "Of one slot.", "One slot's.": only who has read what stands around it knows what that is.
    fragments = [
        f"{place} {first}"
        for path in SOURCES
        if (ROOT / path).exists()
        if SUSPECT.search((ROOT / path).read_text())
        for place, first in docstrings(path)
        if len(first.split()) < 5 and (FRAGMENT.match(first) or first.endswith("'s."))
    ]
    assert fragments == []


def test_a_module_is_one_thing_and_not_several_under_banners() -> None:
    # Tests have banners: a file of theirs is a list.
    banners = [
        path
        for path in SOURCES
        if not path.startswith("tests/") and (ROOT / path).exists()
        if re.search(r"^# -{2,}", (ROOT / path).read_text(), re.MULTILINE)
    ]
    assert banners == []


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


def test_a_module_runs_after_all_of_it_is_defined() -> None:
    early = []
    for path in TRACKED:
        if path.endswith(".py") and (ROOT / path).exists():
            text = (ROOT / path).read_text()
            above = ast.parse(text).body[:-1] if "__main__" in text else []
            calls = (ast.unparse(one.test) for one in above if isinstance(one, ast.If))
            early += [path for test in calls if test == "__name__ == '__main__'"]
    assert not early, "what stands below is not there yet when main runs"
