"""verl's calls in its order: actors publish, agent loops ask for turns, steps come back.

Store, publisher and router are the real ones. The engines are fake and get versions by ``follow``,
which plays weight-sync. ``TokenOutput`` has the fields of verl's. Read from verl-project/verl
1dda039b9, 2026-08-22 (0.10.0.dev); look there again when that is old.
"""

from __future__ import annotations

import asyncio
import importlib
import pickle
import sys
import types
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rose_dev.waiting import until
from rose_engines.fake.model import Prefix
from rose_trainer.adapters import verl
from rose_trainer.adapters.turns import Turns
from rose_trainer.errors import TurnRefused, Unsupported
from rose_trainer.publisher import Publisher
from rose_weights.receive.client import WeightsClient
from tests.router.conftest import Fake, Stage
from tests.trainer.test_publisher import RunningStore

Make = Callable[..., AbstractAsyncContextManager[Stage]]
PROMPT = [3, 1, 4, 1, 5]
# AgentLoopWorker.generate_sequences
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}


@dataclass
class TokenOutput:
    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None
    num_preempted: int | None
    extra_fields: dict[str, Any]


class Actors:
    """The actors' worker group: two ranks, each with a checkpoint engine of its own."""

    def __init__(self, router: str, publisher: Callable[[], Publisher]) -> None:
        self.drained = 0
        self.engines = [
            verl.CheckpointEngine(
                bucket_size=1 << 20, is_master=rank == 0, router=router, publisher=publisher
            )
            for rank in range(2)
        ]

    def per_tensor(self, value: float) -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.full((8, 4), value)
        yield "layer.weight", buffer
        buffer.fill_(float("nan"))
        self.drained += 1

    def update_weights(self, *, global_steps: int, mode: str) -> list[Awaitable[object]]:
        assert mode == "rose"
        return [
            engine.send_weights(self.per_tensor(float(global_steps)), global_steps=global_steps)
            for engine in self.engines
        ]


def get(calls: list[Any]) -> Iterable[object]:
    """What ``ray.get`` is there."""
    return [asyncio.run(call) for call in calls]


async def follow(store: RunningStore, engines: list[Fake]) -> None:
    async with WeightsClient(store.address, token="t") as client:
        async for head in client.watch("run"):
            for engine in engines:
                engine.scheduler.session._version = str(head.version)
                engine.owner.send(version=str(head.version), head=str(head.version))


def pace(engines: list[Fake], seconds: float) -> None:
    for engine in engines:
        engine.scheduler.token_seconds = seconds


def client_of(s: Stage) -> verl.Client:
    made = verl.Client(Turns(s.url), TokenOutput, prompt_length=16, response_length=24)
    sent: verl.Client = pickle.loads(pickle.dumps(made))  # noqa: S301  # as Ray hands it on
    return sent


def right(output: TokenOutput) -> bool:
    prefix = Prefix(PROMPT)
    for span in output.extra_fields["weight_versions"]:
        for index in range(span["start"], span["end"]):
            token, _ = prefix.next_token(span["version"])
            if token != output.token_ids[index]:
                return False
            prefix.append(token)
    return True


async def test_verl_publishes_from_its_actors_and_reads_its_steps_in_every_turn(
    stage: Make, store: RunningStore
) -> None:
    async with stage() as s:
        engines = [await s.engine(name, token_seconds=0.01) for name in ("a", "b")]
        actors = Actors(s.url, lambda: Publisher(store.address, "run", token="t"))
        following = asyncio.create_task(follow(store, engines))
        client = client_of(s)
        metrics = await asyncio.to_thread(verl.published, actors, 5, get)
        assert metrics == {} == await metrics
        assert actors.drained == 2
        await until(lambda: {str(e.version) for e in s.router.service.fleet} == {"run@1.0"})
        first = await client.generate(
            "trajectory-1",
            prompt_ids=PROMPT,
            sampling_params={**SAMPLING, "logprobs": True},
            image_data=None,
            video_data=None,
            priority=3,
        )
        assert len(first.token_ids) == len(first.log_probs) == 24  # min(24, 16 + 24 - 5)
        assert first.stop_reason == "length"
        assert right(first)
        assert first.extra_fields["min_global_steps"] == 5
        pace(engines, 0.2)
        asked = asyncio.create_task(
            client.generate(
                "trajectory-1", prompt_ids=PROMPT, sampling_params={**SAMPLING, "max_tokens": 60}
            )
        )
        await until(lambda: any(turn.leg and turn.leg.placed for turn in s.router.service.ledger))
        await asyncio.to_thread(verl.published, actors, 9, get)
        await until(lambda: {str(e.version) for e in s.router.service.fleet} == {"run@1.1"})
        pace(engines, 0.002)
        over = await asked
        assert over.log_probs is None
        assert right(over)
        steps = [over.extra_fields[f"{word}_global_steps"] for word in ("min", "max")]
        assert steps == [5, 9]
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await client._turns.close()
        for engine in actors.engines:
            await asyncio.to_thread(engine.close)


async def test_a_turn_is_asked_for_again_and_keeps_what_it_had(stage: Make) -> None:
    async with stage() as s:
        engine = await s.engine(token_seconds=0.003, version="run@1.0")
        client = client_of(s)
        sampling = {**SAMPLING, "max_tokens": 150}
        asked = asyncio.create_task(
            client.generate("t", prompt_ids=PROMPT, sampling_params=sampling)
        )
        await until(lambda: any(turn.leg and turn.leg.placed for turn in s.router.service.ledger))
        s.router.service.abort_all()
        output = await asked
        assert len(output.token_ids) == 150
        assert right(output)
        assert len(output.extra_fields["weight_versions"]) == 2
        assert engine.scheduler.counters.requests == 2
        await client._turns.close()


async def test_what_a_lease_cannot_do_is_refused_by_name(stage: Make) -> None:
    async with stage() as s:
        await s.engine()
        client = client_of(s)
        with pytest.raises(Unsupported, match="image_data"):
            await client.generate("t", prompt_ids=[1], sampling_params={}, image_data=["x"])
        with pytest.raises(Unsupported, match="prompt_logprobs"):
            await client.generate("t", prompt_ids=[1], sampling_params={"prompt_logprobs": 0})
        with pytest.raises(TurnRefused, match="HTTP 400"):
            await client.generate("t", prompt_ids=[-1], sampling_params={})
        with pytest.raises(Unsupported, match="store"):
            await verl.CheckpointEngine().receive_weights()
        await client._turns.close()


class Manager:
    """What verl's managers of agent loops are given."""

    def __init__(self, config: object, llm_client: object, teacher_client: object = None) -> None:
        self.config, self.llm_client, self.teacher_client = config, llm_client, teacher_client


class Worker:
    """verl's worker of agent loops."""

    def __init__(self, llm_client: verl.Client) -> None:
        self.llm_client = llm_client

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        agent_name: str,
        **kwargs: Any,  # noqa: ANN401  # fields of the data set
    ) -> Any:  # noqa: ANN401  # verl's output
        assert agent_name == "single_turn_agent"
        assert kwargs["uid"] == "uid-1"
        await self.llm_client.generate("t", prompt_ids=PROMPT, sampling_params=sampling_params)
        return types.SimpleNamespace(extra_fields={})


class Checkpoints:
    """verl's manager of checkpoint engines."""

    def __init__(self, config: object, actor_wg: object, replicas: object) -> None:
        self.actor_wg = actor_wg


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **fields: object) -> None:
    """A module of verl's, with what is taken from it."""
    module = types.ModuleType(name)
    module.__dict__.update(fields)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("queues", [False, True])
def test_verls_managers_are_handed_the_routers_client(
    monkeypatch: pytest.MonkeyPatch, queues: bool
) -> None:
    registered: list[object] = []
    hooks = hooks_of(monkeypatch, registered, queues=queues)
    assert registered == ["rose"]
    assert hasattr(hooks, "AgentLoopManagerV1") == queues
    monkeypatch.setenv("ROSE_ROUTER_URL", "http://127.0.0.1:9")
    rollout = types.SimpleNamespace(prompt_length=16, response_length=24)
    config = types.SimpleNamespace(actor_rollout_ref=types.SimpleNamespace(rollout=rollout))
    for name in ("AgentLoopManager", *(["AgentLoopManagerV1"] if queues else [])):
        made = getattr(hooks, name)(config, "verl's own", teacher_client="t")
        assert isinstance(made.llm_client, verl.Client)
        assert made.teacher_client == "t"


async def test_verls_hooks_fill_the_bias_meter(
    stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = hooks_of(monkeypatch, [], queues=False)
    async with stage() as s:
        await s.engine()
        monkeypatch.setenv("ROSE_ROUTER_URL", s.url)
        client = client_of(s)
        worker = hooks.AgentLoopManager.agent_loop_workers_class(client)
        output = await worker._run_agent_loop(
            {**SAMPLING, "max_tokens": 4},
            {"validate": False},
            agent_name="single_turn_agent",
            uid="uid-1",
        )
        assert s.router.service.prospects._trajectories["t"].group == "uid-1"
        actors = types.SimpleNamespace(update_actor=sorted)
        hooks.CheckpointManager(config=None, actor_wg=actors, replicas=[])
        batch = {
            "rose_sessions": [output.extra_fields["rose_sessions"]],
            "token_level_scores": torch.ones(1, 4),
        }
        assert await asyncio.to_thread(actors.update_actor, batch) == sorted(batch)
        shown = await s.get("/trajectories")
        everything = next(row for row in shown["inclusion"] if row["dimension"] == "all")
        assert everything["any"]["trained"] + everything["dedicated"]["trained"] == 1
        assert shown["inferred"]["ends"] == 0
        await client._turns.close()


def hooks_of(monkeypatch: pytest.MonkeyPatch, registered: list[object], *, queues: bool) -> Any:  # noqa: ANN401  # a module
    """``verl_hooks`` over stand-ins of what it takes from verl and Ray."""
    registry = types.SimpleNamespace(register=lambda name: lambda made: registered.append(name))
    checkpoints = types.ModuleType("verl.checkpoint_engine")
    checkpoints.__dict__.update(
        CheckpointEngineRegistry=registry, CheckpointEngineManager=Checkpoints
    )
    loops = types.ModuleType("verl.experimental.agent_loop")
    loops.__dict__.update(AgentLoopManager=Manager, AgentLoopWorker=Worker)
    tensordicts = types.ModuleType("verl.utils.tensordict_utils")
    tensordicts.__dict__.update(get=dict.get)
    stand_in(monkeypatch, "ray", get=None, remote=lambda made: made)
    stand_in(monkeypatch, "verl.utils", tensordict_utils=tensordicts)
    stand_in(monkeypatch, "verl", checkpoint_engine=checkpoints)
    stand_in(monkeypatch, "verl.experimental", agent_loop=loops)
    stand_in(monkeypatch, "verl.workers.rollout.replica", TokenOutput=TokenOutput)
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.v1", None)
    if queues:
        stand_in(monkeypatch, "verl.trainer.ppo.v1", AgentLoopManagerTQ=Manager)
    monkeypatch.delitem(sys.modules, "rose_trainer.adapters.verl_hooks", raising=False)
    hooks = importlib.import_module("rose_trainer.adapters.verl_hooks")
    monkeypatch.delitem(sys.modules, "rose_trainer.adapters.verl_hooks")
    return hooks
