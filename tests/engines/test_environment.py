"""Installing the engine environment, with an installer that only pretends."""

import multiprocessing
import sys
from pathlib import Path

import pytest

from rose_dev import engine_environment, vllm_environment
from rose_dev.engine_environment import (
    CONSTRAINTS,
    engine_python,
    environment_folder,
    install,
    is_ready,
    main,
)
from rose_dev.environments import SetupFailed, find_uv

# Writes what it was asked to do, and makes a Python where `uv venv` would.
INSTALLER = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
[ -e "$(dirname "$0")/fail" ] && exit 7
for last; do :; done
if [ "$1" = venv ]; then
  mkdir -p "$last/bin"
  printf '#!/bin/sh\\nexit 0\\n' > "$last/bin/python"
  chmod +x "$last/bin/python"
fi
"""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    uv = tmp_path / "uv" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(INSTALLER)
    uv.chmod(0o755)
    return tmp_path


def calls(cache: Path) -> list[str]:
    file = cache / "uv" / "bin" / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_an_environment_is_installed_once(cache: Path) -> None:
    assert not is_ready(cache)
    assert install(cache) == engine_python(cache)
    assert is_ready(cache)
    first = calls(cache)
    assert [line.split()[0] for line in first] == ["venv", "pip"]
    assert str(CONSTRAINTS) in first[1]
    assert "sglang==" in first[1]
    install(cache)
    assert calls(cache) == first


def test_other_pins_make_it_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(cache)
    pins = cache / "pins.txt"
    pins.write_text("sglang==0.5.23\n")
    monkeypatch.setattr(engine_environment, "CONSTRAINTS", pins)
    assert not is_ready(cache)
    install(cache)
    assert len(calls(cache)) == 4


def test_failure_names_the_step_and_the_next_call_starts_over(cache: Path) -> None:
    (cache / "uv" / "bin" / "fail").touch()
    with pytest.raises(SetupFailed, match=r"engine environment.*exit code 7"):
        install(cache)
    assert not is_ready(cache)
    (cache / "uv" / "bin" / "fail").unlink()
    install(cache)
    assert is_ready(cache)


def test_without_an_installer_the_message_names_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupFailed, match="make venv"):
        find_uv(tmp_path)


def test_two_at_once_install_once(cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=install, args=(cache,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(calls(cache)) == 2


def test_the_command_prints_the_python_and_ends_with_1_when_the_install_fails(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROSE_CACHE", str(cache))
    assert main(["--print-only"]) == 0
    assert not is_ready(cache)
    assert main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(engine_python(cache))
    (cache / "uv" / "bin" / "fail").touch()
    (environment_folder(cache) / ".rose-stamp").unlink()
    assert main([]) == 1
    assert "FAILED" in capsys.readouterr().err


def test_every_package_of_the_engine_is_pinned_to_one_version() -> None:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    assert f"sglang=={engine_environment.SGLANG_VERSION}" in lines
    assert all("==" in line and "/" not in line for line in lines)
    assert sys.version_info >= (3, 11)


def test_vllm_has_an_environment_of_its_own(cache: Path) -> None:
    assert not vllm_environment.is_ready(cache)
    python = vllm_environment.install(cache)
    assert python == vllm_environment.vllm_python(cache)
    assert python != engine_python(cache)
    assert vllm_environment.is_ready(cache)
    first = calls(cache)
    assert [line.split()[0] for line in first] == ["venv", "pip", "pip"]
    assert str(vllm_environment.CONSTRAINTS) in first[1]
    (record,) = vllm_environment.environment_folder(cache).rglob("vllm-*.dist-info")
    assert "Name: vllm" in (record / "METADATA").read_text()
    vllm_environment.install(cache)
    assert calls(cache) == first
