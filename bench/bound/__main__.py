"""``make bench-bound``: exceedances of the bound under an adversary; what the certificate costs.

Virtual time: H100 costs of ``simulate``, production's guard. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from bench.bound.adversary import Adversary, Findings
from bench.record import Figure, figure, record
from bench.scenarios import scenario
from rose_core.guard.certificate import CertificateCount
from rose_core.stats import mixture_sequence, quantile
from rose_simulate.files.reading import read_arrivals
from rose_simulate.model.fleets.curves import Lender, ReplicaBench, ReplicaYield, poisson
from rose_simulate.model.scenarios.scenario import Regime, RolloutJob, Scenario, Service
from rose_simulate.model.simulation import SimulationInputs
from rose_simulate.verbs.studies import SCENARIOS

TRACES = ("conv", "code")
LOADS = {"conv": (0.25, 0.5, 1.0, 2.0), "code": (1.0, 2.0, 4.0)}
"""Requests per second; above these a replica is never idle, and slack decides instead."""
FACTORS = (1.05, 1.25, 1.5)
"""The SLO's TTFT, as multiples of the 99th percentile alone."""
HARVEST = 0.9
_FOREVER_MS = 1e6


def main() -> None:
    """Search, compare, record."""
    parser = argparse.ArgumentParser(prog="python -m bench.bound", description=__doc__)
    add = parser.add_argument
    add("--requests", type=_number, default=30_000, help="of the adversary, each sent twice: 1e7")
    add("--minutes", type=float, help="the adversary begins no schedule after that time")
    add("--seeds", type=int, default=3, help="searches, each from the beginning")
    add("--first-seed", type=int, default=1, help="what runs with other seeds count adds up")
    add("--processes", type=int, default=1, help="searches side by side")
    add("--only", choices=("adversary", "table"), help="leave the other part out")
    add("--seconds", type=float, default=600.0, help="of each load of the table")
    add("--derate", type=float, default=0.5)
    options = parser.parse_args()
    told, material = scenario("tight")
    rows = [] if options.only == "table" else _adversary(told, material, options)
    if options.only != "adversary":
        rows += _table(told, material, options)
    record("bound", rows, notes=("virtual time, H100 costs of the simulator; no GPU took part",))


def _number(text: str) -> int:
    return int(float(text))


def _table(told: Scenario, material: SimulationInputs, options: argparse.Namespace) -> list[Figure]:
    rows: list[Figure] = []
    promised = CertificateCount()
    for name in TRACES:
        trace = read_arrivals(SCENARIOS / "traces" / f"azure2023_{name}_600s.csv")
        for load in LOADS[name]:
            draw = random.Random(f"{name}/{load:g}")  # a model's randomness
            asked = poisson(load, trace, draw, options.seconds)
            service, job = told.services[0], told.jobs[0]
            one = _Replica(service, job, asked, material, options.seconds, options.derate)
            rows += _near(f"{name} {load:g}/s", one, promised)
    share = mixture_sequence(promised.exceeded, promised.requests)
    allowed = promised.allowed / promised.requests
    rows.append(
        figure(
            f"promised ones beyond their ceiling, of {promised.requests}",
            *(share.value, "ratio"),
            at_most=round(allowed, 4),
            interval=(share.low, share.high),
        )
    )
    return rows


def _adversary(
    told: Scenario, material: SimulationInputs, options: argparse.Namespace
) -> list[Figure]:
    # Without a TPOT slack is never measured, so the gate uses idle gaps alone, as the bound says.
    loose: dict[str, object] = {"ttft_ms": _FOREVER_MS, "tpot_ms": 0.0}
    service = told.services[0].model_copy(update=loose)
    attack = Adversary(service, told.jobs[0], material.episodes, options.derate)
    found, began = Findings(), time.monotonic()
    each = math.ceil(options.requests / options.seeds)
    rounds = math.ceil(options.seeds / options.processes)
    minutes = options.minutes / rounds if options.minutes else None
    search = partial(attack.findings, each, minutes)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    # Spawned, as the simulator's: a fork beside threads may wait for a lock forever.
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, fresh) as pool:
        for one in pool.map(search, seeds):
            found.join(one)
    cost, took_s = found.cost, time.monotonic() - began
    assert cost is not None  # noqa: S101  # a search tries one schedule at least
    share = mixture_sequence(found.exceeded, found.requests)
    figures = [
        figure("adversary: requests, each alone and lent", found.requests, "1"),
        figure("adversary: requests a second", found.requests / took_s, "1/s"),
        figure("adversary: schedules", found.schedules, "1"),
        figure("adversary: exceedances of D + S + C", found.exceeded, "1", at_most=0),
        figure("adversary: exceedances of 10^6, at most", 1e6 * share.high, "1"),
        figure("adversary: worst added / bound", found.share, "ratio", at_most=1),
        figure("adversary: worst added", 1e3 * found.most_s, "ms"),
        figure("adversary: schedules that exceed D alone", found.above_stop, "1"),
        figure("adversary: schedules that exceed D and one chunk", found.above_chunk, "1"),
    ]
    parts = zip("DSC", (cost.stop_s, cost.step_s, cost.batch_s), strict=True)
    return figures + [figure(f"adversary: {name} there", 1e3 * part, "ms") for name, part in parts]


@dataclass(frozen=True)
class _Replica:
    """One replica with one load."""

    service: Service
    job: RolloutJob
    rows: Sequence[tuple[int, int, int]]
    material: SimulationInputs
    seconds: float
    derate: float

    def run(self, ttft_ms: float, *, lends: bool, certifies: bool) -> ReplicaYield:
        service = self.service.model_copy(update={"ttft_ms": ttft_ms})
        regime = Regime.OURS if lends else Regime.FIXED
        lender = Lender(service, self.job, regime, self.derate)
        bench = ReplicaBench(lender, lends=lends, seconds=self.seconds, certifies=certifies)
        draw = random.Random("rollouts")  # a model's randomness
        return bench.run(self.rows, self.material.episodes if lends else (), draw)


def _near(name: str, one: _Replica, promised: CertificateCount) -> list[Figure]:
    """Harvest and harm at SLOs near what serving takes alone."""
    rows = one.rows
    alone = one.run(_FOREVER_MS, lends=False, certifies=False)
    usual_s = quantile([each.ttft_s for each in alone.requests if each.first_ns], 0.99)
    figures: list[Figure] = []
    for factor in FACTORS:
        slo_ms = 1e3 * usual_s * factor
        before = one.run(slo_ms, lends=True, certifies=False)
        now = one.run(slo_ms, lends=True, certifies=True)
        late = {each.number for each in alone.requests if each.ttft_s * 1e3 > slo_ms}
        head = f"{name}, SLO {factor:g} x p99 alone ({slo_ms:.0f} ms)"
        kept = now.tokens_per_s / before.tokens_per_s if before.tokens_per_s else 1.0
        promised.requests += now.certified.requests
        promised.exceeded += now.certified.exceeded
        promised.allowed += now.certified.allowed
        figures += [
            figure(f"{head}: tokens / without certificate", kept, "ratio", at_least=HARVEST),
            figure(f"{head}: added late without", _added(before, late, slo_ms), f"of {len(rows)}"),
            figure(f"{head}: added late", _added(now, late, slo_ms), f"of {len(rows)}"),
        ]
    return figures


def _added(found: ReplicaYield, late: set[int], slo_ms: float) -> int:
    """Requests above the TTFT that are not when serving is alone."""
    return len({one.number for one in found.requests if one.ttft_s * 1e3 > slo_ms} - late)


if __name__ == "__main__":
    main()
