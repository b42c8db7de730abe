"""NVIDIA's own MPS daemons, of the drivers 535 and 550, run as ``rose mps`` runs them; no GPU.

Without a GPU a daemon answers every command and no server of it comes up. What a server says is
the stand-in's part (``test_mps``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from rose_agent.devices.access import DRIVER_ROOT, LIBRARY
from rose_agent.devices.mps import control as mps
from rose_agent.devices.mps.control import MULTI_USER, PROGRAM, MpsControl, Pipes, knows
from rose_agent.devices.mps.main import Question, check
from rose_agent.errors import MpsError
from rose_agent.os import kernel
from rose_agent.os.groups import wait_for
from rose_core.devices.mps import MpsRefusal
from rose_dev.cluster.gpu_node.driver_root import unpacked
from rose_dev.errors import NotSupported


def program(driver: int) -> Path:
    """The control program of a driver."""
    try:
        return unpacked("nvidia-cuda-mps", driver) / "usr/bin" / PROGRAM
    except NotSupported as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def daemon(
    driver: int, root: Path, mounted: Path | None = None
) -> Iterator[tuple[MpsControl, subprocess.Popen[bytes]]]:
    """``rose mps`` with the daemon of a driver, named or in a mounted driver's root."""
    control = program(driver)
    pipes = Pipes(root)
    command = [sys.executable, "-m", "rose_cli.main", "mps", "--root", str(root)]
    named = ["--program", str(control)] if mounted is None else []
    environment = {**os.environ, **({DRIVER_ROOT: str(mounted)} if mounted is not None else {})}
    process = subprocess.Popen(
        [*command, *named],
        env=environment,
        # A run of tests that is killed leaves none behind.
        preexec_fn=partial(kernel.die_with_parent, signal.SIGTERM),  # noqa: PLW1509  # one thread here
    )
    try:
        assert wait_for(
            lambda: (pipes.pipe / "control").exists() or process.poll() is not None, 60.0
        )
        assert process.poll() is None, "the daemon ended at once"
        yield MpsControl(pipes, [str(control)], 60.0), process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture(params=[535, 550])
def driver(request: pytest.FixtureRequest) -> int:
    """Major version."""
    return int(request.param)


def test_rose_mps_runs_the_real_daemon_and_ends_it_in_order(driver: int, tmp_path: Path) -> None:
    with daemon(driver, tmp_path) as (control, process):
        assert control.ask("get_default_active_thread_percentage") == ("100.0",)
        assert control.ask("get_server_list") == ()
    assert process.returncode == 0
    with pytest.raises(MpsError, match="Cannot find MPS control daemon"):
        control.ask("get_server_list")


def test_the_real_daemon_ends_with_rose_mps_also_when_that_is_killed(
    driver: int, tmp_path: Path
) -> None:
    with daemon(driver, tmp_path) as (_control, process):
        (running,) = psutil.Process(process.pid).children()
        process.kill()
        assert wait_for(lambda: not running.is_running(), 60.0)


def test_rose_mps_takes_the_daemon_out_of_a_mounted_driver(driver: int, tmp_path: Path) -> None:
    """As with ``gpus.access: HostPath``, where the image has no program of NVIDIA's."""
    mounted = tmp_path / "driver"
    shutil.copytree(program(driver).parents[2] / "usr", mounted / "usr")
    libraries = mounted / "usr/lib/x86_64-linux-gnu"
    libraries.mkdir(parents=True, exist_ok=True)
    for name in (LIBRARY, "libc.so.6"):  # a daemon that loaded either of them would not start
        (libraries / name).write_text("no library")
    with daemon(driver, tmp_path / "mps", mounted) as (control, process):
        assert control.ask("get_server_list") == ()
        running = (psutil.Process(process.pid)).children()
        assert [one.exe() for one in running] == [str(mounted / "usr/bin" / PROGRAM)]
    assert process.returncode == 0


def test_no_option_that_the_real_control_program_does_not_know_is_given_to_it(
    driver: int, tmp_path: Path
) -> None:
    real = [str(program(driver))]
    assert not knows(real, MULTI_USER)
    # What it does not know it takes for an order to a daemon that runs already, and ends.
    environment = Pipes(tmp_path).create().environment(os.environ)
    done = subprocess.run(
        [*real, "-f", MULTI_USER], env=environment, capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert b"Cannot find MPS control daemon" in done.stdout + done.stderr


def test_the_real_daemon_shows_every_gpu_to_processes_of_every_user(
    driver: int, tmp_path: Path
) -> None:
    with daemon(driver, tmp_path):
        for name in ("pipe", "log", "shm"):
            mode = (tmp_path / name).stat().st_mode
            assert mode & stat.S_ISVTX
            assert mode & 0o007 == 0o007
        control = tmp_path / "pipe/control"
        # The daemon opens its socket to others after it has made it.
        assert wait_for(lambda: control.stat().st_mode & 0o006 == 0o006, 60.0)
        assert "CUDA_VISIBLE_DEVICES" not in Pipes(tmp_path).environment(
            {"CUDA_VISIBLE_DEVICES": "0"}
        )


def test_a_daemon_that_cannot_tell_a_fault_is_refused_before_anybody_opts_in(
    tmp_path: Path,
) -> None:
    with daemon(535, tmp_path) as (control, _process):
        found = check(control, Question(serving=4711))
        assert found.refusal is MpsRefusal.UNAVAILABLE
        assert "driver 550 or later" in found.message


def test_with_a_daemon_that_can_serving_is_what_is_missing(tmp_path: Path) -> None:
    with daemon(550, tmp_path) as (control, _process):
        found = check(control, Question(serving=4711))
        assert found.refusal is MpsRefusal.SERVING_OUTSIDE


def test_commands_that_the_real_daemon_refuses_are_errors_although_they_end_with_0(
    driver: int, tmp_path: Path
) -> None:
    with daemon(driver, tmp_path) as (control, _process):
        with pytest.raises(MpsError, match="Unknown command"):
            control.ask("no_such_command")
        with pytest.raises(MpsError, match="not found"):
            control.terminate(1, 2)


def test_the_real_daemon_is_found_by_its_socket_and_not_by_a_file_it_leaves(
    driver: int, tmp_path: Path
) -> None:
    with daemon(driver, tmp_path) as (control, _process):
        assert control.protocol == 2
        assert _words(tmp_path / "pipe")[0].endswith(PROGRAM)
    assert (tmp_path / "pipe/control").exists(), "left behind by the daemon"
    assert _words(tmp_path / "pipe") == ()


def _words(pipe: Path) -> tuple[str, ...]:
    return mps._daemon_file(pipe, "cmdline") or ()


def test_a_server_that_cannot_start_is_no_server(driver: int, tmp_path: Path) -> None:
    with daemon(driver, tmp_path) as (control, _process):
        control.ask("start_server -uid 0")
        assert wait_for(lambda: control.ask("get_server_list") == (), 30.0)
