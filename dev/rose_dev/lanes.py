"""Which files a lane of ``make test`` imports, and in which order it runs them; a pytest plugin.

Each lane is a run of pytest that asks for a marker which few files have. To import all files only
to deselect what is in them costs a minute of CPU time, so a file that does not name the marker is
left out, and so is one of which every test has a marker (``pytestmark``) that the lane refuses. A
file that had the marker without naming it would be lost that way; a run that imports it says so,
and ``make unit`` imports every file that gives none to all of its tests.

What needs a node is marked ``node`` here, by its fixture: it is a lane of its own. A start of the
node takes half a minute and it is replaced by the other kind whenever a test wants it, so first
come the tests that need GPUs, which one worker runs while the other begins with those that end the
node; then the rest, and last those with a second node beside it. Next step: ``testing`` has all of
these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

MARKERS = ("engine", "cluster", "sandbox", "vllm", "long")
NODE = "node_session"
"""The fixture behind everything that needs the machine's node."""
ENDING = "ending_session"
"""The fixture behind everything that ends the node."""
SECOND = "second_session"
"""The fixture behind everything that needs a second node."""
GPUS = "gpu_session"
"""The fixture behind everything that needs the node with GPUs."""
AGAIN = "--write-reruns"
_ALL = re.compile(r"^pytestmark = (\[.*?\]|.*?$)", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"\bpytest\.mark\.(\w+)")
_PLAIN = re.compile(r"(not )?\w+( and (not )?\w+)*")


def wanted(expression: str) -> tuple[str, ...]:
    """Markers of a lane that every test of a run must have, by its ``-m``."""
    if not _PLAIN.fullmatch(expression):
        return ()
    return tuple(name for name in MARKERS if name in expression.split(" and "))


def refused(expression: str) -> tuple[str, ...]:
    """Markers of which no test of a run may have one, by its ``-m``."""
    if not _PLAIN.fullmatch(expression):
        return ()
    return tuple(name for name in MARKERS if f"not {name}" in expression.split(" and "))


@cache
def given(path: Path) -> frozenset[str]:
    """Markers that a file gives to all of its tests, as far as its text says so."""
    found = _ALL.search(path.read_text())
    return frozenset(_MARK.findall(found[0]) if found else ())


@cache
def names(path: Path, marker: str) -> bool:
    """Whether a file names a marker, itself or by a list ``MARKS`` that it imports."""
    return re.search(rf"\bmark\.{marker}\b|\bMARKS\b", path.read_text()) is not None


def by_node(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The same tests; what needs the node is marked and in the order that the module says."""
    listed = list(items)
    second, gpus, ending = (_files_with(of, listed) for of in (SECOND, GPUS, ENDING))
    for item in listed:
        if NODE in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.node)

    def turn(item: pytest.Item) -> tuple[bool, ...]:
        return item.path not in gpus, item.path not in ending, item.path in second

    return sorted(listed, key=turn)


def _files_with(fixture: str, items: Iterable[pytest.Item]) -> set[Path]:
    """Files of which a test needs a fixture."""
    return {item.path for item in items if fixture in getattr(item, "fixturenames", ())}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare where to write what was tried again."""
    parser.addoption(AGAIN, metavar="FILE", help="write the names of tests that were tried again")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """``make test`` has more lanes than one reads, so it says at its end what was tried again."""
    config = terminalreporter.config
    if hasattr(config, "workerinput"):  # what a worker tried again, its controller hears
        return
    if (file := config.getoption(AGAIN)) is not None:
        tried = {report.nodeid for report in terminalreporter.stats.get("rerun", ())}
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        with Path(file).open("a") as names:  # other lanes write into it too
            names.writelines(f"{name}\n" for name in sorted(tried))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what the run would import in vain."""
    if not re.fullmatch(r"test_.*\.py", collection_path.name):
        return None
    expression = config.getoption("markexpr") or ""
    if not all(names(collection_path, marker) for marker in wanted(expression)):
        return True
    return True if given(collection_path).intersection(refused(expression)) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before anything is deselected.

    Raises:
        UsageError: a file has a marker that it does not name.
    """
    for item in items:
        for marker in MARKERS:
            if item.get_closest_marker(marker) and not names(item.path, marker):
                message = f"{item.path}: name the marker {marker} of its tests in this file"
                raise pytest.UsageError(message)
    items[:] = by_node(items)
