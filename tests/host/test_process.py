"""Spawning: environment, logs, and what is left of an engine that was killed."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rose_agent.host.processes import exec_engine, process
from rose_agent.host.slots.lifecycle import backoff_seconds
from rose_agent.os import processes
from rose_agent.os.groups import wait_for


def test_an_engine_inherits_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.setenv("LANG", "C.UTF-8")
    made = process.environment({"OMP_NUM_THREADS": "1"})
    assert made["LANG"] == "C.UTF-8"
    assert made["OMP_NUM_THREADS"] == "1"
    assert not {"KUBERNETES_SERVICE_HOST", "SOME_TOKEN"} & set(made)


def test_a_log_that_grows_is_cut_and_the_engine_goes_on_at_its_start(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    with log.open("ab") as engine:
        engine.write(b"old" * 100)
        engine.flush()
        process.rotate(log, limit=1000)
        assert log.stat().st_size == 300
        process.rotate(log, limit=100)
        engine.write(b"new")
        engine.flush()
    assert log.read_bytes() == b"new"
    assert (tmp_path / "engine.log.1").read_bytes() == b"old" * 100
    process.rotate(tmp_path / "missing.log")


def test_the_end_of_a_log_is_readable_whatever_is_in_it(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert process.last_lines(log) == ""
    log.write_bytes(b"\xff" * 5000 + b"\nthe reason\n")
    assert process.last_lines(log).endswith("the reason")
    assert len(process.last_lines(log, 50)) <= 50


def test_pauses_between_starts_grow_and_are_bounded() -> None:
    pauses = [backoff_seconds(failures) for failures in range(1, 12)]
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert pauses[-1] == 60.0


def test_snapshots_of_a_killed_engine_are_found() -> None:
    script = (
        "import mmap, os, sys, time\n"
        "path = f'/dev/shm/sglang_loads_rose_test_{os.getpid()}.shm'\n"
        "file = open(path, 'w+b'); file.truncate(4096)\n"
        "memory = mmap.mmap(file.fileno(), 4096)\n"
        "print(path, flush=True); time.sleep(600)\n"
    )
    engine = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert engine.stdout is not None
        path = Path(engine.stdout.readline().strip())
        assert processes.shared_memory([engine.pid, 2**22 + 1]) == {path}
        path.unlink()
        assert processes.shared_memory([engine.pid]) == frozenset()
    finally:
        engine.kill()
        engine.communicate()


def test_dead_heirs_are_collected() -> None:
    """As in a container, where whoever loses its parent becomes the host's child."""
    set_subreaper = 36
    libc = ctypes.CDLL(None)
    assert libc.prctl(set_subreaper, 1, 0, 0, 0) == 0
    try:
        command = ["/bin/sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"]
        heir = int(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
        os.kill(heir, signal.SIGKILL)
        assert wait_for(lambda: psutil.Process(heir).status() == psutil.STATUS_ZOMBIE, 30.0)
        processes.reap([0, heir, os.getppid()])
        assert not Path(f"/proc/{heir}").exists()
    finally:
        libc.prctl(set_subreaper, 0, 0, 0, 0)


def test_a_user_of_its_own_can_be_given() -> None:
    command = [
        sys.executable,
        "-I",
        "-S",
        exec_engine.__file__,
        "--uid",
        "4711",
        "--",
        "/bin/sh",
        "-c",
    ]
    result = subprocess.run(
        [*command, "id -u; id -g; id -G"], capture_output=True, text=True, timeout=60, check=False
    )
    if "PermissionError" in result.stderr:
        pytest.skip("needs root")
    assert result.stdout.split() == ["4711", "4711", "4711"]


def test_a_program_that_cannot_be_entered_is_not_started_halfway(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-I",
        "-S",
        exec_engine.__file__,
        "--procs",
        str(tmp_path / "no" / "procs"),
    ]
    result = subprocess.run(
        [*command, "--", "touch", str(tmp_path / "started")],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert result.returncode != 0
    assert not (tmp_path / "started").exists()
