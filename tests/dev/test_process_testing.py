"""A forked process of ROSE's is to a test what a started one is."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

import psutil
import pytest

from rose_dev.process_testing import CLI, spawn_process, start_process

PROGRAM = """
import atexit, os, sys, threading, time

def late():
    time.sleep(0.2)
    print("thread", flush=True)

if __name__ == "__main__":
    print(sys.argv[1:], os.environ["ROSE_WORD"], os.getcwd(), sys.path[0])
    print(os.getsid(0) == os.getpid())
    print(sorted(name for name in sys.modules if name.startswith("rose_") and "core" not in name))
    sys.stdout.flush()
    if "wait" in sys.argv:
        sys.stderr.write("waits\\n")
        time.sleep(600)
    threading.Thread(target=late).start()
    atexit.register(print, "exit")
    sys.exit("as told")
"""


@pytest.fixture(params=[True, False], ids=["forked", "started"])
def given(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """An environment in which processes are forked, and one for which they are started anew."""
    (tmp_path / "program.py").write_text(PROGRAM)
    own = {} if request.param else {"OTHERS": "word"}
    return os.environ | {"ROSE_WORD": "one"} | own


async def test_it_runs_as_the_interpreter_runs_a_module_and_ends_as_one(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    child = await spawn_process("program", "a", "b", env=given, stdout=PIPE, stderr=PIPE)
    out, errors = await child.communicate()
    assert out.decode().splitlines() == [
        f"['a', 'b'] one {tmp_path} {tmp_path}",
        "True",
        "[]",
        "thread",
        "exit",
    ]
    assert errors == b"as told\n"
    assert child.returncode == 1


async def test_what_it_says_is_read_while_it_runs_and_signals_end_it(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    child = await spawn_process("program", "wait", env=given, stdout=DEVNULL, stderr=PIPE)
    assert child.stderr is not None
    assert await child.stderr.readline() == b"waits\n"
    assert child.returncode is None
    child.terminate()
    waited = [asyncio.create_task(child.wait()) for _ in range(2)]
    assert [await one for one in waited] == [-signal.SIGTERM] * 2
    assert await child.wait() == -signal.SIGTERM
    assert await child.stderr.read() == b""
    with pytest.raises(ProcessLookupError):
        child.kill()


def test_without_a_loop_it_writes_into_files(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "out").open("wb") as out, (tmp_path / "errors").open("wb") as errors:
        child = start_process("program", env=given, output=out.fileno(), errors=errors.fileno())
        assert child.wait(60) == 1
    assert (tmp_path / "out").read_text().endswith("thread\nexit\n")
    assert (tmp_path / "errors").read_text() == "as told\n"


async def test_it_is_forked_where_only_roses_own_variables_differ() -> None:
    children = []
    for given in (os.environ | {"ROSE_WORD": "one"}, os.environ | {"OTHERS": "word"}):
        child = await spawn_process(CLI, "--help", env=given, stdout=DEVNULL)
        children.append("engine_template" in " ".join(psutil.Process(child.pid).cmdline()))
        await child.wait()
    assert children == [True, False]


async def test_outside_a_session_of_tests_a_process_starts_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A benchmark counts what a process takes, and much of a fork is its template's."""
    given = dict(os.environ)
    monkeypatch.delenv("PYTEST_VERSION")
    child = await spawn_process(CLI, "--help", env=given, stdout=DEVNULL)
    assert "engine_template" not in " ".join(psutil.Process(child.pid).cmdline())
    assert await child.wait() == 0
