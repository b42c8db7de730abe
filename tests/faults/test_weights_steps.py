"""Steps at which a process can be made to fail: all are in the code, and inert by default."""

from __future__ import annotations

import errno
import re
import shutil
import socket
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from bench.torture.__main__ import GATES, PROCESSES, SCRIPTED, SCRIPTS, enumerated, main
from bench.torture.process import Process, until
from bench.torture.rig import Link
from rose_core.delta import faults
from rose_wire import faults as arming

ROOT = Path(__file__).parents[2]
CALL = re.compile(r"faults\.at\(\s*\"([^\"]+)\"")


def test_every_step_of_the_table_is_passed_by_product_code_and_no_other() -> None:
    rooms = ("weights", "trainer", "agent", "engines")
    sources = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    passed = {step for path in sources for step in CALL.findall(path.read_text())}
    assert passed == set(faults.STEPS)


def test_every_step_is_a_case_of_a_process_and_every_script_is_there() -> None:
    killed = {case.fault.partition("#")[0] for case in enumerated() if "=kill" in case.fault}
    assert killed == set(faults.STEPS)
    assert {step.partition(".")[0] for step in faults.STEPS} == set(PROCESSES)
    assert {case.name for case in (*SCRIPTED, *GATES)} == set(SCRIPTS)
    names = [case.name for case in (*enumerated(), *SCRIPTED, *GATES)]
    assert len(names) == len(set(names))


def test_a_fault_acts_once_at_its_passage() -> None:
    acted: list[int] = []
    fault = faults.parse("store.block#3=note", {"note": lambda: acted.append(1)})
    try:
        faults.install(fault)
        for _ in range(2):
            faults.at("store.block")
            faults.at("store.piece")
        assert acted == []
        for _ in range(3):
            faults.at("store.block")
        assert acted == [1]
    finally:
        faults.install(None)
    faults.at("store.block")


@pytest.mark.parametrize("text", ["store.nothing", "store.block=melt", "store.block#x"])
def test_a_fault_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"names no fault|invalid literal"):
        faults.parse(text, {"kill": lambda: None})


def test_a_process_is_armed_by_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(arming.VARIABLE, raising=False)
    arming.arm()
    faults.at("store.block")
    monkeypatch.setenv(arming.VARIABLE, "store.block=full")
    try:
        arming.arm()
        with pytest.raises(OSError, match="asked for") as full:
            faults.at("store.block")
        assert full.value.errno == errno.ENOSPC
    finally:
        faults.install(None)


def test_a_clock_that_is_set_goes_ahead_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", time.time)  # both are put back afterwards
    monkeypatch.setattr(time, "time_ns", time.time_ns)
    monkeypatch.setenv(arming.VARIABLE, f"{arming.CLOCK}86400")
    turn = [0.0]
    before = time.time()
    monkeypatch.setattr(time, "monotonic", lambda: turn[0])
    arming.arm()
    assert time.time() - before < -80_000
    turn[0] = 2.0
    assert time.time() - before > 80_000
    assert abs(time.time() - time.time_ns() / 1e9) < 60


def test_the_cases_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "engine.commit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert main(["--list", "--only", "no such case"]) == 1


def test_a_pattern_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "*engine"])
    assert "'*engine' is no regular expression" in capsys.readouterr().err


def test_the_link_tells_the_relay_at_once_that_the_store_is_gone() -> None:
    """As a killed store's own socket would: a watch must not wait for the next keep-alive."""
    folder = Path(tempfile.mkdtemp())
    with socket.socket(socket.AF_UNIX) as store, socket.socket(socket.AF_UNIX) as relay:
        store.bind(str(folder / "s"))
        store.listen()
        link = Link(folder / "l", folder / "s")
        try:
            relay.settimeout(60)
            relay.connect(str(folder / "l"))
            connection, _ = store.accept()
            relay.sendall(b"watch")
            assert connection.recv(5) == b"watch"
            connection.close()
            assert relay.recv(1) == b""
        finally:
            link.close()
            shutil.rmtree(folder)


def test_what_a_process_said_in_an_earlier_life_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions that it named may be served long after it was killed and started again."""
    script = tmp_path / "says.py"
    script.write_text("import sys, os; print('{\"pid\": %d}' % os.getpid(), flush=True); input()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = Process("says", ["says"], tmp_path / "log")
    lives = []

    def spoke(times: int) -> bool:
        return len(process.ever) == times

    try:
        for number in range(2):
            process.start()
            until(partial(spoke, number + 1), "it speaks")
            lives.append(process.lines)
            process.kill()
    finally:
        process.kill()
    assert [len(life) for life in lives] == [1, 1]
    assert process.ever == [*lives[0], *lives[1]]
