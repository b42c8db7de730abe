"""A GPU for rehearsals: NVML's C ABI behind the real pynvml, on which this process's workers are.

Every check asks NVML who holds how much memory. Without a GPU the library of ``rose_dev.gpu``
answers, and this module keeps its list of processes: whatever this process has started counts as
being on the GPU, with its resident memory. So a check runs the same lines here and there, and what
it says of a process is true of that process. Next step: ``beside.Nvml`` asks.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from rose_agent.devices.nvml import NvmlDriver
from rose_dev.gpu.library import environment, preloaded
from rose_dev.gpu.state import GpuProcess, State, StateGpu

# Several times while a check waits for memory to come free; a look costs a fraction of that.
_LOOK_SECONDS = 0.02


def descendants(pid: int, proc: Path = Path("/proc")) -> Iterator[int]:
    """Processes that a process has started, and what those have; without itself."""
    for listed in proc.glob(f"{pid}/task/*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for child in map(int, listed.read_text().split()):
                yield child
                yield from descendants(child, proc)


def resident_bytes(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Memory of a process; None = it is gone, or has ended and waits to be reaped."""
    try:
        pages = int((proc / str(pid) / "statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") or None


class Accountant(threading.Thread):
    """Keeps a GPU's list of processes true; use as a context.

    Args:
        gpu: whose list it is.
        pid: whose descendants are on it.
    """

    def __init__(self, gpu: StateGpu, pid: int) -> None:
        super().__init__(daemon=True)
        self._gpu, self._pid = gpu, pid
        self._idle = int(gpu.raw.memory_used)
        self._ended = threading.Event()

    def look(self) -> None:
        """Write who is there now, and what all of them hold."""
        found = [(pid, resident_bytes(pid)) for pid in descendants(self._pid)]
        there = [GpuProcess(pid, held) for pid, held in found if held is not None]
        self._gpu.set_processes(there)
        self._gpu.raw.memory_used = self._idle + sum(one.used_bytes or 0 for one in there)

    def run(self) -> None:
        """Until the context ends."""
        while not self._ended.wait(_LOOK_SECONDS):
            self.look()

    def __enter__(self) -> Accountant:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


@contextlib.contextmanager
def gpu_that_is_not_there() -> Iterator[NvmlDriver]:
    """NVML of this process and of all that it starts: one H100 with the workers on it.

    Raises:
        DevelopmentError: its library cannot be built here (no compiler); says why.
    """
    with contextlib.ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "nvml.state"
        state = stack.enter_context(State.create(path, "h100x2"))
        stack.enter_context(preloaded(path))
        stack.enter_context(_inherited(environment(path)))
        stack.enter_context(Accountant(state.gpus[0], os.getpid()))
        yield NvmlDriver.open()


@contextlib.contextmanager
def _inherited(given: dict[str, str]) -> Iterator[None]:
    """For processes that are started from here on."""
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
