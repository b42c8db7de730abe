"""External commands with time limits, whose errors show what they printed; and locks of files."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rose_dev.errors import CommandFailed

_SHOWN = 3000


def run(
    argv: Sequence[str | Path],
    *,
    seconds: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = True,
    stdin: bytes | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end.

    Args:
        argv: the command and its arguments.
        seconds: time limit; the command is killed when it is over.
        env: the whole environment, or the caller's when None.
        cwd: where to run it.
        check: raise when the exit code is not 0.
        stdin: bytes for its standard input, which is empty otherwise.

    Raises:
        CommandFailed: it cannot be started, took too long, or (with ``check``) failed.
    """
    command = [str(part) for part in argv]
    try:
        done = subprocess.run(  # noqa: PLW1510  # the exit code is judged below
            command, input=stdin or b"", capture_output=True, timeout=seconds, env=env, cwd=cwd
        )
    except subprocess.TimeoutExpired as error:
        message = f"{' '.join(command)}: no end after {seconds:.0f} s"
        raise CommandFailed(message) from error
    except OSError as error:
        message = f"{command[0]}: cannot be started: {error}"
        raise CommandFailed(message) from error
    out, err = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    if check and done.returncode != 0:
        output = (err.strip() or out.strip())[-_SHOWN:]
        message = f"{' '.join(command)}: exit code {done.returncode}\n{output}"
        raise CommandFailed(message)
    return subprocess.CompletedProcess(command, done.returncode, out, err)


def ending_with_us(argv: Sequence[str | Path]) -> list[str]:
    """A command that is killed when the thread that starts it ends, as a killed test's (Linux)."""
    guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    return [*guard, *map(str, argv)]


def succeeds(argv: Sequence[str | Path], *, seconds: float = 10) -> bool:
    """Whether a command can be run and ends with exit code 0."""
    try:
        return run(argv, seconds=seconds, check=False).returncode == 0
    except CommandFailed:
        return False


@contextmanager
def locked(path: Path, waits: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Be the only process that holds this file's lock.

    Args:
        path: is made where it is not there; stays.
        waits: called once where another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tail(path: Path, lines: int = 15) -> str:
    """The end of a log file, for error messages."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(text.splitlines()[-lines:])
