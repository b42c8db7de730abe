"""What a sandbox is at one moment, so that two moments can be compared: the net effect of a turn.

| of | compared | so that |
|---|---|---|
| files | name, inode, mode, owner, size and times of all in the upper layer | a write shows |
| folders | without size and times, unless a call could set them | what came and went does not |
| processes | which live on, by process id and start | a job left behind shows |
| each of them | folder, descriptors, signals, owners, limits, maps, pipes | |
| its memory, if it ran | digest of its private pages | an interpreter's variable shows |
| a session's shell | what it says of itself (``inside``), not its memory | ``ls`` does not show |
| memory file systems, sockets | listing; queues and states | |

The first process is ROSE's own and no agent's state. A shared writable map can change without any
trace here, so whoever has one makes the moment ``unsure``.
Next step: ``bpf`` compares moments.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import numpy as np
import xxhash

from rose_sandbox.runtimes import kernel
from rose_sandbox.runtimes.inside import FOLDER
from rose_sandbox.runtimes.runtime import Facts

PAGE = os.sysconf("SC_PAGE_SIZE")
MEMORY_BYTES = 1 << 30
"""Of one process that a digest reads: some 0.3 s. A larger one that ran counts as changed."""
_CHUNK = 1 << 20
_VOLATILE_STATUS = re.compile(
    r"^(Name|Umask|State|Tgid|Pid|PPid|TracerPid|Uid|Gid|FDSize|Groups|NSpid|Threads|SigQ|SigPnd"
    r"|ShdPnd|SigBlk|SigIgn|SigCgt|Cap\w+|NoNewPrivs|Seccomp\w*):.*$",
    re.MULTILINE,
)
_TIME_WAIT = "06"
_STANDING = (2, 3, 16, 37, 38)
"""Of a thread's ``stat`` behind its name: group, session, niceness, priority, policy."""
# Of a shell: its runner's, and those that change with every command. Bash quotes ends of lines in
# values, so each stands in one line.
_OWN_VARIABLE = re.compile(
    r"declare -\S+ (_rose_\w+|_|BASHPID|BASH_\w*(ARG[CV]|LINENO|SOURCE|COMMAND)|EPOCH\w+|FUNCNAME"
    r"|LINENO|PIPESTATUS|S?RANDOM|SECONDS)(=|$)"
)

Entry = tuple[int, ...]


@dataclass(frozen=True)
class Process:
    """One that lives on.

    Attributes:
        kernel: what the kernel shows of it.
        ran: how long and how often each of its threads had a processor.
        memory: digest of its pages; None: not taken yet, or too large.
        shell: what a session's shell says of itself; None: it is none.
    """

    kernel: str
    ran: str
    memory: str | None
    shell: str | None


@dataclass(frozen=True)
class Moment:
    """A sandbox at one moment.

    Attributes:
        files: below the upper layer, by name.
        shared: sockets and memory file systems.
        processes: by (process id, start).
        unsure: what can change without a trace.
    """

    files: dict[str, Entry]
    shared: str
    processes: dict[tuple[int, int], Process]
    unsure: tuple[str, ...] = field(default=())


def look(facts: Facts, before: Moment | None) -> Moment:
    """The present moment.

    Args:
        facts: of a sandbox that runs.
        before: a moment whose digests stand for processes that have not run since.

    Raises:
        OSError: it ended meanwhile.
    """
    if facts.upper is None or facts.init is None:
        raise OSError("a suspended sandbox has no moment")
    unsure: set[str] = set()
    processes: dict[tuple[int, int], Process] = {}
    for pid in facts.pids:
        if pid == facts.init:
            continue
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile: not there
            key = (pid, _started(pid))
            known = before.processes.get(key) if before is not None else None
            process = _process(pid, facts.init, known, unsure)
            if process is not None:
                processes[key] = process
    return Moment(
        dict(_listing(facts.upper, facts.lower)),
        _shared(facts.init),
        processes,
        tuple(sorted(unsure)),
    )


def files_differ(one: Moment, other: Moment, *, strict: bool) -> bool:
    """Whether files differ; ``strict`` compares folders' times too."""
    return _compared(one, strict=strict) != _compared(other, strict=strict)


def _compared(moment: Moment, *, strict: bool) -> dict[str, Entry]:
    return {
        name: _comparable(entry, strict=strict)
        for name, entry in moment.files.items()
        if strict or not entry[-1]
    }


def processes_differ(one: Moment, other: Moment) -> frozenset[str]:
    """In what processes or what they share differ; memory that was not read counts as so."""
    found = set()
    if one.shared != other.shared:
        found.add("sockets or files in memory")
    if one.processes.keys() != other.processes.keys():
        found.add("which processes there are")
    for key in one.processes.keys() & other.processes.keys():
        found |= _differs(one.processes[key], other.processes[key])
    return frozenset(found)


def _differs(one: Process, other: Process) -> set[str]:
    found = {"what the kernel shows of one"} if one.kernel != other.kernel else set()
    if one.shell is not None or other.shell is not None:
        if one.shell != other.shell:
            found.add("what a shell knows")
    elif one.ran != other.ran and (one.memory is None or one.memory != other.memory):
        found.add("memory of one")
    return found


def _comparable(entry: Entry, *, strict: bool) -> Entry:
    return entry if strict or not stat.S_ISDIR(entry[1]) else entry[:5]


def _listing(folder: Path, lower: Path | None = None) -> Iterator[tuple[str, Entry]]:
    waiting = [str(folder)]
    cut = len(waiting[0])
    while waiting:
        here = waiting.pop()
        facts = os.lstat(here)
        name = here[cut:]
        yield name, (*_entry(facts), lower is not None and _is_the_images(here, name, lower, facts))
        with os.scandir(here) as entries:
            for entry in entries:
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(facts.st_mode):
                    waiting.append(entry.path)
                else:
                    yield entry.path[cut:], (*_entry(facts), False)


def _is_the_images(path: str, name: str, lower: Path, facts: os.stat_result) -> bool:
    """Whether a folder is only a copy of the image's, which a file that came and went leaves."""
    try:
        image = os.lstat(f"{lower}{name}")
    except OSError:
        return False
    opaque = any(attribute.endswith("overlay.opaque") for attribute in os.listxattr(path))
    same = (image.st_mode, image.st_uid, image.st_gid)
    return same == (facts.st_mode, facts.st_uid, facts.st_gid) and not opaque


def _entry(facts: os.stat_result) -> Entry:
    # What a folder keeps of its content (size, links, times) stands behind.
    return (
        facts.st_ino,
        facts.st_mode,
        facts.st_uid,
        facts.st_gid,
        facts.st_rdev,
        facts.st_nlink,
        facts.st_size,
        facts.st_mtime_ns,
        facts.st_ctime_ns,
    )


def _started(pid: int) -> int:
    return int(_text(f"/proc/{pid}/stat").rpartition(") ")[2].split()[19])


def _text(path: str) -> str:
    with open(path, "rb") as file:  # noqa: PTH123 - a path object costs more than the call
        return file.read().decode(errors="replace")


def _process(pid: int, init: int, known: Process | None, unsure: set[str]) -> Process | None:
    if _text(f"/proc/{pid}/stat").rpartition(") ")[2].startswith("Z"):
        return None  # its parent will be told of its end whenever it asks: nothing is lost with it
    maps = _text(f"/proc/{pid}/maps")
    if re.search(r"^\S+ .w.s ", maps, re.MULTILINE):
        unsure.add("shared writable map")
    shell = shell_state(pid, init)
    ran = " ".join(
        _text(f"/proc/{pid}/task/{thread}/schedstat")
        for thread in sorted(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 - as above
    )
    kernel = _kernel(pid, maps if shell is None else "", unsure, at_rest=shell is None)
    memory = None
    if shell is None:
        rests = known is not None and known.ran == ran and known.memory is not None
        memory = known.memory if rests and known is not None else _memory(pid, maps)
    return Process(kernel, ran, memory, shell)


def _kernel(pid: int, maps: str, unsure: set[str], *, at_rest: bool) -> str:
    digest = xxhash.xxh3_128()
    base = f"/proc/{pid}"
    status = _text(f"{base}/status")
    lines = [found.group() for found in _VOLATILE_STATUS.finditer(status)]
    # A state of running or sleeping is where it happens to be; a stopped one is a fact.
    _add(digest, "\n".join(line for line in lines if not line.startswith("State")))
    _add(digest, "T" if re.search(r"^State:\s+[Tt]", status, re.MULTILINE) else "R")
    for link in ("cwd", "root", "exe"):
        with suppress(OSError):
            _add(digest, os.readlink(f"{base}/{link}"))  # noqa: PTH115 - as above
    _add(digest, _text(f"{base}/limits"))
    for thread in sorted(os.listdir(f"{base}/task")):  # noqa: PTH208 - as above
        with suppress(OSError):
            fields = _text(f"{base}/task/{thread}/stat").rpartition(") ")[2].split()
            _add(digest, " ".join(fields[at] for at in _STANDING))
    _add(digest, maps)
    if at_rest:
        for thread in sorted(os.listdir(f"{base}/task")):  # noqa: PTH208 - as above
            with suppress(OSError):
                _add(digest, _text(f"{base}/task/{thread}/syscall"))
    with suppress(OSError):
        _add(digest, _text(f"{base}/timers"))
    for name in sorted(os.listdir(f"{base}/fd"), key=int):  # noqa: PTH208 - as above
        with suppress(FileNotFoundError):
            _add(digest, _descriptor(base, name, unsure))
    return digest.hexdigest()


def _add(digest: xxhash.xxh3_128, text: str) -> None:
    digest.update(text.encode(errors="surrogateescape") + b"\0")


def _add_content(digest: xxhash.xxh3_128, root: int, path: str) -> None:
    """What a file in memory holds, not its holes: a tenant's file may say that it is endless."""
    descriptor = kernel.open_in(root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return
        end = 0
        with suppress(OSError):  # no data behind the last hole
            while True:
                begin = file.seek(end, os.SEEK_DATA)
                end = file.seek(begin, os.SEEK_HOLE)
                digest.update(struct.pack("=QQ", begin, end))
                for at in range(begin, end, _CHUNK):
                    digest.update(os.pread(descriptor, min(_CHUNK, end - at), at))


def _descriptor(base: str, name: str, unsure: set[str]) -> str:
    path = f"{base}/fd/{name}"
    target = os.readlink(path)  # noqa: PTH115 - as above
    facts = os.stat(path)  # noqa: PTH116 - as above
    if "io_uring" in target:
        unsure.add("io_uring")
    held = ""
    if stat.S_ISFIFO(facts.st_mode):
        held = str(_queued(path))
    elif stat.S_ISREG(facts.st_mode):
        held = f"{facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns}"
    own = target.startswith(f"{FOLDER}/")
    info = "" if own else _text(f"{base}/fdinfo/{name}")
    return f"{name} {'' if own else target} {'' if own else held} {info}"


def _queued(path: str) -> int | None:
    """Bytes in a pipe; None where it cannot be asked, which both moments then say."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        answer = fcntl.ioctl(descriptor, termios.FIONREAD, struct.pack("i", 0))
        return int(struct.unpack("i", answer)[0])
    finally:
        os.close(descriptor)


def _memory(pid: int, maps: str) -> str | None:
    """Digest of the private pages that were written, with where they lie."""
    digest = xxhash.xxh3_128()
    total = 0
    with (
        open(f"/proc/{pid}/mem", "rb", buffering=0) as memory,  # noqa: PTH123 - as above
        open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap,  # noqa: PTH123 - as above
    ):
        for line in maps.splitlines():
            place, rights = line.split(maxsplit=2)[:2]
            if rights[3] != "p" or line.endswith(("[vvar]", "[vsyscall]", "[vvar_vclock]")):
                continue
            begin, end = (int(part, 16) for part in place.split("-"))
            pagemap.seek(begin // PAGE * 8)
            entries = pagemap.read((end - begin) // PAGE * 8)
            for first, count in _own_runs(entries):
                total += count * PAGE
                if total > MEMORY_BYTES:
                    return None
                at = begin + first * PAGE
                digest.update(struct.pack("=QQ", at, count))
                memory.seek(at)
                if not _add_run(digest, memory, count * PAGE):
                    return None
    return digest.hexdigest()


def _add_run(digest: xxhash.xxh3_128, memory: FileIO, left: int) -> bool:
    """Add so many bytes from where the file stands; False: it has fewer."""
    while left:
        data = memory.read(min(left, _CHUNK))
        if not data:
            return False
        digest.update(data)
        left -= len(data)
    return True


def _own_runs(entries: bytes) -> Iterator[tuple[int, int]]:
    """Runs of pages that are present or swapped and no file's: (first, count)."""
    fields = np.frombuffer(entries, np.uint64)
    own = np.zeros(len(fields) + 2, np.int8)
    own[1:-1] = (fields >> np.uint64(62) != 0) & (fields >> np.uint64(61) & np.uint64(1) == 0)
    edges = np.flatnonzero(np.diff(own)).tolist()
    yield from ((begin, end - begin) for begin, end in zip(edges[::2], edges[1::2], strict=True))


def shell_state(pid: int, init: int) -> str | None:
    """What a session's shell said of itself last; None: it is no session's shell."""
    fields = _text(f"/proc/{pid}/cmdline").split("\0")
    if len(fields) < 6 or fields[:3] != ["bash", "--norc", "-c"] or fields[4] != "rose-session":
        return None
    if not re.fullmatch(r"[\w-]+", fields[5]):
        return None
    with suppress(OSError):
        state = _inside(init, f"{FOLDER}/w.{fields[5]}")
        return "\n".join(line for line in state.splitlines() if not _OWN_VARIABLE.match(line))
    return None


def _inside(init: int, path: str) -> str:
    with (
        _root(init) as root,
        os.fdopen(kernel.open_in(root, path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file,
    ):
        return file.read().decode(errors="replace")


@contextmanager
def _root(init: int) -> Iterator[int]:
    root = os.open(f"/proc/{init}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield root
    finally:
        os.close(root)


def _sockets(init: int, name: str) -> list[str]:
    """Lines of a table of sockets.

    The kernel walks through all that the machine has room for, which takes milliseconds a table, so
    it is asked first whether the sandbox has any. It counts none that only waits out its end
    (``_TIME_WAIT``), which is of no interest here.
    """
    counts = _text(f"/proc/{init}/net/sockstat{'6' if name.endswith('6') else ''}")
    if re.search(rf"^{name.upper()}: inuse 0\b", counts, re.MULTILINE):
        return []
    return _text(f"/proc/{init}/net/{name}").splitlines()[1:]


def _shared(init: int) -> str:
    """Digest of sockets, and of files in memory."""
    digest = xxhash.xxh3_128()
    for line in _socket_lines(init):
        _add(digest, line)
    for folder in ("/run", "/dev"):
        with suppress(OSError):  # a tenant that puts a link there only harms its own checkpoints
            _add_memory_files(digest, init, folder)
    return digest.hexdigest()


def _socket_lines(init: int) -> Iterator[str]:
    """Sockets of a sandbox, without what changes while nothing is done with them."""
    for name in ("tcp", "tcp6", "udp", "udp6"):
        with suppress(OSError):
            for line in _sockets(init, name):
                fields = line.split()
                if fields[3] != _TIME_WAIT:
                    yield f"{name} {fields[1:5]} {fields[9]}"
    with suppress(OSError):
        for line in sorted(_text(f"/proc/{init}/net/unix").splitlines()[1:]):
            yield " ".join(line.split()[1:])


def _add_memory_files(digest: xxhash.xxh3_128, init: int, folder: str) -> None:
    """Add what lies below a folder that is in memory.

    Raises:
        OSError: part of it cannot be read; what came before it is added.
    """
    for where, entry in sorted(_listing(Path(f"/proc/{init}/root{folder}"))):
        # Devices are the host's own, and terminals are of processes.
        theirs = folder == "/dev" and stat.S_ISCHR(entry[1])
        if theirs or f"{folder}{where}".startswith(FOLDER):
            continue
        _add(digest, f"{folder}{where} {_comparable(entry, strict=False)}")
        if stat.S_ISREG(entry[1]):
            # A write through a map leaves no time on a file in memory.
            with suppress(FileNotFoundError), _root(init) as root:
                _add_content(digest, root, f"{folder}{where}")
