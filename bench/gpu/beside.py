"""What a GPU that is shared does to serving when its neighbour rests, computes, is stopped, dies.

Two processes of ``stepper``: one stands for serving, one for a rollout engine. Serving runs during
every stop, because that is when a stop matters. torch and nvidia-ml-py are all it needs; figures
that take NVML are left out where there is none. Each check returns (name, value, unit).
Next step: ``aims`` says what the figures are held against.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import math
import os
import queue
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bench.gpu import stepper
from bench.gpu.stepper import Step

Measured = list[tuple[str, float, str]]
_ROOT = Path(__file__).parents[2]
_STOPS = ("decode1", "decode32", "prefill", "prefill_32k")
_GRACE_SECONDS = 0.02
_ANSWER_SECONDS = 120.0
# NVML's list follows a new process by less than a second.
_LISTED_SECONDS = 2.0
_SETTLE_SECONDS = 0.1
# Freezes of a storm beside which a process starts: one takes seconds, so few.
_STARTS_EVERY = 20
_LOOK_SECONDS = 0.005
# After which a killed process's memory counts as lost.
_FREE_SECONDS = 30.0
_NEWCOMER = "import torch; torch.zeros(1, device='{}').sum().item()"
# A process that has nothing on the GPU but its context, until its input ends.
_CONTEXT = f"{_NEWCOMER}; print(0, flush=True); input()"


@dataclass(frozen=True)
class Scale:
    """How much is done.

    Attributes:
        device: ``cuda``, or ``cpu`` to rehearse.
        seconds: of each window.
        stops: of each kind and way.
        newcomer: what a process runs that starts beside a storm.
    """

    device: str = "cuda"
    seconds: float = 3.0
    stops: int = 12
    storm_seconds: float = 45.0
    newcomer: str = _NEWCOMER.format("cuda")

    @property
    def gpu(self) -> bool:
        """Figures mean something."""
        return self.device == "cuda"

    @classmethod
    def rehearsal(cls) -> Scale:
        """As little as tries every order once; ``footprint`` tries what a newcomer would run."""
        return cls("cpu", seconds=0.05, stops=1, storm_seconds=0.3, newcomer="pass")


class Forked:
    """A process of a rehearsal, with the face of ``Popen``.

    It has torch from its parent: the import takes many times longer than all that it rehearses. On
    a GPU each process is a Python of its own, since a context does not survive a fork.

    Args:
        work: what it does; its standard input and output are pipes to the parent.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        importlib.import_module("torch")
        orders, given = os.pipe()
        answered, answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become(work, orders, answers)
        os.close(orders)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(given, "w"), os.fdopen(answered)
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        """To it alone; nothing once it has been waited for."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float = math.inf) -> int:
        """Wait for its end, and return its exit status.

        Raises:
            TimeoutExpired: it goes on.
        """
        deadline = time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rehearsal's process", timeout)
            else:
                time.sleep(_LOOK_SECONDS)
        return self.returncode

    def communicate(self, text: str, timeout: float) -> None:
        """Write to it, and wait for its end."""
        with self.stdin, self.stdout:
            self.stdin.write(text)
            self.stdin.flush()
            self.wait(timeout)


def _become(work: Callable[[], object], orders: int, answers: int) -> NoReturn:
    """Turn this fork into the process."""
    status = 1
    try:
        os.dup2(orders, 0)
        os.dup2(answers, 1)
        os.closerange(3, max(int(fd.name) for fd in Path("/proc/self/fd").iterdir()) + 1)
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
        work()
        sys.stdout.flush()
        status = 0
    except Exception:  # noqa: BLE001  # whatever it is, this copy of the parent goes no further
        traceback.print_exc()
    finally:
        os._exit(status)


class Neighbour:
    """One ``stepper``."""

    def __init__(self, scale: Scale, kinds: Sequence[str]) -> None:
        flags = ["--device", scale.device, "--kinds", ",".join(kinds)]
        self._process: subprocess.Popen[str] | Forked
        if scale.gpu:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.gpu.stepper", *flags],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        else:
            self._process = Forked(lambda: stepper.main([*flags, "--tiny"]))
        if self._process.stdin is None or self._process.stdout is None:
            raise OSError("no pipe to the worker")
        self._orders, self._output = self._process.stdin, self._process.stdout
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read_all, daemon=True).start()
        self.hello = self._read()

    @property
    def pid(self) -> int:
        """Process number of the neighbour."""
        return self._process.pid

    def send(self, line: str) -> None:
        """An order without an answer."""
        self._orders.write(f"{line}\n")
        self._orders.flush()

    def ask(self, line: str) -> Any:  # noqa: ANN401  # plain values
        """An order with one.

        Raises:
            EOFError: the process has ended, or does not answer.
        """
        self.send(line)
        return self._read()

    def freeze(self) -> None:
        """Every thread of it, wherever it stands."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """As rung 5 does; returns when the process is gone."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """In order where it can."""
        with contextlib.suppress(OSError):
            self.thaw()
            self.send("quit")
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
        for stream in (self._orders, self._output):
            with contextlib.suppress(OSError):
                stream.close()

    def _read_all(self) -> None:
        with contextlib.suppress(ValueError):  # closed at its end
            for line in self._output:
                self._lines.put(line)
        self._lines.put("")

    def _read(self) -> Any:  # noqa: ANN401
        try:
            line = self._lines.get(timeout=_ANSWER_SECONDS)
        except queue.Empty as error:
            raise EOFError("a worker does not answer") from error
        if not line:
            raise EOFError("a worker has ended")
        return json.loads(line)


@contextlib.contextmanager
def neighbour(scale: Scale, *kinds: str) -> Iterator[Neighbour]:
    """A worker that ends with the block."""
    made = Neighbour(scale, kinds)
    try:
        yield made
    finally:
        made.end()


def quantile(values: Sequence[float], share: float) -> float:
    """The value that so many do not exceed; of at least one.

    The core's needs msgspec, which a bare GPU machine lacks.
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def lengths(steps: Sequence[Step]) -> list[float]:
    """Milliseconds on the GPU."""
    return [step[2] for step in steps]


def periods(steps: Sequence[Step]) -> list[float]:
    """Milliseconds from end to end, waiting included."""
    return [(b[1] - a[1]) / 1e6 for a, b in itertools.pairwise(steps)]


def _window(serving: Neighbour, kind: str, seconds: float) -> list[float]:
    serving.ask("take")
    serving.send(f"loop {kind}")
    time.sleep(seconds)
    serving.send("pause")
    found = periods(serving.ask("take"))
    return found or lengths(serving.ask(f"once {kind} 2"))


class Nvml:
    """NVML of the first GPU, or what stands in for it (``Rehearsal``)."""

    def __init__(self) -> None:
        self._n: Any = importlib.import_module("pynvml")
        self._n.nvmlInit()
        self._handle = self._n.nvmlDeviceGetHandleByIndex(0)

    def held(self, pid: int) -> int | None:
        """Bytes of a process; None = it is not on the GPU, or NVML does not say."""
        listed = self._n.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return next((one.usedGpuMemory for one in listed if one.pid == pid), None)

    def used(self) -> int:
        """Bytes of the GPU that are taken, by whomever."""
        return int(self._n.nvmlDeviceGetMemoryInfo(self._handle).used)

    def times(self, count: int) -> Measured:
        """What the guard asks, and how long it takes."""
        n, handle = self._n, self._handle
        uuid = n.nvmlDeviceGetUUID(handle)
        asks: dict[str, Callable[[], object]] = {
            "handle_by_uuid": lambda: n.nvmlDeviceGetHandleByUUID(uuid),
            "memory": lambda: n.nvmlDeviceGetMemoryInfo(handle),
            "processes": lambda: n.nvmlDeviceGetComputeRunningProcesses(handle),
            "mps_processes": lambda: n.nvmlDeviceGetMPSComputeRunningProcesses(handle),
            "power": lambda: n.nvmlDeviceGetPowerUsage(handle),
            "ecc": lambda: n.nvmlDeviceGetTotalEccErrors(handle, 1, 0),
        }
        found: Measured = []
        for name, ask in asks.items():
            took = []
            with contextlib.suppress(n.NVMLError):  # not every GPU answers everything
                for _ in range(count):
                    began = time.perf_counter()
                    ask()
                    took.append((time.perf_counter() - began) * 1e3)
                found += [
                    (f"nvml.{name}.p50", quantile(took, 0.5), "ms"),
                    (f"nvml.{name}.p99", quantile(took, 0.99), "ms"),
                ]
        return found


def nvml(scale: Scale) -> Measured:
    """How long the guard's questions take while the GPU computes."""
    with neighbour(scale, "decode32") as serving:
        serving.send("loop decode32")
        return Nvml().times(300 if scale.gpu else 20)


def footprint(scale: Scale) -> Measured:
    """What a process holds before its first tensor, and with two graphs beside torch's memory.

    Raises:
        OSError: NVML lists no process, and the GPU's use did not grow with it.
    """
    driver = Nvml()
    empty = driver.used()
    with contextlib.closing(_Bare(scale.device)) as bare:
        context = _held(driver, bare.pid, empty)
    with neighbour(scale, "decode1", "decode32") as rollout:
        held = _held(driver, rollout.pid, empty)
        beside = held - rollout.hello["reserved"]
    return [
        ("footprint.context", context / 2**30, "GiB"),
        ("footprint.held", held / 2**30, "GiB"),
        ("footprint.beside_torch", beside / 2**30, "GiB"),
    ]


class _Bare:
    """A process with a context and nothing else."""

    def __init__(self, device: str) -> None:
        code = _CONTEXT.format(device)
        self._process: subprocess.Popen[str] | Forked
        if device == "cuda":
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        else:
            self._process = Forked(lambda: exec(code))  # noqa: S102  # the line above
        if self._process.stdout is None or not self._process.stdout.readline():
            raise OSError(f"a process cannot use the GPU: it ended with {self._process.wait()}")

    @property
    def pid(self) -> int:
        """Process number of the process that holds memory."""
        return self._process.pid

    def close(self) -> None:
        """End it."""
        self._process.communicate("\n", timeout=_ANSWER_SECONDS)


def _held(driver: Nvml, pid: int, empty: int) -> int:
    """Bytes of a process: as listed, else what the GPU's use has grown by.

    A process in a container is listed under a number that it does not know.
    """
    deadline = time.monotonic() + _LISTED_SECONDS
    while time.monotonic() < deadline:
        held = driver.held(pid)
        if held is not None:
            time.sleep(_SETTLE_SECONDS)
            return driver.held(pid) or held
        time.sleep(_SETTLE_SECONDS)
    grown = driver.used() - empty
    if grown <= 0:
        raise OSError(f"NVML lists no process {pid}, and no more memory is in use than before it")
    return grown


def resident(scale: Scale) -> Measured:
    """Serving beside an engine that rests in its process, and beside one that is frozen."""
    with neighbour(scale, "decode32", "prefill2k") as serving, neighbour(scale, "decode1") as other:
        found: dict[str, float] = {}
        for state in ("parked", "frozen"):
            if state == "frozen":
                other.freeze()
            found[state] = statistics.median(_window(serving, "decode32", scale.seconds))
            other.thaw()
        return [
            ("resident.parked.decode32", found["parked"], "ms"),
            ("resident.frozen.decode32", found["frozen"], "ms"),
            ("resident.frozen_over_parked", found["frozen"] / found["parked"], "ratio"),
        ]


def _order(rollout: Neighbour, how: str) -> threading.Timer:
    """Stop it; the timer has to have ended before it is thawed."""
    if how == "freeze":
        rollout.freeze()
    else:
        rollout.send("pause")
    late = threading.Timer(_GRACE_SECONDS, rollout.freeze if how == "grace" else lambda: None)
    late.start()
    return late


def _stopped(
    scale: Scale, serving: Neighbour, rollout: Neighbour, kind: str, how: str
) -> tuple[list[float], list[float]]:
    """A request arrives while the rollout computes, which is stopped in the same moment."""
    alone = statistics.median(lengths(serving.ask("once prefill2k 3")))
    last, paid = [], []
    for _ in range(scale.stops):
        rollout.send(f"loop {kind}")
        time.sleep(random.uniform(0.05, 0.15))  # a moment, no secret
        rollout.ask("take")
        time.sleep(random.uniform(0.005, 0.05))
        ordered = time.monotonic_ns()
        late = _order(rollout, how)
        paid.append(serving.ask("once prefill2k 1")[0][2] - alone)
        time.sleep(0.25 if scale.gpu else 0.03)
        late.join()
        resumed = time.monotonic_ns()
        rollout.thaw()
        ends = [step[1] for step in rollout.ask("take") if step[1] < resumed]
        last.append(max(0, max(ends, default=ordered) - ordered) / 1e6)
        rollout.send("pause")
    return last, paid


def stop(scale: Scale) -> Measured:
    """From the order to the rollout's last kernel, and what the prefill that caused it pays."""
    found: Measured = []
    with neighbour(scale, "prefill2k") as serving, neighbour(scale, *_STOPS) as rollout:
        for kind in _STOPS:
            length = statistics.median(lengths(rollout.ask(f"once {kind} 3")))
            found.append((f"stop.{kind}.step", length, "ms"))
            for how in ("freeze", "pause", "grace"):
                last, paid = _stopped(scale, serving, rollout, kind, how)
                place = f"stop.{kind}.{how}"
                found += [
                    (f"{place}.last_kernel_p50", quantile(last, 0.5), "ms"),
                    (f"{place}.last_kernel_p99", quantile(last, 0.99), "ms"),
                    (f"{place}.serving_pays_p99", quantile(paid, 0.99), "ms"),
                ]
    return found


def corun(scale: Scale) -> Measured:
    """What each pays while both compute, in time slices."""
    found: Measured = []
    kinds = ("decode1", "decode32", "prefill")
    with neighbour(scale, "decode32") as serving, neighbour(scale, *kinds) as rollout:
        alone = statistics.median(_window(serving, "decode32", scale.seconds))
        for kind in kinds:
            by_itself = statistics.median(lengths(rollout.ask(f"once {kind} 5")))
            rollout.ask("take")
            rollout.send(f"loop {kind}")
            beside = statistics.median(_window(serving, "decode32", scale.seconds))
            rollout.send("pause")
            rollouts = statistics.median(periods(rollout.ask("take")) or [by_itself])
            found += [
                (f"corun.{kind}.serving_over_alone", beside / alone, "ratio"),
                (
                    f"corun.{kind}.rollout_over_alone",
                    rollouts / by_itself,
                    "ratio",
                ),
            ]
    return found


def _newcomer(scale: Scale) -> float:
    began = time.monotonic()
    command = [sys.executable, "-c", scale.newcomer]
    subprocess.run(command, check=True, timeout=_ANSWER_SECONDS)
    return time.monotonic() - began


def storm(scale: Scale) -> Measured:
    """Freezes of an engine that allocates and captures, while serving allocates too.

    In two ways: at any moment (``freeze``), and as ROSE does it (``boundary``): the permit first,
    and the freeze when the piece of work under way has ended.
    """
    found: Measured = []
    with neighbour(scale, "decode32") as serving, neighbour(scale, "decode1") as rollout:
        alone = _newcomer(scale)
        found.append(("storm.newcomer_alone", alone, "s"))
        serving.send("loop decode32")
        for how in ("freeze", "boundary"):
            found += _storm(scale, serving, rollout, how, alone)
        serving.send("pause")
        rollout.send("pause")
        worst = rollout.ask("worst")
    return found + [(f"storm.neighbour_{name}", took, "s") for name, took in worst.items()]


def _storm(
    scale: Scale, serving: Neighbour, rollout: Neighbour, how: str, alone: float
) -> Measured:
    """Half of the storm."""
    took: list[float] = []
    waits: list[float] = []
    starts: list[float] = []
    until = time.monotonic() + scale.storm_seconds / 2
    while not took or time.monotonic() < until:
        rollout.send("loop churn")
        time.sleep(random.uniform(0.001, 0.03))
        if how == "boundary":
            ordered = time.monotonic()
            rollout.send("pause")
            rollout.ask("rest")
            waits.append((time.monotonic() - ordered) * 1e3)
        rollout.freeze()
        hold, began = random.uniform(0.001, 0.2), time.monotonic()
        took.append(serving.ask("memory") * 1e3)
        if len(took) % _STARTS_EVERY == 1:
            starts.append(_newcomer(scale))
        time.sleep(max(0.0, hold - (time.monotonic() - began)))
        rollout.thaw()
    place = f"storm.{how}"
    boundaries: Measured = [(f"{place}.reached_max", max(waits), "ms")] if waits else []
    return [
        (f"{place}.freezes", len(took), "count"),
        (f"{place}.serving_memory_p50", quantile(took, 0.5), "ms"),
        (f"{place}.serving_memory_max", max(took), "ms"),
        (f"{place}.newcomer_over_alone", max(starts) / alone, "ratio"),
        *boundaries,
    ]


def _is_free(driver: Nvml, pid: int, full: int | None, reserved: int) -> bool:
    """The process's memory is back; by the GPU's use (``full`` before) where it is not listed."""
    if full is None:
        return driver.held(pid) is None
    return driver.used() <= full - reserved


def killed(scale: Scale) -> Measured:
    """An engine is killed while it is frozen with seconds of work queued."""
    with neighbour(scale, "decode32") as serving, neighbour(scale, "decode1") as rollout:
        rollout.ask("queue 4000")
        rollout.freeze()
        time.sleep(0.2 if scale.gpu else 0.01)
        serving.send("loop decode32")
        driver = Nvml()
        listed = driver.held(rollout.pid) is not None
        full = driver.used()
        began = time.monotonic()
        rollout.kill()
        gone = time.monotonic() - began
        while time.monotonic() - began < _FREE_SECONDS and not _is_free(
            driver, rollout.pid, full if not listed else None, rollout.hello["reserved"]
        ):
            time.sleep(0.005)
        free = time.monotonic() - began
        time.sleep(scale.seconds / 3)
        serving.send("pause")
        steps = periods(serving.ask("take")) or [0.0]
    return [
        ("killed.process_gone", gone, "s"),
        ("killed.memory_free", free, "s"),
        ("killed.serving_worst_step", max(steps), "ms"),
    ]
