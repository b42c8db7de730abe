"""An engine without ROSE's plugin, or without what the plugin hooks, is not started."""

from __future__ import annotations

import pytest

from rose_engines.process.hooks import check_loaded, exists, require
from rose_engines.process.launch import PERMIT_VARIABLE, SOCKET_VARIABLE


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (PERMIT_VARIABLE, SOCKET_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("target", "there"),
    [
        ("pathlib.Path.exists", True),
        ("pathlib.Path.vanished", False),
        ("os.sep", False),  # no function
        ("no_such_engine.core.step", False),
    ],
)
def test_a_function_is_there_or_not(target: str, there: bool) -> None:
    assert exists(target) is there


def test_a_missing_function_ends_the_process_and_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    require(["os.kill"], "vLLM", "1.0")
    with pytest.raises(SystemExit) as ended:
        require(["os.kill", "os.vanished"], "vLLM", "1.0")
    assert ended.value.code == 3
    text = "rose: refused: this vLLM has no os.vanished; the plugin supports 1.0\n"
    assert capsys.readouterr().err == text


@pytest.mark.parametrize("name", [PERMIT_VARIABLE, SOCKET_VARIABLE])
def test_an_engine_that_could_not_be_stopped_is_not_started(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_loaded(False, "SGLang")  # a serving engine has no plugin
    monkeypatch.setenv(name, "/run/x")
    check_loaded(True, "SGLang")
    with pytest.raises(SystemExit) as ended:
        check_loaded(False, "SGLang")
    assert ended.value.code == 3
    assert "SGLang did not load ROSE's plugin" in capsys.readouterr().err
