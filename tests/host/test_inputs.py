"""What was given wrong ends ``rose engine-host`` with code 2 and a line, before all else."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose_agent.host import main, privilege_split
from rose_agent.host.options.arguments import parser
from rose_agent.os.freezers import detect

FILE = """
name: dedicated-0
engineClass: fake
model: small
run: grpo
weightEndpoint: 127.0.0.1:1
"""
ALONE = "--router a:1 --lease team/lease --dedicated"


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The verb's handlers are this process's; they go with the test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def places(tmp_path: Path, models: Path) -> dict[str, Path]:
    made = {name: tmp_path / name for name in ("none", "word", "broken", "binary", "file", "short")}
    made["word"].write_text("hello")
    made["broken"].write_text("a: [")
    made["binary"].write_bytes(b"\xff\xfe\x00\x80")
    made["file"].write_text(FILE)
    made["short"].write_text(FILE.replace("model: small", ""))
    return {**made, "models": models}


MISTAKES = {
    "no models": ("", "--models is needed"),
    "models that are not there": ("--models {none}", "--models {none} does not exist; make it"),
    "models that are a file": ("--models {word}", "--models {word} is no folder; make it"),
    "a run directory that is a file": ("--rundir {word}", "--rundir {word} is no folder"),
    "a Python that is not there": (
        "--models {models} --engine-python {none}",
        "--engine-python {none} cannot be run; name a Python",
    ),
    "a token that is not there": ("--models {models} --token-file {none}", "--token-file {none}: "),
    "a token that is no text": (
        "--models {models} --token-file {binary}",
        "--token-file {binary}: holds no text",
    ),
    "a host's user without engines' users": (
        "--models {models} --host-uid 63999",
        "--host-uid 63999 needs --engine-uid",
    ),
    "a host's user among the engines'": (
        "--models {models} --host-uid 64001 --engine-uid 64000",
        "one of the engines' users, 64000 to 64999; choose one outside",
    ),
    "a host's user beside MPS": (
        "--models {models} --host-uid 63999 --engine-uid 64000 --mps-root {none}",
        "cannot be together with --mps-root",
    ),
    "a user that cannot be": ("--models {models} --engine-uid 99999999999", "there is no user"),
    "a dedicated engine without a router": (
        "--models {models} --dedicated {file}",
        "--dedicated needs --router HOST:PORT and --lease NAMESPACE/NAME",
    ),
    "a router without a port": (
        "--models {models} --dedicated {file} --router a --lease team/lease",
        "--router: 'a' is no address to dial",
    ),
    "a lease without a namespace": (
        "--models {models} --dedicated {file} --router a:1 --lease lease",
        "expected NAMESPACE/NAME",
    ),
    "a file that is not there": (
        "--models {models} " + ALONE + " {none}",
        "--dedicated {none}: No such file",
    ),
    "a file that is no YAML": (
        "--models {models} " + ALONE + " {broken}",
        "--dedicated {broken}: line 1 is no YAML",
    ),
    "a file that is no text": ("--models {models} " + ALONE + " {binary}", "--dedicated {binary}"),
    "a file without fields": (
        "--models {models} " + ALONE + " {word}",
        "--dedicated {word}: expected a YAML mapping, found str",
    ),
    "a file that lacks a field": (
        "--models {models} " + ALONE + " {short}",
        "--dedicated {short}: model: Field required; docs/engine-host.md",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_ends_the_verb_with_code_two_and_a_line(
    case: str, places: dict[str, Path], rundir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words, wanted = (text.format(**places) for text in MISTAKES[case])
    given = ["--cgroup", "signals", "--rundir", str(rundir / "new"), *words.split()]
    assert privilege_split.main(given) == 2
    output = capfd.readouterr().err
    assert wanted in output
    assert output.startswith("rose engine-host: ")
    assert output.count("\n") == 1
    assert not (rundir / "new").exists()


def test_the_host_looks_again_as_its_own_user(
    rundir: Path, places: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """``main`` is what runs after the rights were given up."""
    assert main.main(["--rundir", str(rundir), "--models", str(places["none"])]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_the_word_to_end_is_heard_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reported() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("not heard")

    monkeypatch.setattr("rose_agent.host.options.arguments.parser", reported)
    with pytest.raises(SystemExit) as ended:
        privilege_split.main([])
    assert ended.value.code == 0


async def test_the_word_to_end_while_starting_undoes_what_was_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    undone = []

    async def start(*_: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            undone.append("start")

    monkeypatch.setattr(main, "start", start)
    assert await main.serve(parser().parse_args([]), detect("signals")) == 0
    assert undone == ["start"]


async def test_a_taken_port_leaves_nothing_open(rundir: Path, models: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        data_port = free.getsockname()[1]
    with socket.create_server(("0.0.0.0", 0)) as taken:
        given = ["--rundir", str(rundir), "--models", str(models), "--data-port", str(data_port)]
        given += ["--http-port", str(taken.getsockname()[1])]
        with pytest.raises(OSError, match="address already in use"):
            await main.start(parser().parse_args(given), detect("signals", scope=str(rundir)))
    socket.create_server(("127.0.0.1", data_port)).close()
    with socket.socket(socket.AF_UNIX) as caller, pytest.raises(OSError, match=r"refused|No such"):
        caller.connect(str(rundir / "host.sock"))
