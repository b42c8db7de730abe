"""Scenario files and traces: what is wrong is named with file, line and field."""

import json
import random
import statistics
from pathlib import Path

import pytest

from rose_simulate.files.reading import read_arrivals, read_material, read_scenario
from rose_simulate.main import main
from rose_simulate.model.errors import Impossible, ScenarioError, TraceError
from rose_simulate.model.gpus.gates import ServingRequest
from rose_simulate.model.jobs.workload import (
    ALIKE,
    Episode,
    ServingArrival,
    bursts,
    episodes,
    group,
    replay,
)
from rose_simulate.model.regimes import RULES
from rose_simulate.model.scenarios.scenario import Regime, Scenario, Service
from rose_simulate.model.simulation import Simulation
from tests.simulate.worlds import EPISODES

SCENARIOS = Path(__file__).parents[2] / "simulate" / "scenarios"
NORMAL = (SCENARIOS / "normal.yaml").read_text()


def edited(tmp_path: Path, old: str, new: str) -> Path:
    assert old in NORMAL
    path = tmp_path / "edited.yaml"
    path.write_text(NORMAL.replace(old, new))
    return path


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_scenario_shipped_can_be_read_with_its_traces(path: Path) -> None:
    scenario = read_scenario(path)
    assert scenario.name == path.stem
    assert read_material(path, scenario).episodes


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("replicas: 16", "replicas: -1", "services.0.replicas"),
        ("replicas: 16", "replicaz: 16", "services.0.replicaz"),
        ("staleness: 1", "staleness: many", "jobs.0.staleness"),
        ("seeds: [1, 2, 3]", "seeds: [1, two, 3]", "seeds.1"),
    ],
)
def test_a_wrong_field_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, field: str
) -> None:
    path = edited(tmp_path, old, new)
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if new in text)
    with pytest.raises(ScenarioError) as caught:
        read_scenario(path)
    assert f"{path}:{line}: {field}: " in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("borrowed: 16", "borrowed: 17", "borrows 17 replicas of chat, which lends 16"),
        ("tpot_ms: 150", "tpot_ms: 6", "not above the solo latency"),
        ("ttft_ms: 500", "ttft_ms: 20", "not above the solo latency"),
        ("model: Qwen3-8B", "model: Qwen3-32B", "do not fit into rollout_memory_share"),
        ("model: Qwen3-8B", "model: GPT-9", "no measured costs of GPT-9"),
        ("device: H100", "device: H900", "no measured costs on H900"),
        ("borrows_from: chat", "borrows_from: chess", "no service 'chess'"),
        ("dedicated: 8", "dedicated: 0", "nothing would ever compute in the fixed pool"),
        ("jobs:\n", "contexts: {first: 900, most: 900}\njobs:\n", "no turn fits below most, 900"),
    ],
)
def test_the_impossible_is_refused_with_the_reason(
    tmp_path: Path, old: str, new: str, reason: str
) -> None:
    path = edited(tmp_path, old, new)
    with pytest.raises(Impossible) as caught:
        read_scenario(path)
    assert reason in str(caught.value)
    assert str(caught.value).startswith(f"{path}:")


@pytest.mark.parametrize("text", ["", "a: [", "- 1\n", "\x00"])
def test_files_that_are_no_scenario(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ScenarioError, match=r"broken\.yaml"):
        read_scenario(path)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("t_s,in_tokens,out_tokens\n0.1,5,6\n0.2,5", "truncated"),
        ("t_s,in_tokens,out_tokens\n0.1,5,6\n0.2,5\n", ":3: no row of"),
        ("a,b\n1,2\n", ":2: no row of"),
        ("t_s,in_tokens,out_tokens\n0.5,5,6\n0.2,5,6\n", "time goes back"),
        ("t_s,in_tokens,out_tokens\n", "no rows"),
    ],
)
def test_broken_traces_are_refused(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=what):
        read_arrivals(path)


def test_a_trace_cut_between_two_lines_is_refused_where_its_rows_are_known(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("t_s,in_tokens,out_tokens\n0.1,5,6\n0.2,5,6\n")
    assert len(read_arrivals(path)) == 2
    (tmp_path / "rows.json").write_text('{"trace.csv": 3}')
    with pytest.raises(TraceError, match=r"trace\.csv:3: truncated: 2 rows of 3"):
        read_arrivals(path)
    (tmp_path / "rows.json").write_text('{"trace.csv": 2}')
    assert len(read_arrivals(path)) == 2
    (tmp_path / "rows.json").write_text("[")
    with pytest.raises(TraceError, match=r"rows\.json: cannot be read"):
        read_arrivals(path)


def test_the_rows_of_every_trace_shipped_are_known() -> None:
    known = json.loads((SCENARIOS / "traces" / "rows.json").read_text())
    assert set(known) == {path.name for path in (SCENARIOS / "traces").glob("*.csv")}


def test_a_replay_has_the_wanted_rate_and_keeps_order() -> None:
    trace = [ServingArrival(n / 2, 100, 10) for n in range(200)]
    found = replay(trace, seconds=500, requests_per_s=5.0, offset_s=13, draw=random.Random(1))
    assert len(found) == pytest.approx(2500, rel=0.05)
    times = [one.arrived_ns for one in found]
    assert times == sorted(times)
    assert [one.number for one in found] == list(range(len(found)))


def test_prompts_are_spread_by_seed_and_arrivals_stay() -> None:
    scenario = read_scenario(SCENARIOS / "tight-spread.yaml")
    assert isinstance(scenario, Scenario)
    material = read_material(SCENARIOS / "tight-spread.yaml", scenario)
    (service,) = scenario.services
    plain = service.model_copy(
        update={"load": service.load.model_copy(update={"prompt_spread": 0.0})}
    )

    def requests(seed: int, asked: Service) -> list[ServingRequest]:
        chosen = scenario.model_copy(update={"services": (asked,), "seconds": 60.0})
        made = Simulation(chosen, RULES[Regime.FIXED], seed, material)
        return list(made.requests[service.name])

    rows, first, other = requests(1, plain), requests(1, service), requests(2, service)
    assert [(a.arrived_ns, a.output) for a in rows] == [(a.arrived_ns, a.output) for a in first]
    factors = [b.prompt / a.prompt for a, b in zip(rows, first, strict=True) if a.prompt > 1000]
    assert 0.79 < min(factors) < 0.85
    assert 1.15 < max(factors) < 1.21
    assert statistics.mean(factors) == pytest.approx(1.0, abs=0.03)
    assert max(a.prompt for a in first) != max(a.prompt for a in other)


def test_only_a_traces_prompts_are_spread(tmp_path: Path) -> None:
    path = edited(tmp_path, "trace: traces/", "prompt_spread: 0.2, burst_every_s: 60} #")
    with pytest.raises(Impossible, match="prompt_spread needs a trace"):
        read_scenario(path)


def test_a_burst_lies_inside_its_second() -> None:
    found = bursts(
        seconds=100, period_s=50, first_s=10, size=20, prompt=100, output=10, draw=random.Random(1)
    )
    assert len(found) == 40
    assert all(0 <= one.arrived_ns / 1e9 % 50 - 10 < 1 for one in found)


def test_siblings_resemble_each_other() -> None:
    draw = random.Random(3)
    pool = [EPISODES[n % 3] for n in range(300)]
    drawn = [group(tuple(pool), 8, draw) for _ in range(200)]
    alike = sum(one is some[0] for some in drawn for one in some[1:]) / (200 * 7)
    assert alike > ALIKE * 0.6


def test_episodes_are_rescaled_to_the_context_limit() -> None:
    rows = [
        {
            "episode": "0",
            "turn": str(n),
            "new_prompt_tokens": "90000",
            "out_tokens": "900",
            "env_gap_s": "500",
        }
        for n in range(9)
    ]
    (episode,) = episodes(rows, "rows")
    assert 1 < len(episode) < 9
    assert sum(turn.new + turn.output for turn in episode) <= 32_000
    assert all(turn.gap_s <= 120 for turn in episode)


def test_a_scenario_may_shorten_contexts(tmp_path: Path) -> None:
    text = "episodes: traces/weka_episodes_400.csv"
    path = edited(tmp_path, text, f"{text}\ncontexts: {{first: 1000, most: 8000}}")
    path.write_text(path.read_text().replace("traces/", f"{SCENARIOS}/traces/"))
    short = read_material(path, read_scenario(path)).episodes
    usual = read_material(SCENARIOS / "normal.yaml", read_scenario(SCENARIOS / "normal.yaml"))
    assert {episode[0].new for episode in short} == {1000}
    assert max(map(length, short)) <= 8000 < max(map(length, usual.episodes)) <= 32_000


def length(episode: Episode) -> int:
    return sum(turn.new + turn.output for turn in episode)


def test_the_verb_runs_a_scenario_and_writes_the_same_bytes_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(SCENARIOS / "normal.yaml"), "--seconds", "40", "--seeds", "5", "--warmup", "0"]
    arguments += ["--regimes", "fixed", "ours", "--derate", "0.5", "--out", str(tmp_path)]
    assert main(arguments) == 0
    first = (tmp_path / "normal.json").read_bytes()
    assert main(arguments) == 0
    assert (tmp_path / "normal.json").read_bytes() == first
    assert "ours" in capsys.readouterr().out
    assert main([str(tmp_path / "none.yaml")]) == 1
    assert main([str(SCENARIOS / "normal.yaml"), "--derate", "3"]) == 2


@pytest.mark.parametrize(
    ("flag", "value"), [("--seconds", "-5"), ("--seconds", "0"), ("--warmup", "-1")]
)
def test_what_a_flag_says_is_held_to_the_fields_bounds(
    capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    assert main([str(SCENARIOS / "normal.yaml"), "--check", flag, value]) == 1
    assert f"{flag}: Input should be greater than" in capsys.readouterr().err
