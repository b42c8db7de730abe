"""Freed buffers are used again instead of being cleared by the kernel once more."""

import subprocess
import sys

PROGRAM = """
import resource, sys
from rose_wire.memory import keep_freed
if sys.argv[1] == "keep":
    assert keep_freed(64 << 20)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def round():
    return len([bytes(1 << 20) for _ in range(8)])
round()
before = faults()
for _ in range(20):
    round()
print(faults() - before)
"""


def page_faults(word: str) -> int:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, word], check=True, capture_output=True, text=True
    )
    return int(found.stdout)


def test_buffers_are_used_again() -> None:
    assert page_faults("keep") * 2 < page_faults("not")
