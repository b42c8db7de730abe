"""A run that was killed leaves nothing behind, not even what had left its session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

_LEAVES_ONE = """
import pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
while not pathlib.Path(f"/proc/{{child.pid}}/cmdline").read_bytes():
    time.sleep(0.01)  # between the end of the fork and the program's own words it has none
print(child.pid, flush=True)
{end}
"""


def start(end: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-c", _LEAVES_ONE.format(end=end)]
    process = subprocess.Popen(
        [sys.executable, "-m", "rose_dev.contained", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_what_a_run_leaves_behind_is_ended_and_named() -> None:
    process, orphan = start("sys.exit(3)")
    _, output = process.communicate(timeout=60)
    assert process.returncode == 3
    assert not psutil.pid_exists(orphan)
    assert output == f"left behind: {orphan} sleep 600\n"


def test_so_it_is_when_the_run_is_killed() -> None:
    process, orphan = start("time.sleep(600)")
    (command,) = (p for p in psutil.Process(process.pid).children() if p.pid != orphan)
    command.kill()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert not psutil.pid_exists(orphan)


def test_a_termination_is_passed_on() -> None:
    process, orphan = start("time.sleep(600)")
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert not psutil.pid_exists(orphan)


def test_an_orphan_that_ends_meanwhile_is_no_zombie() -> None:
    """``sh`` puts the sleeper into the background and ends, so the sleeper is adopted."""
    script = "sleep 600 & echo $!; exec >&-; read -r line"
    command = [sys.executable, "-m", "rose_dev.contained", "sh", "-c", f"sh -c '{script}'; read x"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    orphan = psutil.Process(int(process.stdout.readline()))
    process.stdin.write("end the inner shell\n")
    process.stdin.flush()
    while orphan.ppid() != process.pid:
        time.sleep(0.01)
    orphan.kill()
    with suppress(psutil.NoSuchProcess):
        orphan.wait(30)
    assert not orphan.is_running()
    process.communicate("end the outer one\n", timeout=60)
