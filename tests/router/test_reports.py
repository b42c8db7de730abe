"""What adapters and hooks tell a real router of their trajectories, and what its meter shows."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web

from rose_core.rollouts.trajectories.prospects import Trajectory
from rose_trainer.adapters import report as reports
from rose_trainer.adapters import skyrl, slime, verl
from rose_trainer.adapters.report import finish_async, report, report_async
from rose_trainer.adapters.turns import Turns
from tests.router.conftest import Stage
from tests.router.pushing import PROMPT, json_of
from tests.router.test_verl import SAMPLING, TokenOutput, client_of

Make = Callable[..., AbstractAsyncContextManager[Stage]]
SHORT = {**SAMPLING, "max_tokens": 4}


def remembered(s: Stage) -> Mapping[str, Trajectory]:
    return s.router.service.prospects._trajectories


async def meter(s: Stage) -> tuple[dict[str, int], Any]:
    """Counts over all trajectories and both arms, and what was inferred."""
    shown = await s.get("/trajectories")
    rows = [row for row in shown["inclusion"] if row["dimension"] == "all"]
    counts = {
        fate: sum(row[arm][fate] for row in rows for arm in ("any", "dedicated"))
        for fate in ("trained", "dropped", "lost")
    }
    return counts, shown["inferred"]


@dataclass
class Output:
    """verl's output of an agent loop."""

    extra_fields: dict[str, Any] = field(default_factory=dict)


async def loop(client: verl.Client, *sessions: str) -> Output:
    """An agent loop of two turns for each session."""
    for session in sessions:
        for _ in range(2):
            made = await client.generate(session, prompt_ids=PROMPT, sampling_params=SHORT)
            assert isinstance(made, TokenOutput)
    return Output()


async def test_verls_agent_loops_name_their_group_and_their_end(stage: Make) -> None:
    async with stage() as s:
        await s.engine()
        client = client_of(s)
        output = await verl.reported(client, "uid-1", loop(client, "a", "b"), validate=False)
        assert output.extra_fields[verl.SESSIONS] == "a\nb"
        assert {name: (one.group, one.over) for name, one in remembered(s).items()} == {
            "a": ("uid-1", True),
            "b": ("uid-1", True),
        }
        assert (await meter(s))[1]["ends"] == 0
        await client._turns.close()


async def test_what_verls_actors_are_given_is_in_the_meter_with_its_rewards(stage: Make) -> None:
    async with stage() as s:
        await s.engine()
        client = client_of(s)
        rows = await asyncio.gather(
            *(
                verl.reported(client, "uid-1", loop(client, f"t{n}"), validate=False)
                for n in range(3)
            )
        )
        batch = {
            verl.SESSIONS: [row.extra_fields[verl.SESSIONS] for row in rows[:2]],
            "token_level_scores": torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        }
        updated = verl.reporting(len, dict.get, lambda t: report(s.url, t))
        assert await asyncio.to_thread(updated, batch) == 2
        counts, inferred = await meter(s)
        assert counts == {"trained": 2, "dropped": 0, "lost": 0}
        assert inferred["joined_a_group"] == inferred["ends"] == 0
        shown = await s.get("/trajectories")
        strata = {row["stratum"] for row in shown["inclusion"] if row["dimension"] == "reward"}
        assert strata == {"above 0", "0 or less"}
        assert list(remembered(s)) == ["t2"]  # filtered out: nothing was said of it
        await client._turns.close()


@pytest.mark.parametrize(("correct", "count"), [(None, 1), (["a", "b"], 2), ([], 0)])
async def test_a_trainer_says_which_answers_are_correct_or_their_rewards_do(
    stage: Make, correct: list[str] | None, count: int
) -> None:
    async with stage() as s:
        await s.engine()
        client = client_of(s)
        await verl.reported(client, "uid-1", loop(client, "a", "b", "c"), validate=False)
        trained = {"a": 0.7, "b": 1.0}
        assert await report_async(s.url, trained, {"c": 1.0}, correct=correct)
        assert s.router.service.ledger.totals.accepted == 2
        assert s.router.service.ledger.totals.correct == count
        totals = s.router.service.ledger.totals
        written = totals.trained_tokens
        assert 0 < written < totals.tokens, "the tokens of two of three trajectories"
        again = await asyncio.to_thread(lambda: report(s.url, trained, correct=correct))
        assert again
        assert totals.correct == count, "each counts once"
        assert totals.trained_tokens == written
        await client._turns.close()


async def test_a_trainer_says_which_tokens_come_before_an_answer(stage: Make) -> None:
    async with stage() as s:
        await s.engine()
        client = client_of(s)
        await verl.reported(client, "uid-1", loop(client, "a", "b", "c"), validate=False)
        found = {"a": 3, "b": 10**6, "c": 3}
        assert await report_async(s.url, {"a": 1.0, "b": 1.0}, {"c": 1.0}, reasoning=found)
        totals = s.router.service.ledger.totals
        assert 3 < totals.reasoning_tokens < totals.trained_tokens, "at most a trajectory's own"
        async with aiohttp.ClientSession() as session:
            for wrong in ("many", 10**400):
                body = {"trained": ["a"], "reasoning": {"a": wrong}}
                async with session.post(f"{s.url}/trajectories", json=body) as reply:
                    assert (reply.status, "reasoning: expected" in await reply.text()) == (
                        400,
                        True,
                    )
        await client._turns.close()


async def test_verls_evaluations_are_not_counted_as_lost(stage: Make) -> None:
    async with stage() as s:
        await s.engine()
        client = client_of(s)
        await verl.reported(client, "uid-1", loop(client, "evaluated"), validate=True)
        assert not remembered(s)
        assert (await meter(s))[0] == {"trained": 0, "dropped": 0, "lost": 0}
        await client._turns.close()


async def test_a_loop_of_verls_that_fails_has_ended_too(stage: Make) -> None:
    async with stage() as s:
        await s.engine()
        client = client_of(s)

        async def failing() -> Output:
            await loop(client, "a")
            raise KeyError("a tool of the user's")

        with pytest.raises(KeyError):
            await verl.reported(client, "uid-1", failing(), validate=False)
        assert remembered(s)["a"].over
        await client._turns.close()


def test_a_batch_of_verls_without_sessions_reports_nothing() -> None:
    received: list[dict[str, float | None]] = []
    verl.reporting(lambda _: None, dict.get, received.append)({})
    assert received == [{}]


def test_a_batch_that_cannot_be_read_is_trained_on_all_the_same() -> None:
    received: list[dict[str, float | None]] = []
    actors = verl.reporting(len, dict.get, received.append)
    assert actors({verl.SESSIONS: ["a", "b"], "token_level_scores": torch.ones(1, 4)}) == 2
    convert = skyrl.reporting_conversion(lambda _, output, uids: len(uids), received.append)
    assert convert(None, {"rewards": [object()]}, ["7"]) == 1
    assert received == [{}, {}]


def test_a_batch_of_verls_whose_rows_are_of_one_session_says_so_once() -> None:
    assert verl.outcomes("a", torch.tensor([[1.0], [1.0]])) == {"a": 1.0}


class RemoteInferenceClient:
    """SkyRL's, as far as its turns matter."""

    def __init__(self, s: Stage) -> None:
        self.s = s

    async def _post(self, url: str, json: object, headers: Mapping[str, str] | None = None) -> Any:  # noqa: ANN401  # JSON
        return await json_of(self.s.http.post(url, json=json, headers=headers))


class RayPPOTrainer:
    """SkyRL's, as far as a step's batch matters."""

    def convert_to_training_input(self, output: Mapping[str, Any], uids: Sequence[str]) -> str:
        return f"batch of {len(uids)}"


async def test_skyrl_names_its_groups_and_what_a_step_is_made_of(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("weight_sync", "client", "trainer")
    modules = {f"skyrl_{name}": SimpleNamespace() for name in names}
    modules["skyrl_client"].RemoteInferenceClient = type("C", (RemoteInferenceClient,), {})
    modules["skyrl_trainer"].RayPPOTrainer = type("T", (RayPPOTrainer,), {})
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    async with stage() as s:
        await s.engine()
        monkeypatch.setenv("ROSE_ROUTER_URL", s.url)
        for _ in range(2):  # once in the hook of every process, once by hand
            skyrl.install(*modules)
        client = modules["skyrl_client"].RemoteInferenceClient(s)
        body = {"sampling_params": {"max_tokens": 4}, "model": "policy", "token_ids": PROMPT}
        for uid in ("7", "8"):
            for repetition in range(2):
                key = {"X-Session-ID": f"{uid}_{repetition}"}
                url = f"{s.url}/inference/v1/generate"
                await client._post(url, json=body, headers=key)
                ended = s.http.post(
                    f"{s.url}/finish_session", params={"session_id": key["X-Session-ID"]}
                )
                async with ended as reply:
                    assert reply.status == 200
        groups = {name: one.group for name, one in remembered(s).items()}
        assert groups == {"7_0": "7", "7_1": "7", "8_0": "8", "8_1": "8"}
        output = {"rewards": [[0.0, 1.0], [0.0]], "trajectory_ids": None}  # "8" was filtered out
        trainer = modules["skyrl_trainer"].RayPPOTrainer()
        made = await asyncio.to_thread(trainer.convert_to_training_input, output, ["7", "7"])
        assert made == "batch of 2"
        counts, inferred = await meter(s)
        assert counts == {"trained": 2, "dropped": 0, "lost": 0}
        assert inferred["joined_a_group"] == inferred["ends"] == 0


def test_the_steps_of_one_skyrl_trajectory_add_up() -> None:
    same = SimpleNamespace(repetition_id=3)
    assert skyrl.outcomes(["7", "7"], [0.5, 1.0], [same, same]) == {"7_3": 1.5}


def test_a_skyrl_without_its_trainer_still_publishes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "skyrl_weight_sync", weights)
    monkeypatch.setenv("ROSE_ROUTER_URL", "http://127.0.0.1:9")
    skyrl.install("skyrl_weight_sync", "no_such_client", "no_such_trainer")
    assert weights.get_transfer_strategy_cls() is skyrl.Strategy
    assert "no_such_trainer" in caplog.text


@dataclass
class Sample:
    """Stand-in for slime's class of that name."""

    session_id: str | None
    reward: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    remove_sample: bool = False


async def test_slimes_own_hooks_say_what_was_trained_on_and_what_its_filters_dropped(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [Sample("a", 1.0), Sample("b", 0.0), Sample("c", 0.0, remove_sample=True)]
    filtered = [Sample("d", 0.0), Sample("e", {"score": 1.0}), Sample(None, 1.0)]
    groups: list[Any] = [kept, [filtered]]  # the second as a custom generate function gives it
    async with stage() as s:
        await s.engine()
        monkeypatch.setenv("ROSE_ROUTER_URL", s.url)
        for key in "abcde":
            await json_of(s.post("/generate", GENERATE, headers={"X-SMG-Routing-Key": key}))
        args = SimpleNamespace(reward_key=None)
        slime.mark_trained(args, groups[:1])
        await asyncio.to_thread(slime.report_samples, args, groups, None)
        counts, inferred = await meter(s)
        assert counts == {"trained": 2, "dropped": 3, "lost": 0}
        assert inferred["joined_a_group"] == 4  # slime names no group; equal prompts are one
        assert not any(sample.metadata for sample in kept)


def test_a_reward_of_several_is_read_by_slimes_reward_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received: list[Any] = []
    monkeypatch.setenv("ROSE_ROUTER_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(slime, "report", lambda *given, **_: received.append(given[1:]))
    groups = [[Sample("a", {"score": 0.5}), Sample("b")]]
    slime.mark_trained(None, groups)
    slime.report_samples(SimpleNamespace(reward_key="score"), groups, None)
    assert received == [({"a": 0.5, "b": None}, {})]


GENERATE = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}}
VLLM = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}}


@pytest.mark.parametrize(
    ("path", "body", "header"),
    [
        ("/generate", GENERATE, "X-SMG-Routing-Key"),  # slime
        ("/inference/v1/generate", VLLM, "X-Session-ID"),  # prime-rl
    ],
)
async def test_a_hook_fills_the_meter_of_a_trainer_that_only_speaks_http(
    stage: Make, path: str, body: Mapping[str, Any], header: str
) -> None:
    async with stage() as s:
        await s.engine()
        for key in ("a", "b", "c"):
            await json_of(s.post(path, body, headers={header: key}))
            assert await finish_async(s.url, key)
        assert await report_async(s.url, {"a": 1.0}, {"b": None}, withdrawn=["c"])
        counts, inferred = await meter(s)
        assert counts == {"trained": 1, "dropped": 1, "lost": 0}
        assert inferred["ends"] == 0
        assert not remembered(s)


async def test_areals_turns_have_a_name_once_its_request_carries_one(stage: Make) -> None:
    async with stage() as s:
        await s.engine()
        await json_of(s.post("/generate", {**GENERATE, "session_id": "a"}))
        assert await asyncio.to_thread(report, s.url, {"a": 0.0})
        assert (await meter(s))[0] == {"trained": 1, "dropped": 0, "lost": 0}


async def test_a_report_brings_the_callers_token(stage: Make, tmp_path: Any) -> None:  # noqa: ANN401  # Path
    tokens = tmp_path / "tokens"
    tokens.write_text("a word-a\n")
    async with stage(turn_token_file=tokens) as s:
        await s.engine()
        turns = Turns(s.url, "word-a")
        await turns.ask("t", PROMPT, {"max_new_tokens": 4}, "group")
        await turns.close()
        assert not await asyncio.to_thread(report, s.url, {"t": 1.0})
        assert await asyncio.to_thread(report, s.url, {"t": 1.0}, token="word-a")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "no url at all"])
async def test_a_router_that_is_away_is_asked_a_few_times_and_never_raises(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reports, "_PAUSE_SECONDS", 0.0)
    assert not await asyncio.to_thread(report, url, {"a": 1.0})
    assert not await report_async(url, {"a": 1.0})
    assert caplog.text.count("was not reached") == 2


class Flaky:
    """A router that answers with these, one after the other."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers = list(answers)
        self.bodies: list[Any] = []

    async def serve(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        status, text = self.answers.pop(0)
        return web.Response(status=status, text=text)

    async def start(self) -> tuple[str, web.AppRunner]:
        app = web.Application()
        app.router.add_post("/trajectories", self.serve)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}", runner


@pytest.mark.parametrize(
    ("answers", "taken"),
    [
        ([(503, "leaving"), (200, '{"unknown": []}')], True),
        ([(400, "wrong")], False),
        ([(503, ""), (503, ""), (503, "")], False),
        ([(200, "no JSON")] * 3, False),
    ],
)
async def test_a_report_is_tried_again_where_that_may_help(
    answers: list[tuple[int, str]], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_PAUSE_SECONDS", 0.0)
    for blocking in (True, False):
        flaky = Flaky(*answers)
        url, runner = await flaky.start()
        found: dict[str, float | None] = {"a": 1.0, "b": math.nan, "c": None}
        if blocking:
            assert await asyncio.to_thread(report, url, found) is taken
        else:
            assert await report_async(url, found) is taken
        assert not flaky.answers
        assert flaky.bodies[0]["rewards"] == {"a": 1.0}  # what is not known is not said
        await runner.cleanup()
