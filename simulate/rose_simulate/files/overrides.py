"""What the command line says instead of a scenario, held to the scenario's own bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar, cast

from pydantic import ValidationError

from rose_simulate.model.errors import ScenarioError
from rose_simulate.model.scenarios.fleet_scenario import FleetScenario
from rose_simulate.model.scenarios.scenario import Scenario

AnyT = TypeVar("AnyT", bound=Scenario | FleetScenario)

_FLAGS: Final = {"warmup_s": "warmup", "delays": "timings"}


def changed(scenario: AnyT, changes: Mapping[str, object]) -> AnyT:
    """The scenario with other values; None = as it is.

    Raises:
        ScenarioError: a value is out of the field's bounds; names the flag.
    """
    asked = {name: value for name, value in changes.items() if value is not None}
    kind: type[AnyT] = type(scenario)
    values = {name: getattr(scenario, name) for name in kind.model_fields}
    try:
        return cast("AnyT", kind.model_validate(values | asked))
    except ValidationError as error:
        wrong = "; ".join(f"--{_flag(one['loc'])}: {one['msg']}" for one in error.errors())
        raise ScenarioError(wrong) from error


def _flag(where: tuple[int | str, ...]) -> str:
    name = str(where[0])
    return _FLAGS.get(name, name)
