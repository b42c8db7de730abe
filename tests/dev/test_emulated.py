"""The emulated machine: what it is told, how fast it may be. ``make test-cgroup2`` starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rose_dev.emulated import accelerator, start_script


@pytest.mark.parametrize(
    ("flags", "device", "kind"),
    [
        ("flags : fpu vmx sse", True, "kvm"),
        ("flags : fpu svm sse", True, "kvm"),
        ("flags : fpu vmx sse", False, "tcg,thread=multi"),
        ("flags : fpu sse", True, "tcg,thread=multi"),  # a device by which no stock kernel runs
        ("flags : fpu vmxnet3", True, "tcg,thread=multi"),
    ],
)
def test_which_accelerator_a_machine_has(flags: str, device: bool, kind: str) -> None:
    assert accelerator(flags, device=device)[:2] == ("-accel", kind)


def test_the_command_is_run_word_by_word_in_its_folder(tmp_path: Path) -> None:
    place = tmp_path / "a b"
    place.mkdir()
    code = "import os, sys; print(os.getcwd(), sys.argv[1:]); sys.exit(3)"
    words = (sys.executable, "-c", code, "it's", "$HOME; x", "*")
    script = start_script(tmp_path, place, words)
    before, after = script.index("export HOME"), script.index("cd ")
    end = script.index("sync\n")  # what mounts and what ends the machine is left out
    done = subprocess.run(
        ["sh", "-c", script[:before] + script[after:end]],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == f"{place} [\"it's\", '$HOME; x', '*']\n[emulated] exit code 3\n"
