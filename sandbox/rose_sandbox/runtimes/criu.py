"""What CRIU is told, and what it says.

Next step: ``runc`` lets it save and restore.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from rose_sandbox.errors import RuntimeFailed
from rose_sandbox.runtimes.programs import run
from rose_wire.cgroups import text_of

# CRIU's: connections inside are saved, none leads out; deleted files up to what a log may have.
CONFIGURATION = """\
tcp-established
network-lock skip
manage-cgroups=ignore
file-locks
link-remap
ghost-limit 67108864
"""
# What CRIU says of things it cannot save -> the word for it.
_UNDUMPABLE = (
    (r"io_uring", "io_uring"),
    (r"userfaultfd", "userfaultfd"),
    (r"perf_event", "perf_event"),
    (r"bpf", "bpf"),
    (r"[Gg]host file.*(big|limit)|Can't dump ghost file", "large deleted file"),
    (r"unix: (Ext|.*external|.*peer)", "external socket"),
    (r"sk unix|unix: ", "unix socket"),
    (r"packet|Unknown socket|unsupported.*socket|sockets?: ", "socket"),
    (r"tty: |Can't dump.*tty|terminal", "terminal"),
    (r"is in the different (pid|net|mnt|user|ipc|uts) ?n", "nested namespace"),
    (r"mnt: ", "mount"),
    (r"Can't lookup mount|Can't open file|files-reg", "file"),
    (r"ptrace|Unable to (seize|interrupt)|traced", "traced process"),
    (r"Zombie|zombie|dead", "dying process"),
)


KNOWN = Path("/run/criu.kdat")
"""Where CRIU keeps what it found out about the kernel."""


async def learn_kernel(path: str, known: Path = KNOWN) -> None:
    """Let CRIU find out about the kernel once, and not at every call, which takes it 60 ms.

    It does so itself where ``/run`` is in memory, which no kernel outlives; in a container, and on
    many machines, ``/run`` is not. A file from before the machine started is made anew.

    Args:
        path: ``PATH`` of the runtime's programs.
        known: the file.

    Raises:
        RuntimeFailed: it could not be found out, or not be kept; calls are slower then.
    """
    if known.exists() and known.stat().st_mtime > _started():  # noqa: ASYNC240 - microseconds
        return
    ask = "mount -t tmpfs tmpfs /run && criu check >&2 && exec cat /run/criu.kdat"
    found = await run(path, "unshare", "--mount", "sh", "-c", ask)
    try:
        with tempfile.NamedTemporaryFile(dir=known.parent, delete=False) as file:
            file.write(found)
        Path(file.name).replace(known)  # noqa: ASYNC240 - as above
    except OSError as error:
        raise RuntimeFailed(f"{known} cannot be written: {error.strerror}") from error


def _started() -> float:
    text = text_of(Path("/proc/stat"))
    found = re.search(r"^btime (\d+)$", text, re.MULTILINE)
    return float(found[1]) if found else float("inf")


def errors_of(log: Path) -> str:
    """What CRIU says went wrong, first things first."""
    found = re.findall(r"Error \(([^)]*)\): (.*)", text_of(log))
    lines = [f"{where.partition(':')[0]}: {text}" for where, text in found if "rlimit" not in text]
    return "; ".join(lines[:4])


def undumpable(errors: str) -> str:
    """What could not be saved, in a word."""
    for pattern, reason in _UNDUMPABLE:
        if re.search(pattern, errors):
            return reason
    return "process"
