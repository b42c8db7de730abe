"""External commands: every one has a time limit, and an error that shows what it said.

Also the waiting helper of this package: conditions are polled with a generous deadline, because
development machines are slow and busy.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rose_dev.errors import CommandFailed, StartFailed

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
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(  # noqa: PLW1510  # the exit code is judged below
            words, input=stdin or b"", capture_output=True, timeout=seconds, env=env, cwd=cwd
        )
    except subprocess.TimeoutExpired as error:
        message = f"{' '.join(words)}: no end after {seconds:.0f} s"
        raise CommandFailed(message) from error
    except OSError as error:
        message = f"{words[0]}: cannot be started: {error}"
        raise CommandFailed(message) from error
    out, err = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    if check and done.returncode != 0:
        said = (err.strip() or out.strip())[-_SHOWN:]
        message = f"{' '.join(words)}: exit code {done.returncode}\n{said}"
        raise CommandFailed(message)
    return subprocess.CompletedProcess(words, done.returncode, out, err)


def succeeds(argv: Sequence[str | Path], *, seconds: float = 10) -> bool:
    """Whether a command can be run and ends with exit code 0."""
    try:
        return run(argv, seconds=seconds, check=False).returncode == 0
    except CommandFailed:
        return False


def wait_until(
    condition: Callable[[], bool], what: str, *, seconds: float, pause: float = 0.1
) -> None:
    """Poll until the condition holds.

    Raises:
        StartFailed: it did not hold in time; ``what`` says what was awaited.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            message = f"{what}: not within {seconds:.0f} s"
            raise StartFailed(message)
        time.sleep(pause)


def tail(path: Path, lines: int = 15) -> str:
    """The end of a log file, for error messages."""
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(text.splitlines()[-lines:])
