"""``rose`` finds verbs, explains wrong usage, and names the extra that is missing."""

import importlib
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from rose_cli import main as cli


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in cli.VERBS)


def test_without_a_verb_the_usage_is_shown_and_the_exit_code_is_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([]) == 2
    assert "usage: rose VERB" in capsys.readouterr().out


def test_an_unknown_verb_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lend"]) == 2
    output = capsys.readouterr().err
    assert "no verb 'lend'" in output
    assert "usage: rose VERB" in output


def test_a_verb_that_is_nearly_one_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["statsu"]) == 2
    output = capsys.readouterr().err
    assert output == "rose: no verb 'statsu'; did you mean 'status'? rose --help lists all\n"


def test_the_rest_of_the_arguments_and_the_exit_code_pass_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[str]] = []

    def verb(argv: list[str]) -> int:
        seen.append(argv)
        return 7

    module = types.SimpleNamespace(main=verb)
    monkeypatch.setattr(importlib, "import_module", lambda _name: module)
    assert cli.main(["router", "--lease", "a/b"]) == 7
    assert seen == [["--lease", "a/b"]]


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str) -> None:
        raise ModuleNotFoundError(name="kopf")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(SystemExit, match=r"rose-gpu\[operator\]"):
        cli.main(["operator"])


@pytest.mark.parametrize("name", ["dev", "demo"])
def test_what_only_a_checkout_has_says_how_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_name: str) -> None:  # as where the wheel is installed (tests/dev/test_wheel.py)
        raise ModuleNotFoundError(name=f"rose_{name}")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(SystemExit, match=rf"checkout of ROSE.*make venv.*/rose {name}$"):
        cli.main([name])


def test_a_broken_module_of_our_own_is_not_blamed_on_an_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_name: str) -> None:
        raise ModuleNotFoundError(name="rose_operator.gone")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["operator"])


@pytest.mark.parametrize("name", sorted(cli.VERBS))
def test_every_verb_exists_and_explains_itself(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert "usage:" in capsys.readouterr().out


# A verb that imports for ever, as the first process of a pid namespace.
_BEGINS = """
import importlib, sys, time
from rose_cli import main as cli
def load(_name):
    print("imports", flush=True)
    time.sleep(600)
cli.importlib.import_module = load
sys.exit(cli.main(["router"]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a pid namespace takes root")
def test_the_first_process_of_a_container_ends_when_it_is_told_to_while_it_imports() -> None:
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", _BEGINS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "imports\n"
            (first,) = (int(pid) for pid in _children(process.pid))
            os.kill(first, signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
