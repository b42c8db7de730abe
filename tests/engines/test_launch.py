"""How the launchers start the processes of SGLang and vLLM."""

import subprocess
import sys

import pytest

from rose_engines.sglang.launch import on_cpu

ASK = """
import multiprocessing
from rose_engines.sglang.launch import fork_children
fork_children()
multiprocessing.set_start_method({asked!r}, force=True)
print(multiprocessing.get_start_method())
"""
ASK_VLLM = """
import multiprocessing
from rose_engines.vllm.launch import fork_core
fork_core()
print(multiprocessing.get_context({asked!r}).get_start_method())
"""


@pytest.mark.parametrize("ask", [ASK, ASK_VLLM])
@pytest.mark.parametrize(("asked", "got"), [("spawn", "fork"), ("forkserver", "forkserver")])
def test_processes_that_would_import_everything_again_are_forked(
    ask: str, asked: str, got: str
) -> None:
    """Both engines ask for ``spawn``, whatever was chosen before."""
    ran = subprocess.run(
        [sys.executable, "-c", ask.format(asked=asked)], capture_output=True, text=True, check=True
    )
    assert ran.stdout == f"{got}\n"


def test_the_device_is_found_in_both_spellings() -> None:
    assert on_cpu(["--device", "cpu"])
    assert on_cpu(["--device=cpu"])
    assert not on_cpu(["--device", "cuda"])
    assert not on_cpu(["--model-path", "cpu"])
