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

Needs nothing but Python 3.8 and its library. Next step: ``programs`` reads the report.
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
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

HELLO = b"rose-cases\n"
LACKING = b"rose-cases lack "
IN_A_FILE = b"in a file\n"
# Bytes of what its error output ended with; the last line of it is a reason.
_ERROR_BYTES = 2048
_CHUNK = 1 << 16
_LOOK_SECONDS = 0.02
# For the kernel to end what was killed; beyond it something hangs in the kernel, and does nothing.
_GONE_SECONDS = 2.0
TIDY_SECONDS = 2.0
# What LiveCodeBench imports before a program; builtins come late, since others have a ``pow`` too.
_STARS = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json", "builtins"),
    "typing",
)
_PRELUDE = "\n".join(
    [f"from {name} import *" for name in _STARS] + [f"import {name}" for name in _STARS]
)
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
    if lacking := _lacking(job["command"]):
        out.write(LACKING + lacking.encode())
        return
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


def _lacking(command: str) -> str:
    """The program that a command begins with, where the image has none of that name."""
    name = command.split(maxsplit=1)[0]
    if name == "python3" or not all(one.isalnum() or one in "-._/+" for one in name):
        return ""
    found = subprocess.run(
        ["/bin/sh", "-c", 'command -v "$0"', name], stdout=subprocess.DEVNULL, check=False
    )
    return name if found.returncode else ""


def _run(job: dict[str, Any], folder: Path, number: int) -> tuple[dict[str, Any], bytes]:
    """Run one case, and report how it ended."""
    user, began, cpu = job["user"], time.monotonic(), _cpu_seconds()
    home = "/"
    with contextlib.suppress(OSError):  # an earlier case has filled the disk
        home = tempfile.mkdtemp(prefix="case-")
        os.chown(home, user, user)
    with tempfile.TemporaryFile(dir=folder) as given, tempfile.TemporaryFile(dir=folder) as errors:
        given.write(job["cases"][number].encode())
        given.seek(0)
        pipe, end_of_program = os.pipe()
        # Programs open /dev/stdin and its like anew, by their own rights.
        os.fchmod(given.fileno(), 0o444)
        for descriptor in (errors.fileno(), end_of_program):
            with contextlib.suppress(OSError):
                os.fchown(descriptor, user, user)

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
            stdout=end_of_program,
            stderr=errors,
            cwd=home,
            env=dict(variables, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"),
            preexec_fn=become,  # noqa: PLW1509  # there is one thread
            start_new_session=True,
        )
        os.close(end_of_program)
        gave, end = _read(process, pipe, job, began)
        length = errors.seek(0, os.SEEK_END)
        errors.seek(max(0, length - _ERROR_BYTES))
        error = errors.read().decode(errors="replace")
    code, seconds = process.returncode, time.monotonic() - began
    if end == "exited" and code in _LATE:
        end = "late"
    line = {
        "case": number,
        "end": end,
        "code": code,
        "seconds": seconds,
        "cpu": _cpu_seconds() - cpu,
        "bytes": len(gave),
        "error": error,
    }
    _tidy(user)
    return line, gave


def _cpu_seconds() -> float:
    """Of all that has ended below this process, as far as its parents waited for it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _tidy(user: int) -> None:
    """Remove what the user has left in folders of everybody, as far as a moment is enough for it.

    The next case shall find as much room, and nothing of this one. In a process of its own: how
    much there is to remove was the program's choice, and how deep.
    """
    with contextlib.suppress(OSError):
        child = os.fork()
        if not child:
            try:
                for top in ("/tmp", "/var/tmp", "/dev/shm"):  # noqa: S108  # whose else?
                    _remove_of(user, top)
            finally:
                os._exit(0)
        ends = time.monotonic() + TIDY_SECONDS
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > ends:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return
            time.sleep(_LOOK_SECONDS / 20)


def _remove_of(user: int, top: str) -> None:
    with contextlib.suppress(OSError), os.scandir(top) as entries:
        for entry in entries:
            if entry.stat(follow_symlinks=False).st_uid != user:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                Path(entry.path).unlink()


def _read(
    process: subprocess.Popen[bytes], pipe: int, job: dict[str, Any], began: float
) -> tuple[bytes, str]:
    """What it prints until it ends, and how it ended; it has ended then, with all it has left."""
    os.set_blocking(pipe, False)
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
            is_open = _take(pipe, gave)
        else:
            time.sleep(_LOOK_SECONDS / 10)
    _kill_all(job["user"])
    process.wait()
    _wait_until_gone(job["user"])
    while is_open and len(gave) <= job["most_bytes"]:
        before = len(gave)
        is_open = _take(pipe, gave) and len(gave) > before
    os.close(pipe)
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
    the program may have taken all that there may be. The real user is a third one: a process may be
    stopped by whom its real user is, and by its saved one.
    """
    os.setresuid(user - 1, user, 0)
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
    sys.setrecursionlimit(50_000)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    space = _namespace()
    # Not with the ``from __future__`` of this file.
    code = compile(program.read_text(), str(program), "exec", dont_inherit=True)
    exec(code, space)  # noqa: S102  # what it is for
    if "source" in asked:
        code = compile(asked["source"], "case", "eval", dont_inherit=True)
        result = eval(code, space)  # noqa: S307  # of the data set
    else:
        function = _function(space, asked["function"])
        result = function(*map(_with_numbers, asked["arguments"]))
    written = json.dumps(_written(result)).encode()
    with os.fdopen(channel, "wb") as out:
        out.write(written)
    # Threads that it left would keep this process.
    os._exit(0)


def _namespace() -> dict[str, Any]:
    """Of the program's module, with what programs for judges of functions take for granted."""
    module = types.ModuleType("program")
    sys.modules["program"] = module  # where ``dataclasses`` and ``pickle`` look for it
    exec(_PRELUDE, vars(module))  # noqa: S102  # constant
    return vars(module)


def _function(space: dict[str, Any], name: str) -> Any:  # noqa: ANN401  # of the program
    """A method of ``Solution``, as LeetCode has it, else a function."""
    solution = space.get("Solution")
    if isinstance(solution, type) and hasattr(solution, name):
        return getattr(solution(), name)
    return space[name]


def _with_numbers(argument: object) -> object:
    """Of an object whose names are all whole numbers a table by number, as APPS has it."""
    if not isinstance(argument, dict) or not argument:
        return argument
    try:
        return {int(name): value for name, value in argument.items()}
    except ValueError:
        return argument


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
