"""``rose simulate SCENARIO.yaml``: runs a scenario, prints its table, writes ``OUT/NAME.json``.

``rose simulate study NAME`` runs one of the documented studies (``studies``), ``rose simulate
calibrate FILE ...`` holds out one load level of the guard's benchmark (``calibrate``), ``rose
simulate frontier`` grows bursts until serving alone breaks and ``rose simulate slots`` lends one
slot after another (``sweeps``), ``rose simulate reserve`` says what memory that is kept back is
worth to serving, and ``rose simulate sandboxes`` what saving agents' sandboxes costs them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from rose_simulate.files.overrides import changed
from rose_simulate.files.reading import read_material, read_scenario
from rose_simulate.files.timings import measured
from rose_simulate.model.errors import SimulationError
from rose_simulate.model.fleets.fleet import FleetOutcome
from rose_simulate.model.outcome import RunOutcome
from rose_simulate.model.scenarios.fleet_scenario import FleetScenario
from rose_simulate.model.scenarios.scenario import Regime, Scenario
from rose_simulate.model.simulation import SimulationInputs
from rose_simulate.runs.fleets import FleetResult, fleet_table, run_fleet
from rose_simulate.runs.study import Result, study, table
from rose_simulate.verbs import calibrate, reserve, sandboxes, studies, sweeps
from rose_wire.flags import VerbParser

OTHERS: Mapping[str, Callable[[list[str]], int]] = {
    "study": studies.main,
    "calibrate": calibrate.main,
    "frontier": sweeps.frontier,
    "slots": sweeps.slots,
    "reserve": reserve.main,
    "sandboxes": sandboxes.main,
}


def parser() -> argparse.ArgumentParser:
    """Arguments of the verb."""
    made = VerbParser(prog="rose simulate", description=__doc__)
    made.add_argument("scenario", type=Path, help="file of the scenario")
    made.add_argument("--check", action="store_true", help="read and check only")
    made.add_argument("--seeds", type=int, nargs="+", help="instead of the scenario's")
    made.add_argument(
        "--regimes",
        nargs="+",
        choices=[one.value for one in Regime],
        help="instead of the scenario's",
    )
    made.add_argument("--derate", type=float, nargs="+", help="speeds at saturation, each 0 to 1")
    made.add_argument("--seconds", type=float, help="instead of the scenario's")
    made.add_argument("--warmup", type=float, help="seconds not counted, instead of the scenario's")
    made.add_argument("--timings", type=Path, help="delays from the guard benchmark's JSON")
    made.add_argument(
        "--out", type=Path, default=Path("out") / "simulate", help="folder for NAME.json"
    )
    return made


def chosen(
    scenario: Scenario | FleetScenario, options: argparse.Namespace
) -> Scenario | FleetScenario:
    """The scenario with what the command line overrides.

    Raises:
        ScenarioError: a value is out of bounds, or the measured delays cannot be used.
    """
    changes = {name: getattr(options, name) for name in ("seeds", "regimes", "seconds")}
    if isinstance(scenario, FleetScenario):
        return changed(scenario, changes)
    changes["warmup_s"] = options.warmup
    if options.timings is not None:
        changes["delays"] = measured(options.timings, scenario.delays)
    return changed(scenario, changes)


def write(result: Result | FleetResult, folder: Path) -> Path:
    """Write the result."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.scenario}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return path


def main(argv: list[str]) -> int:
    """Run the verb."""
    if argv and argv[0] in OTHERS:
        return OTHERS[argv[0]](argv[1:])
    options = parser().parse_args(argv)
    derates = options.derate or []
    if any(not 0 < one <= 1 for one in derates):
        sys.stderr.write("rose simulate: --derate must lie above 0 and at most at 1\n")
        return 2
    try:
        scenario = chosen(read_scenario(options.scenario), options)
        material = read_material(options.scenario, scenario)
    except SimulationError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if options.check:
        sys.stdout.write(f"{options.scenario}: fine\n")
        return 0
    if isinstance(scenario, FleetScenario):
        return _fleet(scenario, material, options)
    result = study(scenario, material, derates or [scenario.derate], _progress)
    sys.stdout.write(f"{table(result)}\nwritten to {write(result, options.out)}\n")
    return 0


def _fleet(scenario: FleetScenario, material: SimulationInputs, options: argparse.Namespace) -> int:
    found = run_fleet(scenario, material, _progress, options.derate or ())
    sys.stdout.write(f"{fleet_table(found)}\nwritten to {write(found, options.out)}\n")
    return 0


def _progress(outcome: RunOutcome | FleetOutcome) -> None:
    sys.stderr.write(f"seed {outcome.seed} {outcome.regime}: done\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
