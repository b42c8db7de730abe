"""Steps at which a process can be made to fail: all are in the code, and inert by default."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from rose_agent.weightsync.torture.cases import GATES, PROCESSES, SCRIPTED, enumerated
from rose_agent.weightsync.torture.main import SCRIPTS, main
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


def test_the_cases_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "engine.commit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert main(["--list", "--only", "no such case"]) == 1


def test_a_pattern_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "*engine"])
    assert "'*engine' is no regular expression" in capsys.readouterr().err
