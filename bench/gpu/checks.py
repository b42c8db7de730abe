"""The checks themselves; each returns plain values that go into the result as they are."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.gpu.processes import Daemon, Worker, pool, worker
from rose_agent.devices.elastic import KvcachedSegment
from rose_agent.errors import MpsError
from rose_core.devices.mps import BELOW_NORMAL, client_environment, expected_multiprocessors

SHARES = (20, 30, 50)
BATCHES = (1, 8, 64)
NORMAL = 0
_GIB = 1 << 30
_LOST_SECONDS = 3.0


@dataclass(frozen=True)
class Plan:
    """How long and how often.

    Attributes:
        seconds: of each window of steps.
        cycles: of taking memory and giving it back.
        gib: memory of such a cycle.
        lends: cycles of lending KV memory and taking it back.
    """

    fake: bool
    seconds: float = 3.0
    cycles: int = 5
    gib: int = 8
    lends: int = 200


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Count, median, 99th percentile and largest."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0}
    high = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {
        "count": len(ordered),
        "p50": statistics.median(ordered),
        "p99": high,
        "max": ordered[-1],
    }


def step_ms(steps: Sequence[tuple[int, int]]) -> dict[str, float | int]:
    """Lengths of steps as they followed each other, waiting included, milliseconds."""
    ends = [end for end, _ in steps]
    return spread([(after - before) / 1e6 for before, after in itertools.pairwise(ends)])


def alone(plan: Plan) -> dict[str, float | int]:
    """Serving's steps with nobody beside it."""
    with worker(fake=plan.fake) as serving:
        serving.send("run")
        return step_ms(serving.steps(plan.seconds))


def time_slicing(plan: Plan) -> list[dict[str, Any]]:
    """Serving's steps beside rollouts of growing batches that take turns with it."""
    found = []
    with worker(fake=plan.fake) as serving:
        serving.send("run")
        for batch in BATCHES:
            with worker(fake=plan.fake, batch=batch) as rollout:
                rollout.send("run")
                steps = serving.steps(plan.seconds)
                made = len(rollout.ask("take"))
                found.append(
                    {"rollout_batch": batch, "serving": step_ms(steps), "rollout_steps": made}
                )
    return found


def mps(plan: Plan, daemon: Daemon, whole: int | None) -> list[dict[str, Any]]:
    """Serving's steps beside rollouts of several shares, and whether the shares were given."""
    found = []
    with worker(fake=plan.fake, environment=daemon.environment) as serving:
        serving.send("run")
        for share in SHARES:
            environment = client_environment(str(daemon.pipes.pipe), str(daemon.pipes.log), share)
            with worker(fake=plan.fake, environment=environment) as rollout:
                rollout.send("run")
                steps = serving.steps(plan.seconds)
                seen = rollout.seen["multiprocessors"]
                found.append(
                    {
                        "share_percent": share,
                        "multiprocessors": seen,
                        "at_most": expected_multiprocessors(whole, share) if whole else None,
                        "serving_sees": serving.seen["multiprocessors"],
                        "serving": step_ms(steps),
                        "rollout_steps": len(rollout.ask("take")),
                        "listed": _listed(daemon, rollout.process.pid),
                    }
                )
    return found


def priority(plan: Plan, daemon: Daemon) -> list[dict[str, Any]]:
    """Serving's steps beside a rollout of the largest share, at serving's priority and below it."""
    found = []
    with worker(fake=plan.fake, environment=daemon.environment) as serving:
        serving.send("run")
        for level in (NORMAL, BELOW_NORMAL):
            share = client_environment(str(daemon.pipes.pipe), str(daemon.pipes.log), SHARES[-1])
            given = {**share, "CUDA_MPS_CLIENT_PRIORITY": str(level)}
            with worker(fake=plan.fake, batch=64, environment=given) as rollout:
                rollout.send("run")
                steps = serving.steps(plan.seconds)
                made = len(rollout.ask("take"))
                found.append({"priority": level, "serving": step_ms(steps), "rollout_steps": made})
    return found


def fault(plan: Plan, daemon: Daemon) -> dict[str, Any]:
    """A client crashes on the GPU: what serving has of it, and who can connect afterwards."""
    with worker(fake=plan.fake, environment=daemon.environment) as serving:
        serving.send("run")
        limited = client_environment(str(daemon.pipes.pipe), str(daemon.pipes.log), 30)
        with worker(fake=plan.fake, environment=limited) as rollout:
            rollout.send("fault")
            with contextlib.suppress(subprocess.TimeoutExpired):
                rollout.process.wait(_LOST_SECONDS * 5)
        found = _aftermath(daemon, serving)
    after = worker(fake=plan.fake, environment=daemon.environment)
    with contextlib.suppress(EOFError), after as fresh:
        fresh.send("run")
        found["new_clients_afterwards"] = bool(fresh.steps(plan.seconds))
    return {"new_clients_afterwards": False, **found}


def elastic(plan: Plan, module: str) -> dict[str, Any]:
    """An elastic KV pool: from a lower limit and freed tokens to free memory, many times."""
    name = f"rose-gpu-check-{os.getpid()}"
    segment = KvcachedSegment(name)
    with pool(module, name) as made:
        bundle = made.seen["bundle"]
        first, given = segment.read(), []
        for _ in range(plan.lends):
            _until(lambda: made.ask("alloc 40"))
            segment.limit(10 * bundle)
            began = time.monotonic()
            made.ask("free 35")
            _until(lambda: _held(segment) <= 10 * bundle)
            given.append(time.monotonic() - began)
            segment.limit((made.seen["bundles"] - 1) * bundle)
            made.ask("free 5")
        last = _held(segment)
    segment.forget()
    left = None if first is None else last - first.held
    return {"give_back_s": spread(given), "left_after_cycles_bytes": left, "bundle_bytes": bundle}


def _held(segment: KvcachedSegment) -> int:
    seen = segment.read()
    if seen is None:
        raise EOFError("the pool's segment is gone")
    return seen.held


def _until(happens: Callable[[], object]) -> None:
    deadline = time.monotonic() + _LOST_SECONDS * 5
    while not happens():
        if time.monotonic() > deadline:
            raise EOFError("the pool does not do what its limit says")
        time.sleep(0.01)


def kills(plan: Plan, daemon: Daemon) -> list[dict[str, Any]]:
    """What becomes of serving when a client beside it is ended, in order and without."""
    found = []
    for how in ("terminate_client", "kill"):
        with worker(fake=plan.fake, environment=daemon.environment) as serving:
            serving.send("run")
            limited = client_environment(str(daemon.pipes.pipe), str(daemon.pipes.log), 30)
            with worker(fake=plan.fake, batch=64, environment=limited) as rollout:
                rollout.send("run")
                time.sleep(0.5)
                ended = _end(daemon, rollout, how)
                found.append({"how": how, **ended, **_aftermath(daemon, serving)})
    return found


def _end(daemon: Daemon, rollout: Worker, how: str) -> dict[str, Any]:
    refused = ""
    if how == "terminate_client":
        try:
            for server in daemon.control.servers():
                if rollout.process.pid in server.clients:
                    daemon.control.terminate(server.pid, rollout.process.pid)
        except MpsError as error:
            refused = str(error)
    rollout.process.kill()
    rollout.process.wait()
    return {"refused": refused}


def _aftermath(daemon: Daemon, serving: Worker) -> dict[str, Any]:
    try:
        steps = serving.steps(_LOST_SECONDS / 3)
    except (EOFError, OSError) as error:
        return {"serving_goes_on": False, "why": str(error), "servers": _states(daemon)}
    return {"serving_goes_on": bool(steps), "serving": step_ms(steps), "servers": _states(daemon)}


def _states(daemon: Daemon) -> list[str]:
    try:
        return [server.state.value for server in daemon.control.servers()]
    except MpsError as error:
        return [str(error)]


def _listed(daemon: Daemon, pid: int) -> bool:
    return any(pid in server.clients for server in daemon.control.servers())


def memory(plan: Plan, used: Callable[[], int | None]) -> dict[str, Any]:
    """Seconds to take and to give back memory, and what the driver says came free."""
    taken, given, freed = [], [], []
    size = plan.gib * _GIB
    with worker(fake=plan.fake) as rollout:
        for _ in range(plan.cycles):
            taken.append(rollout.ask(f"hold {size}"))
            full = used()
            given.append(rollout.ask("drop"))
            empty = used()
            freed.append(None if full is None or empty is None else full - empty)
    return {"bytes": size, "take_s": spread(taken), "give_back_s": spread(given), "freed": freed}
