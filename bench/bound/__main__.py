"""``make bench-bound``: exceedances of the bound under an adversary; what the certificate costs.

Virtual time: H100 costs of ``simulate``, production's guard. Nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

from bench.bound.adversary import Adversary, TriedSchedule
from bench.record import Figure, figure, record
from bench.scenarios import scenario
from rose_core.guard.certificate import CertificateCount
from rose_core.stats import mixture_sequence, quantile
from rose_simulate.model.curves import Lender, ReplicaBench, ReplicaYield, poisson
from rose_simulate.model.scenario import Regime, RolloutJob, Scenario, Service
from rose_simulate.model.simulation import SimulationInputs
from rose_simulate.reading import read_arrivals
from rose_simulate.studies import SCENARIOS

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
    add("--requests", type=int, default=30_000, help="that the adversary sends, each twice")
    add("--seeds", type=int, default=3, help="searches, each from the beginning")
    add("--seconds", type=float, default=600.0, help="of each load of the table")
    add("--derate", type=float, default=0.5)
    options = parser.parse_args()
    told, material = scenario("tight")
    rows = _adversary(told, material, options)
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
    record("bound", rows, notes=("virtual time, H100 costs of the simulator; no GPU took part",))


def _adversary(
    told: Scenario, material: SimulationInputs, options: argparse.Namespace
) -> list[Figure]:
    # Without a TPOT slack is never measured, so the gate uses idle gaps alone, as the bound says.
    loose: dict[str, object] = {"ttft_ms": _FOREVER_MS, "tpot_ms": 0.0}
    service = told.services[0].model_copy(update=loose)
    attack = Adversary(service, told.jobs[0], material.episodes, options.derate)
    tried: list[TriedSchedule] = []
    for seed in range(1, options.seeds + 1):
        tried += attack.search(options.requests // options.seeds, seed)
    requests, exceeded = sum(one.requests for one in tried), sum(one.exceeded for one in tried)
    worst = max(tried, key=lambda one: one.share)
    stop_alone = sum(one.worst_s > one.cost.stop_s for one in tried)
    chunk = sum(one.worst_s > one.cost.stop_s + one.chunk_s for one in tried)
    figures = [
        figure("adversary: requests, each alone and lent", requests, "1"),
        figure("adversary: schedules", len(tried), "1"),
        figure("adversary: exceedances of D + S + C", exceeded, "1", at_most=0),
        figure("adversary: worst added / bound", worst.share, "ratio", at_most=1),
        figure("adversary: worst added", 1e3 * max(one.worst_s for one in tried), "ms"),
        figure("adversary: schedules that exceed D alone", stop_alone, "1"),
        figure("adversary: schedules that exceed D and one chunk", chunk, "1"),
    ]
    parts = zip("DSC", (worst.cost.stop_s, worst.cost.step_s, worst.cost.batch_s), strict=True)
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
