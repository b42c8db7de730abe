"""CPU time and memory of one hour of 100, 1,000 and 10,000 GPUs, and how both grow.

Curves depend on the kinds of services and on no number of GPUs, so they are made once; what grows
with a fleet is the work in its bins. A fleet's own time is the sum of both. Sizes ascend, so that
the peak memory of the process after each is that size's.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.record import Figure, figure
from rose_simulate.files.reading import read_material, read_scenario
from rose_simulate.model.fleets.curves import Curve
from rose_simulate.model.scenarios.fleet_scenario import FleetScenario
from rose_simulate.model.scenarios.scenario import Regime
from rose_simulate.model.simulation import SimulationInputs
from rose_simulate.runs.fleets import alone_of, curves_of, run_bins

LIMIT_S: Final = 120.0
LIMIT_MIB: Final = 2048.0
_SEED: Final = 1


@dataclass(frozen=True)
class Size:
    """A fleet's size: services of each kind, replicas of each; jobs, engines of each."""

    services: int
    replicas: int
    jobs: int
    dedicated: int
    borrowed: int

    @property
    def gpus(self) -> int:
        """GPUs of two kinds of services and of the jobs."""
        return 2 * self.services * self.replicas + self.jobs * self.dedicated


SIZES: Final = (
    Size(1, 40, 1, 20, 25),
    Size(5, 80, 4, 50, 60),
    Size(25, 160, 20, 100, 100),
)


def growth(path: Path) -> list[Figure]:
    """The figures.

    Args:
        path: a fleet scenario with two kinds of services, one GPU to a replica and an engine.
    """
    whole = read_scenario(path)
    if not isinstance(whole, FleetScenario):
        message = f"{path} is no fleet"
        raise SystemExit(message)
    material = read_material(path, whole)
    began = time.process_time()
    alone = alone_of(whole, material, _SEED)
    curves = curves_of(whole, Regime.OURS, material, _SEED, alone=alone)
    once_s = time.process_time() - began
    rows = [figure("fleet: curves of one gate, whatever its size", once_s, "CPU s")]
    spent: list[float] = []
    for size in SIZES:
        spent.append(_bins_s(sized(whole, size), material, curves))
        rows += _one(size, spent[-1], once_s)
    for before, after, less, more in zip(SIZES, SIZES[1:], spent, spent[1:], strict=False):
        name = f"fleet: bins of {after.gpus} GPUs / of {before.gpus}; linear"
        rows.append(figure(name, more / less, "ratio", at_most=after.gpus / before.gpus))
    return rows


def _one(size: Size, bins_s: float, once_s: float) -> list[Figure]:
    largest = size is SIZES[-1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    head = f"fleet of {size.gpus} GPUs, one hour"
    return [
        figure(f"{head}: bins alone", bins_s, "CPU s"),
        figure(head, bins_s + once_s, "CPU s", at_most=LIMIT_S if largest else None),
        figure(f"{head}: peak memory", peak, "MiB", at_most=LIMIT_MIB if largest else None),
    ]


def _bins_s(told: FleetScenario, material: SimulationInputs, curves: tuple[Curve, ...]) -> float:
    began = time.process_time()
    run_bins(told, Regime.OURS, _SEED, material, curves)
    return time.process_time() - began


def sized(whole: FleetScenario, size: Size) -> FleetScenario:
    """The fleet with other numbers; the load per replica stays."""
    kinds = []
    for kind in whole.services:
        mean = (kind.service.load.requests_per_s or 0.0) * size.replicas / kind.service.replicas
        load = kind.service.load.model_copy(update={"requests_per_s": mean})
        service = kind.service.model_copy(update={"replicas": size.replicas, "load": load})
        kinds.append(kind.model_copy(update={"count": size.services, "service": service}))
    job = whole.jobs.job
    groups = max(1, job.batch_groups * size.dedicated // job.dedicated)
    changes: dict[str, object] = {"dedicated": size.dedicated, "borrowed": size.borrowed}
    job = job.model_copy(update=changes | {"batch_groups": groups})
    jobs = whole.jobs.model_copy(update={"count": size.jobs, "job": job})
    return whole.model_copy(update={"services": tuple(kinds), "jobs": jobs})
