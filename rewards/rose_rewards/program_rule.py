r"""The rule ``python``: runs an answer that is a program on cases, and compares what it prints.

    {"function": "python", "answer": "```python\nprint(int(input()) * 2)\n```",
     "expected": [{"input": "2", "output": "4"}, {"input": "3", "output": "6"}]}

What a case expects never enters the program's process, so no answer can print it without having
computed it, and how the program exits says nothing. The program has what its worker has (user,
network, memory) and limits of its own on processor time and on what it writes.

    case begins -> program, below this worker -> it ends, or its processor time is over
                -> whatever it left behind is killed -> its lines are compared

Whatever it starts comes below this worker when its parent ends (a child subreaper), sessions of
their own too. This process cannot be traced by programs of its user, but they can kill it: such a
reward is lost, and never a number.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

CPU_SECONDS: Final = 4
"""Of one case, where ``data`` does not say ``cpu_seconds``."""
_MOST_BYTES = 8 << 20  # that a program writes, on the disk and in its answer
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_NOT_DUMPABLE, _SUBREAPER = 4, 36


class ProgramCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a program reads, and what it prints when it is right."""

    input: str
    output: str


class ProgramLimits(msgspec.Struct, frozen=True):
    """Of a reward's ``data``; what else stands there is the caller's own."""

    cpu_seconds: int = CPU_SECONDS


def _prepare() -> None:
    """Whatever is started below comes back to this process, and none of it reads this one."""
    library = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_NOT_DUMPABLE, 0), (_SUBREAPER, 1)):
        if library.prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_prepare()  # once, as a worker imports its function


def python(reward: Mapping[str, Any]) -> dict[str, Any] | None:
    """The share of cases that the program gets right; correct when that is all of them.

    Raises:
        msgspec.ValidationError: ``expected`` is no list of cases, or ``data`` has wrong limits.
    """
    cases = msgspec.convert(reward["expected"] or [], list[ProgramCase])
    if not cases:
        return None
    limits = msgspec.convert(reward["data"] or {}, ProgramLimits)
    with tempfile.TemporaryDirectory() as name:
        program = Path(name) / "program.py"
        program.write_text(_program(str(reward["answer"])))
        right = [_printed(program, one, limits) == _lines(one.output) for one in cases]
    return {"reward": sum(right) / len(right), "correct": all(right)}


def _program(answer: str) -> str:
    """The last fenced block, or all of it."""
    found = _FENCED.findall(answer)
    return found[-1] if found else answer


def _lines(text: str) -> list[str]:
    """Blanks at the ends of lines and lines at the end do not count."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _printed(program: Path, case: ProgramCase, limits: ProgramLimits) -> list[str] | None:
    """Lines that the program prints; None where they are no text, or too many."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
        given.write(case.input.encode())
        given.seek(0)
        # Isolated: neither the environment nor the folder of this worker gives it modules.
        child = subprocess.Popen(
            [sys.executable, "-I", str(program)],
            stdin=given,
            stdout=printed,
            stderr=subprocess.DEVNULL,
            cwd=program.parent,
        )
        try:
            # It has done nothing of its own yet that these could come too late for: Python starts.
            for which, most in (
                (resource.RLIMIT_CPU, limits.cpu_seconds),
                (resource.RLIMIT_FSIZE, _MOST_BYTES),
            ):
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(child.pid, which, (most, most))
            child.wait()
        finally:
            _end_children()
        printed.seek(0)
        content = printed.read(_MOST_BYTES)
    with contextlib.suppress(UnicodeDecodeError):
        return _lines(content.decode()) if len(content) < _MOST_BYTES else None
    return None


def _end_children() -> None:
    """Kill whatever is below this process, until there is nothing."""
    while True:
        below = [
            int(pid)
            for one in Path("/proc/self/task").iterdir()
            for pid in (one / "children").read_text().split()
        ]
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while below:
                os.waitpid(-1, 0)
                below.pop()
        if not below:
            return
