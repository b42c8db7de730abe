"""The whole loop against a fake lease URL that samples from the weights last published."""

import asyncio
import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from examples.grpo.errors import RoundTooLarge, TurnRefused
from examples.grpo.learner import Policy
from examples.grpo.progress import Progress
from examples.grpo.publishing import Published
from examples.grpo.run import Settings
from examples.grpo.train import main, parser, train
from rose_core.identity import WeightVersion
from rose_dev.models import Recipe, make_model
from rose_rewards.main import running
from rose_trainer.rounds import RoundShape

SMALL = Recipe(
    "nano", layers=1, hidden=32, intermediate=32, heads=2, kv_heads=1, head_size=16, context=128
)


class FakeLease:
    """An engine fleet of one: takes every publish up at once, answers with true log-probs."""

    def __init__(
        self, folder: Path, refuse_share: float = 0.0, status: int = 200, enough: int = 3
    ) -> None:
        self.stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._enough = enough
        self.policy = Policy(folder, learning_rate=0.0)
        self.version = "none"
        self.done: list[Published] = []
        self.status = status
        self._refuse_share = refuse_share
        self.reports: list[dict[str, list[str]]] = []
        self._random = random.Random(0)
        self._generator = torch.Generator().manual_seed(0)

    def publish(self, step: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightVersion:
        sequence = step
        version = WeightVersion("grpo", 1, sequence)
        state = {name: tensor.float() for name, tensor in tensors}
        self.policy.model.load_state_dict(state, strict=False)
        self.version = str(version)
        self.done.append(Published(step, version, 0.5, 1000, 0.01))
        if sequence >= self._enough:
            self._loop.call_soon_threadsafe(self.stop.set)
        return version

    def finished(self, *, wait: bool = False) -> list[Published]:
        result, self.done = self.done, []
        return result

    async def generate(self, request: web.Request) -> web.Response:
        if self.status != 200:
            return web.json_response({"error": {"message": "no such lease"}}, status=self.status)
        if self._random.random() < self._refuse_share:
            return web.Response(status=503, headers={"Retry-After": "0.02"})
        prompt = torch.tensor([(await request.json())["input_ids"]])
        with torch.no_grad():
            answer = self.policy._sample(prompt, self._generator)
            logprobs = self.policy.logprobs(torch.cat([prompt, answer], 1))[0, -answer.shape[1] :]
        tokens = answer[0].tolist()
        pairs = zip(logprobs.tolist(), tokens, strict=True)
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[value, token, None] for value, token in pairs],
            "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
            "rose": {"engines": [{"engine": "e", "kind": "Borrowed"}], "kv": "own"},
        }
        return web.json_response({"output_ids": tokens, "meta_info": meta})

    async def report(self, request: web.Request) -> web.Response:
        self.reports.append(await request.json())
        return web.json_response({"unknown": []})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(SMALL, tmp_path_factory.mktemp("models"))


async def run(
    lease: FakeLease, settings: Settings, out: Path, rewards: str = ""
) -> list[dict[str, object]]:
    app = web.Application()
    app.router.add_post("/generate", lease.generate)
    app.router.add_post("/trajectories", lease.report)
    async with TestServer(app) as server:
        with Progress(out, echo=None) as progress:
            url = str(server.make_url("/"))
            await train(settings, url, lease, progress, lease.stop, rewards=rewards)
    return [json.loads(line) for line in (out / "progress.jsonl").read_text().splitlines()]


def settings(folder: Path, seconds: float) -> Settings:
    return Settings(folder, seconds=seconds, per_step=2, group_size=2, evaluate_seconds=2.0)


async def test_a_run_steps_publishes_evaluates_and_ends_when_told(
    folder: Path, tmp_path: Path
) -> None:
    lease = FakeLease(folder, refuse_share=0.2)
    records = await run(lease, settings(folder, seconds=200.0), tmp_path)
    by_event: dict[object, list[dict[str, object]]] = {}
    for record in records:
        by_event.setdefault(record["event"], []).append(record)
    steps = by_event["step"]
    assert len(steps) >= 3
    assert all(0.0 <= float(str(step["staleness_max"])) <= 3.0 for step in steps)
    assert len(by_event["publish"]) == len(steps) + 1
    trained = [key for report in lease.reports for key in report["trained"]]
    assert len(trained) == len(set(trained)) >= len(steps)
    assert lease.reports[-1]["withdrawn"], "what was in flight at the end is said too"
    assert by_event["end"][-1]["unreported"] == 0
    end = by_event["end"][-1]
    assert end["reason"] == "stopped"
    assert int(str(end["tokens"])) > 0
    assert by_event["evaluation"][-1]["final"] is True
    # Published weights are bfloat16 on both sides, so trainer and engine agree but for rounding.
    mismatch = by_event["mismatch"][-1]
    assert int(str(mismatch["tokens"])) > 0
    assert float(str(mismatch["k3"])) < 1e-6
    assert set(mismatch["pools"]) == {"Borrowed"}  # type: ignore[call-overload]


async def test_a_run_takes_its_rewards_from_the_gateway_and_trains_on_late_ones_a_step_later(
    folder: Path, tmp_path: Path
) -> None:
    check = {"module": "examples.grpo.checks:score", "path": str(Path(__file__).parents[2])}
    (tmp_path / "functions.yaml").write_text(yaml.safe_dump({"grpo": check}))
    lease = FakeLease(folder)
    reported = replace(settings(folder, seconds=200.0), rounds=True, surplus=0.5, late=1)
    # As this process' user: the checkout may lie where others may not look.
    gateway = running(tmp_path / "functions.yaml", workers=1, first_user=0)
    async with gateway as (_, port):
        records = await run(lease, reported, tmp_path / "out", f"http://127.0.0.1:{port}")
    rounds = [record for record in records if record["event"] == "round"]
    steps = [record for record in records if record["event"] == "step"]
    assert len(rounds) >= len(steps) >= 3
    assert [record["late"] for record in rounds] == [0] + [1] * (len(rounds) - 1)
    assert {record["staleness_max"] for record in steps} <= {0, 1}
    assert any(record["staleness_max"] == 1 for record in steps), "late ones, by a publish"
    assert all(record["unscored"] == 0 for record in rounds)
    for step in steps:
        assert 0.0 < float(str(step["reward"])) < 1.0, "a random policy, judged by the function"


def test_late_rewards_ask_for_what_makes_them_late(capsys: pytest.CaptureFixture[str]) -> None:
    usual = ["--url", "http://lease", "--store", "store:1", "--out", "out"]
    for given, named in (
        (["--rewards", "http://rewards"], "--rewards: give --rounds too"),
        (["--rounds", "--late", "1"], "--late: give --rewards too"),
        (
            ["--rounds", "--rewards", "http://r", "--late", "1", "--max-age", "0"],
            "--late: give --max-age of at least 1",
        ),
    ):
        with pytest.raises(SystemExit):
            main([*usual, *given])
        assert named in capsys.readouterr().err


async def test_a_run_of_rounds_trains_on_them_and_reports_what_was_cut(
    folder: Path, tmp_path: Path
) -> None:
    lease = FakeLease(folder, refuse_share=0.2)
    reported = replace(
        settings(folder, seconds=200.0), rounds=True, surplus=0.5, member_surplus=0.5
    )
    records = await run(lease, reported, tmp_path)
    rounds = [record for record in records if record["event"] == "round"]
    steps = [record for record in records if record["event"] == "step"]
    assert len(rounds) >= len(steps) >= 3
    assert {record["kind"] for record in rounds} <= {"short", "long"}
    trained = [key for report in lease.reports for key in report["trained"]]
    dropped = [key for report in lease.reports for key in report["dropped"]]
    assert len(trained) == sum(int(str(record["trained"])) for record in rounds)
    assert len(dropped) == sum(int(str(record["cut"])) for record in rounds) > 0
    assert not set(trained) & set(dropped)
    assert records[-1]["reason"] == "stopped"


async def test_rounds_that_start_more_than_may_be_in_flight_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    reported = replace(settings(folder, seconds=60.0), rounds=True, concurrency=2)
    with pytest.raises(RoundTooLarge, match="starts 3 groups at once, --concurrency allows 2"):
        await run(FakeLease(folder), reported, tmp_path)


async def test_a_refusal_ends_the_run(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TurnRefused, match="no such lease"):
        await run(FakeLease(folder, status=404), settings(folder, seconds=60.0), tmp_path)


async def test_an_absent_router_is_waited_for_and_the_run_still_ends_cleanly(
    folder: Path, tmp_path: Path
) -> None:
    lease = FakeLease(folder)
    with Progress(tmp_path, echo=None) as progress:
        evaluation = await train(
            settings(folder, seconds=1.0), "http://127.0.0.1:1", lease, progress, lease.stop
        )
    assert not evaluation.learned
    last = json.loads((tmp_path / "progress.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "end"
    assert last["turns"] == 0
    assert last["reason"] == "time limit"
    assert last["unreachable"] > 0


def test_help_lists_the_knobs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    output = capsys.readouterr().out
    assert all(knob in output for knob in ("--max-age", "--rounds", "--member-surplus"))


def test_rounds_are_off_unless_asked_for_and_their_defaults_fit_the_concurrency() -> None:
    usual = ["--url", "http://lease", "--store", "store:1", "--out", "out"]
    assert parser().parse_args(usual).rounds is False
    reported = parser().parse_args([*usual, "--rounds"])
    shape = RoundShape(
        reported.per_step,
        reported.group_size,
        reported.surplus,
        reported.member_surplus,
        reported.late,
    )
    assert shape.started <= reported.concurrency
    assert shape.started_members > reported.group_size
