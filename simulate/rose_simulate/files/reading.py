"""Scenario files and traces from disk; an error names file, line and field."""

from __future__ import annotations

import csv
import io
import json
from functools import lru_cache
from pathlib import Path

import yaml
from pydantic import ValidationError

from rose_simulate.model.errors import Impossible, ScenarioError, TraceError
from rose_simulate.model.jobs.workload import (
    USUAL_SPAN,
    ContextRange,
    Episode,
    ServingArrival,
    arrivals,
    episodes,
    shape,
)
from rose_simulate.model.scenarios.fleet_scenario import FleetScenario, impossible_fleet
from rose_simulate.model.scenarios.possible import Where, impossible
from rose_simulate.model.scenarios.scenario import Scenario, Service
from rose_simulate.model.simulation import SimulationInputs

ROWS = "rows.json"
"""File name of a trace -> its rows; beside the traces, and optional."""


def read_scenario(path: Path) -> Scenario | FleetScenario:
    """Read and check a scenario.

    Raises:
        ScenarioError: the file cannot be read, is no YAML, or a field is wrong.
        Impossible: the scenario contradicts itself.
    """
    try:
        text = path.read_text()
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path}: cannot be read: {error}"
        raise ScenarioError(message) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        message = f"{path}{line}: no YAML: {getattr(error, 'problem', error)}"
        raise ScenarioError(message) from error
    fleet = isinstance(content, dict) and content.get("kind") == "fleet"
    model = FleetScenario if fleet else Scenario
    try:
        scenario = model.model_validate(content)
    except ValidationError as error:
        lines = [_place(path, root, one["loc"], one["msg"]) for one in error.errors()]
        raise ScenarioError("\n".join(lines)) from error
    found = (
        impossible_fleet(scenario) if isinstance(scenario, FleetScenario) else impossible(scenario)
    )
    reasons = [_place(path, root, where, reason) for where, reason in found]
    if reasons:
        raise Impossible("\n".join(reasons))
    return scenario


def _place(path: Path, root: yaml.Node | None, where: Where, message: str) -> str:
    field = ".".join(map(str, where)) or "the whole file"
    return f"{path}:{_line(root, where)}: {field}: {message}"


def _line(node: yaml.Node | None, where: Where) -> int:
    """Line of the field, or of the innermost thing around it that exists."""
    if node is None:
        return 1
    line = node.start_mark.line + 1
    for step in where:
        child = _child(node, step)
        if child is None:
            break
        node, line = child
    return line


def _child(node: yaml.Node, step: str | int) -> tuple[yaml.Node, int] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == step:
                return value, key.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        child = node.value[step]
        return child, child.start_mark.line + 1
    return None


def read_material(path: Path, scenario: Scenario | FleetScenario) -> SimulationInputs:
    """Read the traces a scenario names, relative to its own folder.

    Raises:
        TraceError: a trace is missing, truncated, or has other columns.
    """
    folder = path.parent
    services = [one if isinstance(one, Service) else one.service for one in scenario.services]
    names = {service.load.trace for service in services if service.load.trace}
    shapes = {service.load.shape for service in services if service.load.shape}
    return SimulationInputs(
        read_episodes(folder / scenario.episodes, _span(scenario)),
        {name: read_arrivals(folder / name) for name in sorted(names)},
        {name: shape(_rows(folder / name), str(folder / name)) for name in sorted(shapes)},
    )


# Studies name the same few traces again and again, and to parse one takes longer than to read it.
@lru_cache(maxsize=8)
def _arrivals(text: str, path: Path, expected: int | None) -> tuple[ServingArrival, ...]:
    return arrivals(_parsed(text, path, expected), str(path))


@lru_cache(maxsize=8)
def _episodes(
    text: str, path: Path, expected: int | None, span: ContextRange
) -> tuple[Episode, ...]:
    return episodes(_parsed(text, path, expected), str(path), span)


def read_arrivals(path: Path) -> tuple[ServingArrival, ...]:
    """A serving trace."""
    return _arrivals(_text(path), path, _expected(path))


def read_episodes(path: Path, span: ContextRange = USUAL_SPAN) -> tuple[Episode, ...]:
    """Rollout episodes, with contexts of that span."""
    return _episodes(_text(path), path, _expected(path), span)


def _span(scenario: Scenario | FleetScenario) -> ContextRange:
    if isinstance(scenario, FleetScenario):
        return USUAL_SPAN
    return ContextRange(scenario.contexts.first, scenario.contexts.most)


def _rows(path: Path) -> list[dict[str, str]]:
    return _parsed(_text(path), path, _expected(path))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path}: cannot be read: {error}"
        raise TraceError(message) from error


def _parsed(text: str, path: Path, expected: int | None) -> list[dict[str, str]]:
    if not text.endswith("\n"):
        line = text.count("\n") + 1
        message = f"{path}:{line}: truncated: the last line has no end"
        raise TraceError(message)
    rows = list(csv.DictReader(io.StringIO(text)))
    if expected is not None and len(rows) < expected:
        message = f"{path}:{len(rows) + 1}: truncated: {len(rows)} rows of {expected}"
        raise TraceError(message)
    return rows


def _expected(path: Path) -> int | None:
    """Rows that ``rows.json`` beside it says it has: a cut between two lines shows nowhere."""
    counts = path.with_name(ROWS)
    if not counts.exists():
        return None
    try:
        known = json.loads(counts.read_text())
        return None if path.name not in known else int(known[path.name])
    except (OSError, TypeError, ValueError) as error:
        message = f"{counts}: cannot be read: {error}"
        raise TraceError(message) from error
