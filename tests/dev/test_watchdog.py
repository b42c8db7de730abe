"""A test that hangs where no timeout reaches it ends red, named, with its stack; others run on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

_HANGS = """
import threading
import pytest


def wait_for_ever():
    threading.Event().wait()


def test_before():
    pass


def test_hangs_in_its_finally():
    try:
        threading.Event().wait()
    finally:
        wait_for_ever()


def test_after():
    pass
"""
_SETTINGS = """
[pytest]
addopts = -p rose_dev.watchdog
timeout = 1
watchdog_grace = 1
"""
# Far more than it takes; a run that hangs must fail here and not at the limit of this test.
_ENDS_SECONDS = 120


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text(_SETTINGS)
    (tmp_path / "test_it.py").write_text(_HANGS)
    return tmp_path


def pytest_in(
    project: Path, *arguments: str, limit: float = 0.0
) -> subprocess.CompletedProcess[str]:
    contained = [sys.executable, "-m", "rose_dev.contained", f"--limit={limit}"]
    return subprocess.run(
        [*contained, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=_ENDS_SECONDS,
        check=False,
    )


def test_a_hang_costs_one_test_and_says_where(project: Path) -> None:
    again = ("--reruns", "1", "--only-rerun", ".*")
    ended = pytest_in(project, "-n", "1", "--dist", "loadfile", *again)
    assert ended.returncode == 1, ended.stderr
    assert "crashed while running 'test_it.py::test_hangs_in_its_finally'" in ended.stdout
    assert "in wait_for_ever" in ended.stderr
    assert "1 failed, 2 passed" in ended.stdout


def test_a_hang_ends_a_run_without_workers_too(project: Path) -> None:
    ended = pytest_in(project)
    assert ended.returncode == 1
    assert "in test_hangs_in_its_finally" in ended.stderr


def test_a_thread_that_outlives_the_tests_does_not_keep_the_run(project: Path) -> None:
    (project / "pytest.ini").write_text(f"{_SETTINGS}watchdog_end = 15\n")
    text = "import threading\ndef test_it():\n    threading.Thread(target=wait_for_ever).start()\n"
    (project / "test_it.py").write_text(
        f"{text}\ndef wait_for_ever():\n    threading.Event().wait()\n"
    )
    ended = pytest_in(project)
    assert ended.returncode == 1
    assert "1 passed" in ended.stdout
    assert "in wait_for_ever" in ended.stderr


def test_the_limit_of_a_run_says_what_ran_last(project: Path) -> None:
    (project / "pytest.ini").write_text(_SETTINGS.replace("= 1", "= 1000"))
    ended = pytest_in(project, limit=10.0)
    assert ended.returncode == 124
    assert "not over after 10 s, ended: " in ended.stderr
    assert "began last: test_it.py::test_hangs_in_its_finally" in ended.stderr
    assert "in test_hangs_in_its_finally" in ended.stderr


def test_files_that_belong_together_have_one_worker(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(f"{_SETTINGS}together = a/ c/\n")
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"test_{folder}.py").write_text("def test_it(): pass\n" * 4)
    output = pytest_in(tmp_path, "-v", "-n", "2", "--dist", "loadfile").stdout
    workers = re.findall(r"\[(gw\d)\].*PASSED (\w)/test", output)
    ran = {folder: worker for worker, folder in workers}
    assert ran["a"] == ran["c"] != ran["b"]
