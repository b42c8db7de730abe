"""Scenarios of the simulator, as benchmarks play them."""

from __future__ import annotations

from pathlib import Path

from rose_simulate.files.reading import read_material, read_scenario
from rose_simulate.model.scenarios.scenario import Scenario
from rose_simulate.model.simulation import SimulationInputs
from rose_simulate.verbs.studies import SCENARIOS


def scenario(name: str, folder: Path = SCENARIOS) -> tuple[Scenario, SimulationInputs]:
    """A scenario of single events, with its traces.

    Raises:
        TypeError: it is a fleet.
        SimulationError: it, or a trace, is missing or wrong.
    """
    path = folder / f"{name}.yaml"
    setup = read_scenario(path)
    if not isinstance(setup, Scenario):
        message = f"{path} is a fleet"
        raise TypeError(message)
    return setup, read_material(path, setup)
