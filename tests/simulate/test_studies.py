"""Studies by name, their pages and plots."""

import json
from pathlib import Path

import msgspec
import pytest

from rose_core.stats import paired_ratio
from rose_simulate.files.reading import read_scenario
from rose_simulate.model.scenarios.scenario import Nodes, Regime
from rose_simulate.pages.charts import ChartLine, ChartRow, intervals, lines, ticks
from rose_simulate.pages.study_page import page
from rose_simulate.runs.study import Result, study
from rose_simulate.verbs.studies import SCENARIOS, STUDIES, main
from tests.simulate.worlds import MATERIAL, scenario


@pytest.mark.parametrize("name", sorted({one for s in STUDIES.values() for one in s.scenarios}))
def test_every_scenario_of_a_study_can_be_read(name: str) -> None:
    assert read_scenario(SCENARIOS / f"{name}.yaml").name == name


def test_a_page_compares_with_the_paper_and_equal_results_give_equal_pages() -> None:
    setup = scenario(seeds=(1, 2), regimes=(Regime.FIXED, Regime.ROSE_PAPER, Regime.OURS))
    found = study(setup, MATERIAL, [0.5], lambda _one: None)
    made, again = (page("x", "(x)", "Says.", (found,), " --derate 0.5") for _ in range(2))
    assert made == again
    assert "`rose simulate study x --derate 0.5`" in made.text
    assert "| 0.5 | 2 | `ours` |" in made.text
    assert "small: useful tokens" in made.plots["x-small.svg"]
    assert made.text == again.text
    assert "| derate | slower | regime | 0 | 0.25 | 0.5 | 0.75 | 1 |" in made.text
    costs = made.text.split("by the price of a lent hour")[1].split("| 0.5 | 2 | `ours` | ")[1]
    shown = [float(cell) for cell in costs.split("\n")[0].rstrip(" |").split(" | ")]
    assert shown == sorted(shown)
    assert shown[0] < shown[-1]


def test_a_page_of_many_scenarios_says_what_streaming_brings_and_how_often_it_is_shown() -> None:
    regimes = (Regime.FIXED, Regime.ROSE_PAPER_DEDICATED, Regime.OURS)
    rounds = {"staleness": 0, "batch_groups": 2, "surplus": 0.5}
    found = []
    for name, streams in (("r", False), ("r-streams", True)):
        setup = scenario(seeds=(1, 2), regimes=regimes)
        jobs = tuple(job.model_copy(update=rounds | {"streams": streams}) for job in setup.jobs)
        changed = setup.model_copy(update={"name": name, "jobs": jobs})
        found.append(study(changed, MATERIAL, [0.5], lambda _one: None))
    text = page("rewards", "(x)", "Says.", found).text
    ours = [one.useful_tokens_per_s for one in found[0].outcomes if one.regime == Regime.OURS]
    assert f"| r | 0.5, 2 | {sum(ours) / 2:.0f} |" in text
    assert "(`rose-paper-dedicated`)" in text
    streamed = text.split("## A trainer that streams")[1]
    (row,) = [line for line in streamed.splitlines() if line.startswith("| r |")]
    both = [
        [one.useful_tokens_per_s for one in result.outcomes if one.regime == Regime.OURS]
        for result in found
    ]
    ratio = paired_ratio(both[1], both[0])
    assert f"{ratio.mean:.2f} [" in row.split(" | ")[4]
    assert "A gain is shown in" in streamed
    assert "of 3 cells" in streamed


def test_a_page_of_many_scenarios_tells_factors_apart_and_runs_that_made_nothing() -> None:
    """The second factor was left out, and a run without a token ended the page."""
    regimes = (Regime.FIXED, Regime.ROSE_PAPER_DEDICATED, Regime.OURS)
    whole = study(scenario(seeds=(1,), regimes=regimes), MATERIAL, [0.5], lambda _one: None)

    def at(factor: float, **more: float) -> Result:
        """The same at another factor; ``more`` of each job."""
        found = [
            msgspec.structs.replace(
                one,
                slowdown=factor,
                jobs=tuple(msgspec.structs.replace(job, **more) for job in one.jobs),
            )
            for one in whole.outcomes
        ]
        rows = (msgspec.structs.replace(one, slowdown=factor) for one in whole.rows)
        return msgspec.structs.replace(whole, rows=tuple(rows), outcomes=tuple(found))

    slower, idle = at(3.0), at(4.0, useful_tokens_per_s=0.0)
    both = msgspec.structs.replace(
        whole,
        rows=whole.rows + slower.rows + idle.rows,
        outcomes=whole.outcomes + slower.outcomes + idle.outcomes,
    )
    streams = msgspec.structs.replace(both, scenario=f"{both.scenario}-streams")
    text = page("rewards", "(x)", "Says.", (both, streams)).text
    table, streamed = text.split("## A trainer that streams")
    assert all(f"| {both.scenario} | 0.5, {one} | " in table for one in (2, 3, 4))
    assert f"| {both.scenario} | 0.5, 3 | 1.00 | 1.00 | 1.00 | " in streamed
    assert f"| {both.scenario} | 0.5, 4 |  |  |  |  |" in streamed
    assert "in 0 of 6 cells" in streamed


def test_a_page_says_what_is_computed_again_where_keys_are_kept_and_needs_no_other_regime() -> None:
    setup = scenario(seeds=(1,), regimes=(Regime.FIXED, Regime.OURS_KEPT))
    found = study(setup, MATERIAL, [0.5], lambda _one: None)
    text = page("kept", "(x)", "Says.", (found,)).text
    (row,) = [
        line for line in text.split("in no earlier turn")[1].splitlines() if "`ours-kept` |" in line
    ][:1]
    assert float(row.split(" | ")[4]) > 0, "fetched"
    assert row.endswith(" |  |"), "nothing to compare with"
    assert "in no earlier turn" in page("capacity", "(x)", "Says.", (found,)).text


def test_a_page_says_which_kind_of_work_went_to_which_kind_of_engine() -> None:
    setup = scenario(seeds=(1,), regimes=(Regime.FIXED, Regime.OURS))
    found = study(setup, MATERIAL, [0.5], lambda _one: None)
    jobs = [one.jobs[0] for one in found.outcomes if one.regime == Regime.OURS]
    assert 0 < jobs[0].borrowed_prefilled_tokens < jobs[0].prefilled_tokens
    lent = jobs[0].borrowed_prefilled_tokens / jobs[0].borrowed_tokens
    made = page("mixed", "(x)", "Says.", (found,)).text
    assert f" and {lent:.1f}.\n" in made.split("Prompt tokens computed per output token")[1]
    assert "Prompt tokens computed" not in page("x", "(x)", "Says.", (found,)).text


def test_a_page_compares_production_with_the_papers_rules_behind_the_same_gate() -> None:
    regimes = (Regime.FIXED, Regime.ROSE_PAPER_TAP, Regime.OURS)
    found = study(scenario(seeds=(1,), regimes=regimes), MATERIAL, [0.5], lambda _one: None)
    tokens = {one.regime: one.useful_tokens_per_s for one in found.outcomes}
    ratio = tokens[Regime.OURS] / tokens[Regime.ROSE_PAPER_TAP]
    assert f"whose gate is the same: {ratio:.2f}.\n" in page("attribution", "", "", (found,)).text
    assert "whose gate is the same" not in page("x", "", "", (found,)).text


def test_a_page_says_how_many_nodes_were_lost() -> None:
    nodes = Nodes(gpus=2, fail_every_s=40, back_s=10)
    setup = scenario(seeds=(1, 2), regimes=(Regime.FIXED, Regime.OURS), nodes=nodes)
    found = study(setup, MATERIAL, [0.5], lambda _one: None)
    lost = sum(one.node_failures for one in found.outcomes if one.regime == Regime.OURS)
    again = sum(one.restarted for one in found.outcomes if one.regime == Regime.OURS)
    made = page("x", "(x)", "Says.", (found,)).text
    assert f"Nodes lost, over seeds and derates: {lost}." in made
    assert f"`ours` {again}" in made
    calm = study(scenario(seeds=(1,)), MATERIAL, [0.5], lambda _one: None)
    assert "Nodes lost" not in page("x", "(x)", "Says.", (calm,)).text


def test_the_command_writes_result_page_and_plot(tmp_path: Path) -> None:
    text = (SCENARIOS / "correlated.yaml").read_text().replace("warmup_s: 300", "warmup_s: 5")
    text = text.replace("traces/", f"{SCENARIOS}/traces/").replace("replicas: 8", "replicas: 2")
    text = text.replace("borrowed: 8", "borrowed: 2").replace("dedicated: 4", "dedicated: 1")
    (tmp_path / "correlated.yaml").write_text(text)
    arguments = ["correlated", "--seconds", "20", "--seeds", "1", "--derate", "0.5"]
    arguments += ["--scenarios", str(tmp_path), "--regimes", "ours"]
    arguments += ["--out", str(tmp_path / "out"), "--pages", str(tmp_path / "pages")]
    assert main(arguments) == 0
    (result,) = json.loads((tmp_path / "out" / "study-correlated.json").read_text())
    assert result["scenario"] == "correlated"
    assert {row["regime"] for row in result["rows"]} == {"fixed", "ours"}
    text = (tmp_path / "pages/correlated.md").read_text()
    assert "--regimes ours --derate 0.5 --seeds 1 --seconds 20" in text


def test_a_missing_scenario_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["normal", "--scenarios", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert "normal.yaml: cannot be read" in capsys.readouterr().err


def test_charts_show_values_ends_and_names() -> None:
    rows = [ChartRow("a <b>", 1.1, 0.9, 1.3), ChartRow("b", 2.0)]
    svg = intervals("T", rows, unit="x", reference=1.0)
    assert "a &lt;b&gt;" in svg
    assert svg.count("<circle") == 2
    assert svg.count('stroke-width="5"') == 1
    drawn = lines(
        "T", [ChartLine("one", [(0, 1), (1, 2)]), ChartLine("two", [(0, 2)])], x="s", y="1"
    )
    assert drawn.count("<polyline") == 2
    assert lines("T", [], x="s", y="1").endswith("</svg>\n")
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(3 <= value <= 977 for value in ticks(3, 977))
