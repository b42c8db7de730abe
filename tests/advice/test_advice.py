"""What a pool could lend, from its load: figures, intervals, refusals, the pool that follows."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml

from rose_core.api import ServingPool
from rose_simulate.advice.errors import TelemetryError, TooLittle
from rose_simulate.advice.estimate import Assumed, estimate
from rose_simulate.advice.recommend import Goal, recommend
from rose_simulate.advice.telemetry import LoadTelemetry
from rose_simulate.verbs.advise import PERCENTS, main, read

HOUR = 3600.0
GOAL = Goal("prod", "chat", {"app": "chat"}, ttft_ms=500, tpot_ms=150)


def rows(
    hours: float = 30, replicas: int = 8, idle: float = 0.7, p99: str = "", seed: int = 1
) -> str:
    draw = random.Random(seed)
    lines = ["t_s,replica,busy_share,requests,slow,ttft_p99_ms"]
    served = [0] * replicas
    for minute in range(int(hours * 60)):
        for number in range(replicas):
            busy = min(1.0, max(0.0, 1 - idle + draw.uniform(-0.1, 0.1)))
            served[number] += draw.randrange(20)
            lines.append(f"{60 * minute},r{number},{busy:.3f},{served[number]},0,{p99}")
    return "\n".join(lines) + "\n"


def telemetry(
    tmp_path: Path, text: str, name: str = "load.csv", meaning: str = ""
) -> LoadTelemetry:
    path = tmp_path / name
    path.write_text(text)
    return read(path, meaning)


def prometheus(name: str = "vllm:num_requests_running", status: str = "success") -> str:
    draw = random.Random(2)
    result = [
        {
            "metric": {"__name__": name, "pod": f"p{number}"},
            "values": [[15 * at, str(int(draw.random() < 0.4))] for at in range(400)],
        }
        for number in range(4)
    ]
    answer = {"status": status, "data": {"resultType": "matrix", "result": result}}
    return json.dumps(answer)


def test_lendable_hours_follow_from_the_idle_share(tmp_path: Path) -> None:
    found = estimate(telemetry(tmp_path, rows()), Assumed(gpus=2), PERCENTS)
    half = next(one for one in found.options if one.percent == 50)
    # 4 of 8 replicas, 70 % idle, two GPUs, less 60 ms at each of 9.5 requests a minute.
    expected = 4 * 2 * 24 * (0.7 - 9.5 / 60 * 0.06)
    assert half.gpu_hours.value == pytest.approx(expected, rel=0.01)
    assert half.gpu_hours.low < half.gpu_hours.value < half.gpu_hours.high
    assert half.exposed.value == pytest.approx(0.5 * 0.7, abs=0.01)
    assert len(found.by_hour) == 24


def test_equal_telemetry_gives_equal_intervals(tmp_path: Path) -> None:
    seen = telemetry(tmp_path, rows(hours=4))
    assert estimate(seen, Assumed(), PERCENTS) == estimate(seen, Assumed(), PERCENTS)


def test_moments_of_a_gauge_are_read_and_the_doubt_is_said(tmp_path: Path) -> None:
    seen = telemetry(tmp_path, prometheus(), "load.json")
    found = estimate(seen, Assumed(), PERCENTS)
    assert seen.replicas == ("p0", "p1", "p2", "p3")
    assert found.idle.value == pytest.approx(0.6, abs=0.05)
    assert any("moments 15 s apart" in one for one in found.caveats)
    assert all(one.at_risk is None for one in found.options)


def test_a_recorded_percentile_far_from_the_limit_bounds_the_risk(tmp_path: Path) -> None:
    seen = telemetry(tmp_path, rows(p99="200"))
    found = estimate(seen, Assumed(ttft_ms=500), PERCENTS)
    whole = found.options[-1]
    assert whole.at_risk is not None
    assert whole.at_risk.value == pytest.approx(0.01 * 0.7, rel=0.05)
    advice = recommend(found, Goal("p", "n", {"a": "b"}, ttft_ms=500, budget_share=0.5))
    assert advice.pool["spec"]["mode"] == "Lend"
    assert advice.option is not None
    assert advice.option.percent == 50


def test_an_unknown_risk_gives_a_canary_and_the_pool_is_a_valid_one(tmp_path: Path) -> None:
    advice = recommend(estimate(telemetry(tmp_path, rows()), Assumed(), PERCENTS), GOAL)
    pool = ServingPool.model_validate(advice.pool)
    assert pool.spec.lending is not None
    assert pool.spec.lending.max_replicas_percent == 25
    assert "canary" in advice.reasons[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ttft_ms": 0, "tpot_ms": 0}, "no SLO"),
        ({"percentile": 100}, "missed already"),
    ],
)
def test_it_goes_on_watching_where_lending_cannot_be_justified(
    tmp_path: Path, changes: dict[str, int], reason: str
) -> None:
    goal = Goal(**(GOAL.__dict__ | changes))
    advice = recommend(estimate(telemetry(tmp_path, rows(hours=4)), Assumed(), PERCENTS), goal)
    assert advice.pool["spec"]["mode"] == "Observe"
    assert reason in advice.reasons[0]


def test_a_busy_pool_is_not_lent(tmp_path: Path) -> None:
    seen = telemetry(tmp_path, rows(hours=4, idle=0.0))
    found = estimate(seen, Assumed(), PERCENTS)
    assert recommend(found, GOAL).pool["spec"]["mode"] == "Observe"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("t_s,replica\n1,a\n", ":2: neither running nor busy_share"),
        ("a,b\n1,2\n", ":1: no column replica, t_s"),
        ("t_s,replica,busy_share\n0,a,1.5\n", ":2: busy_share: 1.5 does not lie"),
        ("t_s,replica,busy_share\n0,a,x\n", ":2: busy_share: 'x' is no number"),
        ("t_s,replica,running\n0,a,-1\n", ":2: running: -1 is negative"),
        ("t_s,replica,busy_share\n0,,0.5\n", ":2: replica: is missing"),
        ("t_s,replica,busy_share\n0,a,0.5", "truncated"),
        ('{"status": "success"', "no JSON, or cut off"),
        ('{"rows": 1}', "no field status"),
        (prometheus(status="error"), "Prometheus answered error"),
        (prometheus(name="up"), "up does not say what it is"),
        ('{"status":"success","data":{"resultType":"vector","result":[]}}', "not matrix"),
    ],
)
def test_bad_telemetry_is_refused_with_its_place(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(TelemetryError) as caught:
        telemetry(tmp_path, text, "bad")
    assert reason in str(caught.value)
    assert "bad" in str(caught.value)


def test_too_little_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TooLittle):
        telemetry(tmp_path, "t_s,replica,busy_share\n0,a,0.5\n60,a,0.4\n")


def test_the_verb_prints_options_and_writes_the_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load, pool, found = tmp_path / "load.csv", tmp_path / "pool.yaml", tmp_path / "found.json"
    load.write_text(rows(hours=4))
    arguments = ["--telemetry", str(load), "--ttft", "500", "--label", "app=chat"]
    assert main([*arguments, "--pool", str(pool), "--json", str(found)]) == 0
    shown = capsys.readouterr().out
    assert "GPU-hours a day [95 %]" in shown
    assert "less than a day was recorded" in shown
    assert yaml.safe_load(pool.read_text())["spec"]["selector"]["matchLabels"] == {"app": "chat"}
    assert json.loads(found.read_text())["estimate"]["replicas"] == 8
    assert main(["--telemetry", str(tmp_path / "none")]) == 1
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--percentile", "150"],
        ["--gpus", "0"],
        ["--stop-ms", "-1"],
        ["--budget-share", "7"],
        ["--ttft", "-1"],
        ["--label", "app"],
    ],
)
def test_figures_that_cannot_be_are_refused_by_their_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--telemetry", str(tmp_path / "load.csv"), *wrong])
    assert f"argument {wrong[0]}: " in capsys.readouterr().err


def _of_agents(*, restarted: bool = False) -> str:
    """Shares of four replicas as two agents export them: ``pod`` and ``instance`` are theirs."""
    draw = random.Random(3)
    result = []
    for number in range(4):
        values = [[60 * at, f"{draw.uniform(0.2, 0.5):.3f}"] for at in range(300)]
        labels = {"pool": "prod/chat", "replica": f"prod/chat-{number}"}
        agent = {"pod": f"rose-agent-{number % 2}", "instance": f"10.0.0.{number % 2}:9404"}
        result.append({"metric": labels | agent, "values": values})
        if restarted:
            result.append({"metric": labels | {"pod": "rose-agent-9"}, "values": values[-1:]})
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}})


def test_series_of_agents_are_told_apart_by_replica(tmp_path: Path) -> None:
    seen = telemetry(tmp_path, _of_agents(), "load.json", "busy_share")
    assert seen.replicas == tuple(f"prod/chat-{number}" for number in range(4))
    assert not seen.moments


def test_two_series_of_one_replica_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(TelemetryError) as caught:
        telemetry(tmp_path, _of_agents(restarted=True), "load.json", "busy_share")
    assert "replica prod/chat-0 has two samples at 17940 s" in str(caught.value)
    assert "sum by (replica)" in str(caught.value)


def test_what_prometheus_calls_nan_is_no_sample(tmp_path: Path) -> None:
    answer = json.loads(prometheus())
    whole = telemetry(tmp_path, json.dumps(answer), "whole.json")
    for series in answer["data"]["result"]:
        for pair in series["values"][::4]:
            pair[1] = "NaN"
    doubted = telemetry(tmp_path, json.dumps(answer), "doubted.json")
    assert len(doubted.samples) == len(whole.samples) * 3 // 4
    assert doubted.coverage == pytest.approx(0.75, abs=0.01)
