"""What the pages on GPUs say, tests produce: conditions, states, ways in, failures to play."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

from rose_agent.devices.access import Missing
from rose_core.api.reasons import ConditionType, Reason
from rose_core.devices.health import DeviceRefusal
from rose_core.host_reasons import HostReason
from rose_dev.cluster.gpu_node.failures import ACTIONS
from tests.gpu_node.test_modes import MODES

ROOT = Path(__file__).parents[2]
PAGES = ("devices", "install", "development-cluster")
STATES = {"Found", *(one.value for one in Missing)}
WORDS = (
    {one.value for kind in (Reason, HostReason, DeviceRefusal) for one in kind}
    | STATES
    | {"AccessLost"}
)
BACKED = re.compile(r"`([A-Z][A-Za-z]+)`")
PRODUCED = dict(
    re.findall(
        r"^\| `([A-Z]\w+)` \| `([\w/]+\.py::\w+)` \|$",
        (ROOT / "tests" / "gpu_node" / "README.md").read_text(),
        re.MULTILINE,
    )
)


@cache
def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def first_cells(text: str, head: str) -> set[str]:
    """The first column of the table that begins with this line."""
    _, _, below = text.partition(f"{head}\n")
    assert below, head
    rows = below.partition("\n\n")[0].splitlines()
    return {found[1] for row in rows if (found := re.match(r"\| `([^`]+)` \|", row))}


def test_every_word_of_the_pages_is_produced_by_a_test() -> None:
    named = {word for name in PAGES for word in BACKED.findall(page(name)) if word in WORDS}
    assert {"NotVacated", "DriverTooOld", "AccessLost"} <= named
    assert sorted((named | STATES) - PRODUCED.keys()) == []


@pytest.mark.parametrize("word", sorted(PRODUCED))
def test_the_named_test_asks_for_the_word(word: str) -> None:
    """In itself, its parameters or its file's constants, by name or as member of a closed list."""
    file, _, name = PRODUCED[word].partition("::")
    text = (ROOT / file).read_text()
    tree = ast.parse(text)
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    (test,) = (one for one in tree.body if isinstance(one, functions) and one.name == name)
    constants = (one for one in tree.body if isinstance(one, ast.Assign))
    wanted = [
        ast.get_source_segment(text, node) or ""
        for node in (test, *test.decorator_list, *constants)
    ]
    member = re.sub(r"(?<!^)(?=[A-Z])", "_", word).upper()
    assert re.search(rf"\b{word}\b|\.{member}\b", "\n".join(wanted)), PRODUCED[word]


def test_the_table_of_what_makes_a_gpu_unfit_has_every_word() -> None:
    rows = first_cells(page("devices"), "| word | when | ends |")
    assert rows == {one.value for one in DeviceRefusal if one}


def test_the_states_that_a_guard_can_find_are_those_of_the_table() -> None:
    assert first_cells(page("ecosystem"), "| state | means |") == STATES


def test_the_ways_in_are_those_of_the_chart_and_each_is_installed_by_a_test() -> None:
    schema = json.loads((ROOT / "helm/rose/values.schema.json").read_text())
    offered = set(schema["properties"]["gpus"]["properties"]["access"]["enum"])
    head = page("ecosystem").index("| `gpus.access` | for clusters with |")
    line = page("ecosystem")[head:].partition("\n")[0]
    assert first_cells(page("ecosystem"), line) == offered
    assert {mode.access for mode in MODES} == offered


def test_every_failure_that_can_be_played_is_on_the_page() -> None:
    (line,) = re.findall(r"let one of them fail: ([\w, ]+);", page("development-cluster"))
    drawn = {"hold", "drop"}  # of processes, which are no failures
    assert set(line.split(", ")) == ACTIONS.keys() - drawn


def test_every_condition_that_the_pages_name_is_one_of_the_closed_list() -> None:
    reported = re.findall(
        r"`(\w+)` of (?:a ServingPool|the pools|the pool)", "".join(map(page, PAGES))
    )
    assert reported
    assert set(reported) <= {one.value for one in ConditionType}


FINDINGS = {f"D{number}" for number in range(1, 10)} | {f"W{number}" for number in range(1, 12)}
UNTESTED = {"W9", "W10"}
"""Takes a GPU: the row says what for."""


def findings() -> list[tuple[str, str]]:
    """Each row of the first day's table: its finding, and what stands as its test."""
    text = (ROOT / "tests" / "gpu_node" / "README.md").read_text()
    return re.findall(r"^\| ([DW]\d+) \| [^|]+ \| (.+) \|$", text, re.MULTILINE)


def test_every_finding_of_the_first_day_has_a_test_or_says_what_it_takes() -> None:
    rows = findings()
    assert {finding for finding, _ in rows} == FINDINGS
    named = {finding for finding, proof in rows if "::" in proof}
    assert named == FINDINGS - UNTESTED
    assert all("takes a GPU" in proof for finding, proof in rows if finding in UNTESTED)


def test_the_tests_of_the_first_day_exist() -> None:
    proofs = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", "\n".join(proof for _, proof in findings()))
    assert len(proofs) >= len(FINDINGS - UNTESTED)
    missing = [
        f"{file}::{name}"
        for file, name in proofs
        if not (ROOT / file).exists()
        or not re.search(rf"^(?:async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
    ]
    assert missing == []
