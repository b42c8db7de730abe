"""Runs a program on its cases inside a sandbox; the gateway puts this file there.

    python3 inside.py FIRST COUNT SECONDS   as the sandbox's root: runs cases, says how each ended
    python3 inside.py call PROGRAM          as nobody: calls a function of the program

It knows what goes in and not what is expected. The program is another user's, so it can neither
change this file or what is reported of its cases, nor read other cases; what it leaves behind is
killed before the next case. A program that did all that all the same would have to say answers that
it does not know: ``rose_core.rewards.answers`` compares them in the gateway.

The report: a line ``rose-cases``, then for each case a line of JSON (``case``, ``end``,
``code``, ``seconds``, ``bytes``, ``error``) with so many bytes behind it. Where that is more than
``most_reported``, it lies in the file ``report``, and the next line is ``in a file``.

Needs nothing but Python 3.8 and its library. Next step: ``sandboxes`` reads the report.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HELLO = b"rose-cases\n"
IN_A_FILE = b"in a file\n"
# Bytes of what its error output ended with; the last line of it is a reason.
_ERROR_BYTES = 2048
_CHUNK = 1 << 16
_LOOK_SECONDS = 0.02
# For the kernel to end what was killed; beyond it something hangs in the kernel, and does nothing.
_GONE_SECONDS = 2.0
# How one ends whose CPU time is over, without a shell around it and with one.
_LATE = (-signal.SIGXCPU, 128 + signal.SIGXCPU)


def main(arguments: list[str]) -> None:
    """Both modes, by the arguments."""
    if arguments[0] == "call":
        call(Path(arguments[1]))
        return
    folder = Path(__file__).parent
    job = json.loads((folder / "job.json").read_text())
    out = sys.stdout.buffer
    out.write(HELLO)
    out.flush()
    report = b""
    first, count, ends = int(arguments[0]), int(arguments[1]), float(arguments[2])
    ends += time.monotonic()
    for number in range(first, first + count):
        line, gave = _run(job, folder, number)
        report += json.dumps(line).encode() + b"\n" + gave
        # What comes after a case that nothing can come of is not run where all have to be right.
        if (job["stop"] and (line["end"], line["code"]) != ("exited", 0)) or (
            len(report) > job["most_bytes"] or time.monotonic() > ends
        ):
            break
    if len(report) > job["most_reported"]:
        (folder / "report").write_bytes(report)
        out.write(IN_A_FILE)
    else:
        out.write(report)
    out.flush()


def _run(job: dict[str, Any], folder: Path, number: int) -> tuple[dict[str, Any], bytes]:
    """Run one case, and report how it ended."""
    user, began = job["user"], time.monotonic()
    home = "/"
    with contextlib.suppress(OSError):  # an earlier case has filled the disk
        home = tempfile.mkdtemp(prefix="case-")
        os.chown(home, user, user)
    with tempfile.TemporaryFile(dir=folder) as given, tempfile.TemporaryFile(dir=folder) as errors:
        given.write(job["cases"][number].encode())
        given.seek(0)

        def become() -> None:
            with contextlib.suppress(OSError):  # of all that runs here the kernel takes it first
                Path("/proc/self/oom_score_adj").write_text("1000")
            os.nice(19)
            seconds = job["cpu_seconds"]
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_bytes"],) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)

        variables = dict(os.environ, HOME=home, TMPDIR=home, PYTHONDONTWRITEBYTECODE="1")
        process = subprocess.Popen(
            ["/bin/sh", "-c", job["command"]],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=home,
            env=dict(variables, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"),
            preexec_fn=become,  # noqa: PLW1509  # there is one thread
            start_new_session=True,
        )
        gave, end = _read(process, job, began)
        length = errors.seek(0, os.SEEK_END)
        errors.seek(max(0, length - _ERROR_BYTES))
        error = errors.read().decode(errors="replace")
    if home != "/":
        with contextlib.suppress(RecursionError):  # the next case shall find as much room
            shutil.rmtree(home, ignore_errors=True)
    code = process.returncode
    if end == "exited" and code in _LATE:
        end = "late"
    return {
        "case": number,
        "end": end,
        "code": code,
        "seconds": time.monotonic() - began,
        "bytes": len(gave),
        "error": error,
    }, gave


def _read(process: subprocess.Popen[bytes], job: dict[str, Any], began: float) -> tuple[bytes, str]:
    """What it prints until it ends, and how it ended; it has ended then, with all it has left."""
    pipe = process.stdout
    assert pipe is not None  # noqa: S101  # PIPE
    os.set_blocking(pipe.fileno(), False)
    gave, end, is_open = bytearray(), "exited", True
    while process.poll() is None:
        if time.monotonic() > began + job["wall_seconds"]:
            end = "late"
            break
        if len(gave) > job["most_bytes"]:
            end = "too much"
            break
        if is_open:
            select.select([pipe], [], [], _LOOK_SECONDS)
            is_open = _take(pipe.fileno(), gave)
        else:
            time.sleep(_LOOK_SECONDS / 10)
    _kill_all(job["user"])
    process.wait()
    _wait_until_gone(job["user"])
    while is_open and len(gave) <= job["most_bytes"]:
        before = len(gave)
        is_open = _take(pipe.fileno(), gave) and len(gave) > before
    pipe.close()
    if len(gave) > job["most_bytes"]:
        return b"", "too much"
    return (bytes(gave), end) if end == "exited" else (b"", end)


def _take(pipe: int, into: bytearray) -> bool:
    """What there is to read; False: nobody has its other end any more."""
    try:
        data = os.read(pipe, _CHUNK)
    except BlockingIOError:
        return True
    into += data
    return bool(data)


def _kill_all(user: int) -> None:
    """Kill what the user has, wherever it has gone: ``kill`` of all is one step of the kernel's.

    As that user, since the sandbox's root would kill its own shells. No process is begun for it:
    the program may have taken all that there may be.
    """
    os.setresuid(user, user, 0)
    try:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    finally:
        os.setresuid(0, 0, 0)


def _wait_until_gone(user: int) -> None:
    """Return when nothing of the user is left: what is killed takes a moment to end."""
    ends = time.monotonic() + _GONE_SECONDS
    while time.monotonic() < ends and any(map(_belongs(user), Path("/proc").iterdir())):
        time.sleep(_LOOK_SECONDS / 10)


def _belongs(user: int) -> Callable[[Path], bool]:
    def belongs(entry: Path) -> bool:
        try:
            return entry.name.isdigit() and entry.stat().st_uid == user
        except OSError:  # it has ended meanwhile
            return False

    return belongs


def call(program: Path) -> None:
    """Call what standard input names and write its result; what is printed goes nowhere."""
    asked = json.load(sys.stdin)
    channel = os.dup(1)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    sys.setrecursionlimit(20_000)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    space = _namespace()
    exec(compile(program.read_text(), str(program), "exec"), space)  # noqa: S102  # what it is for
    if "source" in asked:
        result = eval(asked["source"], space)  # noqa: S307  # of the data set
    else:
        name = asked["function"]
        function = getattr(space["Solution"](), name) if "Solution" in space else space[name]
        result = function(*asked["arguments"])
    written = json.dumps(_written(result)).encode()
    with os.fdopen(channel, "wb") as out:
        out.write(written)
    # Threads that it left would keep this process.
    os._exit(0)


def _namespace() -> dict[str, Any]:
    """What programs for judges of functions take for granted."""
    space: dict[str, Any] = {"__name__": "program"}
    lines = ["import bisect, collections, functools, heapq, itertools, math, operator, random, re"]
    lines += ["import string, sys"]
    stars = ("typing", "collections", "functools", "itertools", "heapq", "bisect", "math")
    lines += [f"from {name} import *" for name in stars]
    lines += ["from builtins import *"]  # ``pow`` is not that of floats
    exec("\n".join(lines), space)  # noqa: S102  # constant
    return space


def _written(value: object) -> object:
    """A result as JSON: of what JSON has not the kind, of the rest what it is called."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_written(one) for one in value]}
    if isinstance(value, (set, frozenset)):
        return {"set": [_written(one) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[_written(name), _written(one)] for name, one in value.items()]}
    return {"other": [type(value).__name__]}


if __name__ == "__main__":
    main(sys.argv[1:])
