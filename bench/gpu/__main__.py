"""``make gpu-check``: what the first GPU says about the three promises, in two runs.

``suite`` has the checks of the two runs (``--run 1``, ``--run 2``), each shorter than ten minutes:
NVML's cost, footprint, resident, stop, storm, killed; corun, commit, digest, saver. ``aims`` holds
their figures against the promises and says what a missed aim refutes. The result lies under
``bench/results/GPU/DATE-RUN.json``, figures as a list of name, value, unit, aim, met. It needs
torch and nvidia-ml-py; ``make gpu-pack`` packs them for a machine without a network.

``--extra`` runs the longer checks below, without a bound, and keeps ``DATE-extra.json``:

| check | says |
|---|---|
| time slicing | serving's step beside rollouts of growing batches |
| mps | the same beside shares of 20, 30 and 50 %, with the multiprocessors that each sees |
| priority | the same beside the largest share, at serving's priority and below it |
| kill | what becomes of serving when a client is ended in order, and when it is only killed |
| fault | what becomes of serving when a client crashes on the GPU, and who can connect afterwards |
| memory | seconds to give memory back and to take it again, and what NVML says came free |
| weights | time to scatter changes into and to attest states of 8 and 32 billion weights |
| publishing | a trainer's stall when 8 billion weights are compared where they lie, and memory |
| staging | blocks to the device and decoded there, one after the other and side by side |
| commit_pause | pause of a real SGLang at a commit, where it is installed |
| elastic | kvcached's pool, where installed: from a lower limit to free memory, 200 cycles |

Without a GPU it ends with an error. ``--rehearse`` tries every check on the stand-ins and keeps
nothing.

The GPU's settings are left as they are. Compute mode stays what it is, so a client that missed the
daemon shows as one that is not listed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.gpu import aims, checks, suite
from bench.gpu.checks import Plan
from bench.gpu.processes import Daemon, daemon
from rose_agent.devices.driver import DeviceDriver, Gpu
from rose_agent.devices.mps import asking
from rose_agent.devices.mps.control import PROGRAM
from rose_agent.devices.nvml import NvmlDriver
from rose_agent.errors import DeviceError, MpsError, NoDevices
from rose_dev.errors import DevelopmentError
from rose_dev.gpu.library import environment, preloaded
from rose_dev.gpu.state import GpuProcess, State, StateGpu

# Several times while a check waits for memory to come free; a look costs a fraction of that.
_LOOK_SECONDS = 0.05

RESULTS = Path(__file__).parents[1] / "results"


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
    """Keeps a rehearsal's list of the processes on its GPU; use as a context.

    Every check asks NVML who holds how much memory. Without a GPU the library of ``rose_dev.gpu``
    answers: whatever this process has started counts as being on the GPU, with its resident
    memory. So a check runs the same lines here and there, and what it says of a process is true of
    that process.

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


def machine(driver: DeviceDriver, gpu: Gpu, library: Any) -> dict[str, Any]:  # noqa: ANN401
    """What the figures belong to."""
    return {
        "gpu": gpu.name,
        "memory_bytes": gpu.memory_bytes,
        "multiprocessors": driver.multiprocessors(gpu.uuid),
        "compute_mode": driver.compute_mode(gpu.uuid),
        "driver": _call(library, "nvmlSystemGetDriverVersion"),
        "cuda": _call(library, "nvmlSystemGetCudaDriverVersion"),
        "torch": _torch(),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def _call(library: Any, name: str) -> str:  # noqa: ANN401  # pynvml, or its stand-in
    question = getattr(library, name, None)
    answer = question() if question is not None else "unknown"
    return answer.decode() if isinstance(answer, bytes) else str(answer)


def _torch() -> str:
    try:
        return str(importlib.import_module("torch").__version__)
    except ModuleNotFoundError:
        return "none"


def run(plan: Plan, driver: DeviceDriver, gpu: Gpu) -> dict[str, Any]:
    """Every check; one that cannot run says why."""

    def used() -> int | None:
        return driver.memory(gpu.uuid).used_bytes

    parts: Mapping[str, Callable[[], Any]] = {
        "alone_ms": lambda: checks.alone(plan),
        "time_slicing_ms": lambda: checks.time_slicing(plan),
        "memory": lambda: checks.memory(plan, used),
        "elastic": lambda: _elastic(plan),
        "weights": lambda: _of_weights(plan, "device"),
        "publishing": lambda: _of_weights(plan, "publishing"),
        "staging": lambda: _of_weights(plan, "staging"),
        "commit_pause": lambda: _commit_pause(plan),
        "mps": lambda: _with_mps(plan, driver, gpu),
    }
    found = {}
    for name, part in parts.items():
        try:
            found[name] = part()
        except (DeviceError, EOFError, OSError) as error:
            found[name] = {"not_run": f"{type(error).__name__}: {error}"}
        sys.stdout.write(f"{name}: {json.dumps(found[name])}\n")
        sys.stdout.flush()
    return found


def _with_mps(plan: Plan, driver: DeviceDriver, gpu: Gpu) -> dict[str, Any]:
    program = asking.PROGRAM if plan.fake else (PROGRAM,)
    if shutil.which(program[0]) is None:
        raise MpsError(f"there is no {program[0]}")

    def beside(check: Callable[[Daemon], Any]) -> Any:  # noqa: ANN401  # any result
        with daemon(program) as made:
            return check(made)

    whole = driver.multiprocessors(gpu.uuid)
    return {
        "shares_ms": beside(lambda made: checks.mps(plan, made, whole)),
        "priority_ms": beside(lambda made: checks.priority(plan, made)),
        "kills": beside(lambda made: checks.kills(plan, made)),
        "fault": beside(lambda made: checks.fault(plan, made)),
    }


def _elastic(plan: Plan) -> dict[str, Any]:
    if plan.fake:
        return checks.elastic(plan, "rose_engines.fake.kvcached")
    if importlib.util.find_spec("kvcached") is None:
        raise OSError("kvcached is not installed")
    return checks.elastic(plan, "bench.gpu.kvcached_pool")


def _of_weights(plan: Plan, part: str) -> dict[str, Any]:
    module = _module(part)
    if plan.fake:
        return {"tiny": module.measure(1 << 18, "cpu")}
    return {name: module.measure(size, "cuda") for name, size in module.SIZES.items()}


def _commit_pause(plan: Plan) -> dict[str, Any]:
    pause = _module("pause")
    if plan.fake:
        return {"tiny": pause.stand_in()}
    return {size: pause.real(size) for size in ("0.5B", "1.5B")}


def _module(name: str) -> Any:  # noqa: ANN401  # a module
    try:
        return importlib.import_module(f"bench.weights.{name}")
    except ModuleNotFoundError as error:
        raise OSError(f"the weight plane's own modules are not installed: {error}") from error


def write(result: Mapping[str, Any], results: Path) -> Path:
    """``RESULTS/GPU/DATE-RUN.json``; the GPU by its model, as ``h200``."""
    name = (
        re.sub(r"[^a-z0-9]+", "-", str(result["machine"]["gpu"]).lower())
        .strip("-")
        .removeprefix("nvidia-")
    )
    folder = results / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result['date']}-{result['run']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def _devices() -> tuple[DeviceDriver | None, str]:
    """The driver of a GPU, or why there is none."""
    try:
        driver = NvmlDriver.open()
        return (driver, "") if driver.gpus() else (None, "the driver lists no GPU")
    except (NoDevices, DeviceError) as error:
        return None, str(error)


def main(argv: list[str]) -> int:
    """Run.

    Returns:
        0 done, 1 there is no GPU.
    """
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each window")
    parser.add_argument(
        *("--rehearse", "--tiny"), action="store_true", help="small, on the CPU; keeps nothing"
    )
    parser.add_argument("--run", type=int, choices=[1, 2], help="one of the two; both by default")
    parser.add_argument("--only", default="", help=f"some of {', '.join(suite.CHECKS)}")
    parser.add_argument("--limit", type=float, default=suite.BOUND_SECONDS, help="of a run, s")
    parser.add_argument("--aims", action="store_true", help="print what would refute what, and end")
    parser.add_argument("--extra", action="store_true", help="the longer checks instead")
    options = parser.parse_args(argv)
    try:
        suite.chosen(options.only, options.run)
    except ValueError as error:
        parser.error(str(error))
    names = suite.chosen(options.only, options.run)
    if options.aims:
        sys.stdout.write("".join(f"{row}\n" for row in aims.table_of_aims(names)))
        return 0
    if options.rehearse:
        return _rehearse(options)
    driver, why = _devices()
    if driver is None:
        sys.stderr.write(
            f"gpu-check needs an NVIDIA GPU with its driver, torch and nvidia-ml-py: {why}. "
            "`make gpu-check ARGS=--rehearse` tries every check on stand-ins.\n"
        )
        return 1
    os.environ["CUDA_VISIBLE_DEVICES"] = driver.gpus()[0].uuid  # of every process
    return _measure(options, driver, rehearse=False)


def _rehearse(options: argparse.Namespace) -> int:
    """Everything on the stand-ins, also where there is a GPU."""
    sys.stdout.write("a rehearsal: checks and report on the CPU, NVML by a stand-in\n")
    try:
        with gpu_that_is_not_there() as driver:
            return _measure(options, driver, rehearse=True)
    except DevelopmentError as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _measure(options: argparse.Namespace, driver: DeviceDriver, *, rehearse: bool) -> int:
    """The suite, or the longer checks; returns the exit code."""
    gpu = driver.gpus()[0]
    about = {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
        "machine": machine(driver, gpu, importlib.import_module("pynvml")),
    }
    if not options.extra:
        runs = [options.run] if options.run else ["only"] if options.only else [1, 2]
        results = [_judge(options, run, about, rehearse=rehearse) for run in runs]
        return _keep(results, options.results, rehearse=rehearse)
    plan = Plan(fake=rehearse, seconds=options.seconds)
    if rehearse:
        plan = replace(plan, seconds=min(0.1, options.seconds), cycles=2, lends=2)
    result = {**about, "run": "extra", "checks": run(plan, driver, gpu)}
    return _keep([result], options.results, rehearse=rehearse)


def _judge(
    options: argparse.Namespace, run: int | str, about: Mapping[str, Any], *, rehearse: bool
) -> dict[str, Any]:
    """One run of the suite."""
    names = suite.chosen(options.only, run if isinstance(run, int) else None)

    limit = options.limit * (suite.REHEARSAL_PATIENCE if rehearse else 1)
    way = suite.rehearsed(names) if rehearse else contextlib.nullcontext(suite.apart)
    with way as carry_out:

        def measure(check: suite.Check) -> list[tuple[str, float, str]]:
            sys.stdout.write(f"{check.name} (at most {check.budget_s:.0f} s)\n")
            sys.stdout.flush()
            return carry_out(check)

        outcome = suite.carry_out(names, measure, limit)
    figures = aims.judged(outcome.measured)
    verdict_of = aims.verdicts(figures, names)
    rows = [
        *aims.lines(figures, verdict_of),
        *(f"{k}: not run: {v}" for k, v in outcome.not_run.items()),
    ]
    sys.stdout.write("".join(f"{row}\n" for row in rows))
    return {
        **about,
        "run": run,
        "figures": [figure.as_dict() for figure in figures],
        "verdicts": verdict_of,
        "settings": [dataclasses.asdict(one) for one in aims.settings(figures)],
        "not_run": outcome.not_run,
        "seconds": outcome.seconds,
    }


def _keep(results: list[dict[str, Any]], place: Path, *, rehearse: bool) -> int:
    """Write what a GPU has said; 1 when a check of a run did not run."""
    if rehearse:
        with tempfile.TemporaryDirectory() as folder:
            for result in results:
                write(result, Path(folder))
        sys.stdout.write("a rehearsal: no figure of it means anything, none is kept\n")
    else:
        for result in results:
            sys.stdout.write(f"written to {write(result, place)}\n")
    return 1 if any(result.get("not_run") for result in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
