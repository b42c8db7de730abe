"""Engines of tests are forked from one process: how a fork ends, and what ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rose_dev import engine_template
from rose_dev.engine_template import SGLANG, VLLM, Channel, Stock, Template, join
from rose_dev.waiting import wait_until

BARE = Path(sys.executable).resolve()
"""Without this environment's packages, which have a launcher of that name."""
LAUNCHER = """
import os, sys, time
print(os.environ["ROSE_NAME"], sys.argv[1:], os.getsid(0) == os.getpid(), flush=True)
if "--stay" in sys.argv:
    time.sleep(60)
if "--fail" in sys.argv:
    raise RuntimeError("as told")
sys.exit(int(sys.argv[-1]))
"""
MARK = "import os, pathlib; pathlib.Path(os.environ['IMPORTS']).open('a').write('once ')\n"


@pytest.fixture(params=[SGLANG, VLLM], ids=lambda stock: stock.title)
def stock(request: pytest.FixtureRequest) -> Stock:
    asked: Stock = request.param
    return asked


@pytest.fixture
def first(tmp_path: Path, stock: Stock) -> Path:
    """What the template imports before all else."""
    return tmp_path.joinpath(*stock.imports[0].split(".")).with_suffix(".py")


@pytest.fixture
def environment(tmp_path: Path, stock: Stock, first: Path) -> dict[str, str]:
    """A stand-in for the engine that counts its imports, and for ROSE's launcher."""
    for name in stock.imports:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    first.write_text(MARK)
    launcher = tmp_path.joinpath(*stock.launcher.split(".")).with_suffix(".py")
    launcher.parent.mkdir(parents=True)
    launcher.write_text(LAUNCHER)
    return {"PYTHONPATH": str(tmp_path), "IMPORTS": str(tmp_path / "imports"), "ROSE_NAME": "one"}


@pytest.fixture
def template(stock: Stock, environment: dict[str, str]) -> Iterator[Template]:
    made = Template(BARE, environment, stock)
    yield made
    made.close()


def start(
    template: Channel, environment: dict[str, str], log: Path, *argv: str
) -> engine_template.ForkedEngine:
    with log.open("wb") as file:
        return template.start(argv, environment, file.fileno())


def runs(pid: int) -> bool:
    """Whether it computes; whoever adopts it may reap it much later."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_engines_have_their_own_environment_output_and_session(
    template: Template, environment: dict[str, str], tmp_path: Path
) -> None:
    one = start(template, environment, tmp_path / "1", "--port", "0")
    second = start(template, environment | {"ROSE_NAME": "two"}, tmp_path / "2", "7")

    assert (one.wait(120), second.wait(120)) == (0, 7)

    assert (tmp_path / "1").read_text() == "one ['--port', '0'] True\n"
    assert (tmp_path / "2").read_text() == "two ['7'] True\n"
    assert (tmp_path / "imports").read_text() == "once "


def test_an_error_is_told_as_an_interpreter_does(
    template: Template, environment: dict[str, str], tmp_path: Path
) -> None:
    assert start(template, environment, tmp_path / "log", "--fail").wait(120) == 1

    assert "RuntimeError: as told" in (tmp_path / "log").read_text()


def test_a_killed_engine_tells_the_signal_and_others_go_on(
    template: Template, environment: dict[str, str], tmp_path: Path
) -> None:
    one, other = (start(template, environment, tmp_path / name, "--stay") for name in "ab")
    assert one.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.01)
    both = (one, other)
    wait_until(lambda: all(os.getpgid(e.pid) == e.pid for e in both), "groups", seconds=60)

    os.killpg(one.pid, signal.SIGKILL)

    assert one.wait(120) == one.poll() == -signal.SIGKILL
    assert other.poll() is None
    os.killpg(other.pid, signal.SIGTERM)
    assert other.wait(120) == -signal.SIGTERM


def test_engines_end_with_their_template(
    template: Template, environment: dict[str, str], tmp_path: Path
) -> None:
    engine = start(template, environment, tmp_path / "log", "--stay")

    template.close()

    assert engine.wait(120) == -signal.SIGKILL
    wait_until(lambda: not runs(engine.pid), "the engine is gone", seconds=120)
    with pytest.raises(ConnectionError, match="has ended"):
        start(template, environment, tmp_path / "log", "0")


def test_a_program_runs_in_the_launchers_place_without_importing_again(
    template: Template, stock: Stock, environment: dict[str, str], tmp_path: Path
) -> None:
    name = stock.imports[0]
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint(__name__, sys.argv[1:], sys.argv[-1] in sys.modules)")
    with (tmp_path / "log").open("wb") as log:
        assert template.start([name], environment, log.fileno(), program).wait(120) == 0

    assert (tmp_path / "log").read_text() == f"__main__ ['{name}'] True\n"
    assert (tmp_path / "imports").read_text() == "once "


def test_only_variables_that_no_import_reads_may_differ(
    template: Template, stock: Stock, environment: dict[str, str]
) -> None:
    assert template.fits(environment | {"ROSE_PERMIT": "/elsewhere"})
    assert template.fits(environment | dict.fromkeys(stock.late, "another"))
    assert not template.fits(environment | {"OMP_NUM_THREADS": "2"})


def test_imports_that_start_a_thread_are_refused(
    stock: Stock, first: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    wait = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    first.write_text(wait)
    made = Template(BARE, environment, stock)
    try:
        with pytest.raises(ConnectionError, match="has ended"):
            start(made, environment, tmp_path / "log", "0")
    finally:
        made.close()


def test_a_template_that_answers_late_is_ended(
    stock: Stock, first: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """Its answer would be taken for the next engine's process."""
    first.write_text("import time; time.sleep(60)")
    made = Template(BARE, environment, stock, seconds=0.1)

    with pytest.raises(ConnectionError, match="has ended"):
        start(made, environment, tmp_path / "late", "0")

    assert not made.alive()


def test_no_engine_searches_what_was_imported_for_garbage(
    template: Template, stock: Stock, environment: dict[str, str], tmp_path: Path
) -> None:
    name = stock.imports[0]
    program = tmp_path / "program.py"
    program.write_text(
        "import gc, sys\n"
        "imported = vars(sys.modules[sys.argv[1]])\n"
        "print(gc.isenabled(), any(one is imported for one in gc.get_objects()))\n"
    )
    with (tmp_path / "log").open("wb") as log:
        assert template.start([name], environment, log.fileno(), program).wait(120) == 0

    assert (tmp_path / "log").read_text() == "True False\n"


def test_others_share_a_template_and_engines_end_with_whoever_started_them(
    stock: Stock, environment: dict[str, str], tmp_path: Path, short_dir: Path
) -> None:
    template = Template(BARE, environment, stock, at=short_dir / "door")
    try:
        workers = [join(short_dir / "door", environment, stock) for _ in range(2)]
        first, second = (
            start(worker, environment, tmp_path / name, "--stay")
            for worker, name in zip(workers, "ab", strict=True)
        )
        assert workers[0].fits(environment)
        workers[0].close()
        assert first.wait(120) == -signal.SIGKILL
        assert second.poll() is None
        assert start(workers[1], environment, tmp_path / "c", "5").wait(120) == 5
        assert start(template, environment, tmp_path / "d", "6").wait(120) == 6
        assert (tmp_path / "imports").read_text() == "once "
        assert workers[1].alive()
    finally:
        template.close()
    assert second.wait(120) == -signal.SIGKILL
    assert not workers[1].alive()
    workers[1].close()


def test_who_finds_no_template_is_told_so(
    stock: Stock, environment: dict[str, str], short_dir: Path
) -> None:
    with pytest.raises(OSError, match="No such file"):
        join(short_dir / "door", environment, stock)
