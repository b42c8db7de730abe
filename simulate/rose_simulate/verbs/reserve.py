"""``rose simulate reserve``: what the memory that lending keeps back is worth to serving.

Serving alone, with the memory that it has beside rollouts and with all of it, under one load after
another. Requests are turns of sessions: a smaller KV pool keeps the keys of fewer of them, so more
of each prompt is computed again. The *admitted load* is the highest rate at which as many requests
keep the objective as it asks for. What it gains by the whole memory is what the reserve costs:

    worth = (admitted with all - admitted with its share) / admitted with all / share kept back

as a part of a GPU's price (``--reserve`` of ``rose report`` and ``rose cost`` over
``--dedicated-hour``). Equal seeds give equal bytes. Next step: ``sweeps`` has the other sweeps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rose_simulate.files.overrides import changed
from rose_simulate.files.reading import read_material, read_scenario
from rose_simulate.model.errors import ScenarioError, SimulationError
from rose_simulate.model.outcome import RunOutcome, ServingOutcome
from rose_simulate.model.scenarios.scenario import Regime, Scenario
from rose_simulate.model.simulation import SimulationInputs
from rose_simulate.runs.runner import Case, Runner
from rose_simulate.verbs.studies import SCENARIOS
from rose_wire.flags import VerbParser

RATES = (0.5, 1.0, 1.5, 2.0, 5.0, 6.0)
"""Both admitted loads of the shipped scenario lie between two of them (docs/studies/reserve.md)."""


class Felt(msgspec.Struct, frozen=True):
    """What serving alone feels, over all seeds; the worst seed's TTFT, milliseconds."""

    requests: int
    late: int
    ttft_p50: float
    ttft_p99: float

    @property
    def late_share(self) -> float:
        """Share of the requests that were late."""
        return self.late / self.requests if self.requests else 0.0


class LoadLevel(msgspec.Struct, frozen=True):
    """One load: with the share of memory that lending leaves, and with all of it."""

    requests_per_s: float
    kept_back: Felt
    full: Felt


def levels(
    scenario: Scenario,
    material: SimulationInputs,
    rates: Sequence[float],
    runner: Runner,
    progress: Callable[[RunOutcome], None],
) -> list[LoadLevel]:
    """Each rate of the scenario's only service, ascending."""
    (service,) = scenario.services
    found = []
    for rate in rates:
        load = service.load.model_copy(update={"requests_per_s": rate})
        services = (service.model_copy(update={"load": load}),)
        chosen = scenario.model_copy(
            update={"services": services, "regimes": (Regime.FIXED, Regime.FULL_MEMORY)}
        )
        answers = runner.run([Case(chosen, seed) for seed in chosen.seeds], material, progress)
        kept, full = (_felt([ones[n].services[0] for ones in answers]) for n in (0, 1))
        found.append(LoadLevel(rate, kept, full))
    return found


def _felt(seeds: Sequence[ServingOutcome]) -> Felt:
    return Felt(
        sum(one.requests for one in seeds),
        sum(one.violations for one in seeds),
        max(one.ttft_p50 for one in seeds),
        max(one.ttft_p99 for one in seeds),
    )


def admitted(rates: Sequence[tuple[float, float]], allowed: float) -> float | None:
    """The highest load at which at most ``allowed`` of the requests are late.

    Args:
        rates: load and late share, ascending by load.
        allowed: share.

    Returns:
        Between two loads as the late share grows in a line; None where even the lowest breaks the
        objective, or none does: the answer lies outside of what was tried.
    """
    broken = next((n for n, (_, late) in enumerate(rates) if late > allowed), None)
    if not broken:
        return None
    (low, below), (high, above) = rates[broken - 1], rates[broken]
    return low + (high - low) * (allowed - below) / (above - below)


def worth(found: Sequence[LoadLevel], allowed: float, share: float) -> float | None:
    """Of a GPU's price, for all of its memory; None where either load is unknown."""
    kept = admitted([(one.requests_per_s, one.kept_back.late_share) for one in found], allowed)
    full = admitted([(one.requests_per_s, one.full.late_share) for one in found], allowed)
    if kept is None or full is None or not share:
        return None
    return (full - kept) / full / share


def table(found: Sequence[LoadLevel], scenario: Scenario) -> str:
    """In Markdown, with the two loads and what follows."""
    (service,) = scenario.services
    allowed, share = 1 - service.percentile / 100, service.rollout_memory_share
    lines = [
        "| requests/s | TTFT p50, p99 with its share | late | with all memory | late |",
        "|---|---|---|---|---|",
    ]
    for one in found:
        cells = (
            f"{felt.ttft_p50:.0f}, {felt.ttft_p99:.0f} ms | {felt.late_share:.2%}"
            for felt in (one.kept_back, one.full)
        )
        lines.append(f"| {one.requests_per_s:g} | {' | '.join(cells)} |")
    loads = [
        admitted([(one.requests_per_s, felt(one).late_share) for one in found], allowed)
        for felt in (_kept, _full)
    ]
    shown = ["outside of what was tried" if one is None else f"{one:.1f}/s" for one in loads]
    value = worth(found, allowed, share)
    priced = "unknown" if value is None else f"{value:.2f} of a GPU's price"
    lines += [
        "",
        f"Admitted load at {allowed:.0%} late: {shown[0]} with {service.serving_memory_share:.0%} "
        f"of the memory, {shown[1]} with {share:.0%} more. "
        f"All of a GPU's memory is worth {priced}.",
    ]
    return "\n".join(lines) + "\n"


def _kept(one: LoadLevel) -> Felt:
    return one.kept_back


def _full(one: LoadLevel) -> Felt:
    return one.full


def parser() -> argparse.ArgumentParser:
    """Arguments of the verb."""
    made = VerbParser(prog="rose simulate reserve", description=__doc__)
    made.add_argument(
        "scenario",
        type=Path,
        nargs="?",
        default=SCENARIOS / "sessions.yaml",
        help="file of the scenario",
    )
    made.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="requests/s")
    made.add_argument("--seeds", type=int, nargs="+", help="instead of the scenario's")
    made.add_argument("--seconds", type=float, help="instead of the scenario's")
    made.add_argument("--derate", type=float, help="instead of the scenario's")
    made.add_argument("--keep", type=Path, help="folder of results that later calls need not redo")
    made.add_argument(
        "--out", type=Path, default=Path("out") / "simulate", help="folder for what it writes"
    )
    return made


def main(argv: list[str]) -> int:
    """Run the verb."""
    options = parser().parse_args(argv)
    asked = {name: getattr(options, name) for name in ("seeds", "seconds", "derate")}
    runner = Runner(1, options.keep)
    try:
        chosen = read_scenario(options.scenario)
        if not isinstance(chosen, Scenario) or len(chosen.services) != 1:
            message = f"{options.scenario}: give a scenario of single events with one service"
            raise ScenarioError(message)
        chosen = changed(chosen, asked)
        rates = sorted(set(options.rates))
        material = read_material(options.scenario, chosen)
        found = levels(chosen, material, rates, runner, _progress)
    except SimulationError as error:
        sys.stderr.write(f"rose simulate reserve: {error}\n")
        return 1
    finally:
        runner.close()
    options.out.mkdir(parents=True, exist_ok=True)
    path: Path = options.out / f"reserve-{chosen.name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    sys.stdout.write(f"{table(found, chosen)}\nwritten to {path}\n")
    return 0


def _progress(one: RunOutcome) -> None:
    sys.stderr.write(f"seed {one.seed} {one.regime}: done\n")
