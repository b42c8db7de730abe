"""The reference of scenario files says what the models check, and nothing can be left out of it."""

import inspect
from typing import Annotated

import pytest
from pydantic import Field

from rose_dev import scenario_page
from rose_simulate.model.scenarios import fleet_scenario, scenario
from rose_simulate.model.scenarios.scenario import Strict


def test_every_part_of_a_scenario_has_its_section() -> None:
    parts = {
        model
        for module in (scenario, fleet_scenario)
        for model in vars(module).values()
        if inspect.isclass(model) and issubclass(model, Strict) and model is not Strict
    }
    assert set(scenario_page.SECTIONS.values()) == parts


@pytest.mark.parametrize(
    "row",
    [
        "| `percentile` | integer, >= 50, <= 99 | `99` | share of the requests",
        "| `seconds` | number, > 0, <= 1209600 | required | that are counted. |",
        "| `burst_every_s` | number, > 0 |  | from one burst to the next",
        "| `regimes` | list of name | `[fixed, rose-paper, rose-paper-dedicated, ours]` |",
        "| `kind` | `engine`, `gone`, `guard`, `link`, `node` | required |",
    ],
)
def test_a_field_is_said_with_its_bounds_and_default(row: str) -> None:
    assert row in scenario_page.page()


def test_a_field_that_nobody_has_described_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare(Strict):
        """A part.

        Attributes:
            reported: is described,
                on two lines.
        """

        reported: int = 0
        silent: Annotated[int, Field(ge=1)] = 1

    monkeypatch.setattr(scenario_page, "SECTIONS", {"bare": Bare})
    with pytest.raises(LookupError, match=r"Bare\.silent is not described"):
        scenario_page.page()
    Bare.__doc__ = (Bare.__doc__ or "").replace("reported:", "silent: too.\n            reported:")
    assert "| `reported` | integer | `0` | is described, on two lines. |" in scenario_page.page()
