"""Trainers push weights to real parts: SGLang, a store, ``rose ingest``, a commit in the engine.

The pushed checkpoint makes every greedy token another one, so each token tells which weights
sampled it; an engine that stands by itself says what it ought to be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rose_dev.engine_environment import is_ready
from rose_dev.engine_testing import RealEngine, start_engine
from rose_dev.waiting import until
from rose_trainer.adapters import skyrl, verl
from rose_trainer.adapters.turns import Turns
from rose_trainer.publisher import Publisher
from tests.router.pushing import json_of, ok
from tests.router.real_fleet import (
    GREEDY,
    MOST,
    PUSHED,
    SETTINGS,
    Fleet,
    fleet_of,
    pushed_to,
    slow_down,
    weights_of,
)
from tests.router.replays import AReaL, PrimeRl
from tests.router.test_real_engines import PROMPT, VERSION, write_changed
from tests.router.test_skyrl import WeightChunk, installed
from tests.router.test_verl import Actors, TokenOutput, get
from tests.trainer.test_publisher import RunningStore

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.asyncio]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    if not is_ready():
        pytest.fail("no engine environment; run `make engine`")
    with start_engine(tmp_path_factory.mktemp("trainers"), version=VERSION) as started:
        yield started


async def test_areal_goes_on_from_its_partial_tokens_with_the_weights_it_pushed(
    engine: RealEngine, store: RunningStore, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "update"
    await asyncio.to_thread(write_changed, engine.model, checkpoint)
    async with pushed_to(engine, store, tmp_path) as fleet:
        base = await fleet.alone(PROMPT, MOST)
        await slow_down(fleet.http, engine, 0.1)
        areal = AReaL(fleet.http, fleet.url, PROMPT, GREEDY)
        paused = asyncio.Event()
        paused.set()
        asked = asyncio.create_task(areal.generates(MOST, paused))
        await until(lambda: fleet.written() > 8)
        await areal.updates(checkpoint, paused)
        await slow_down(fleet.http, engine, None)
        out, versions = await asked
        await fleet.judge(out, versions, base)


async def test_prime_rl_changes_the_weights_under_a_turn_that_runs(
    engine: RealEngine, store: RunningStore, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "step_1"
    await asyncio.to_thread(write_changed, engine.model, checkpoint)
    async with pushed_to(engine, store, tmp_path) as fleet:
        base = await fleet.alone(PROMPT, MOST)
        # The turn must not be over before the weights have come.
        await slow_down(fleet.http, engine, 0.5)
        prime = PrimeRl(fleet.http, fleet.url, PROMPT, GREEDY)
        await prime.starts("policy")
        asked = asyncio.create_task(prime.generates("policy", MOST))
        await until(lambda: fleet.written() > 4)
        await prime.pauses()
        await prime.updates(checkpoint)
        await prime.resumes()
        await slow_down(fleet.http, engine, None)
        (choice,) = (await asked)["choices"]
        spans = choice["weight_versions"]
        versions = [s["version"] for s in spans for _ in range(s["end"] - s["start"])]
        await fleet.judge(choice["token_ids"], versions, base)
    assert choice["rose"]["moves"] == []
    assert [span["kv"] for span in spans] == ["own", "mixed"]


class RealActors(Actors):
    """verl's actors with the model itself: its own weights first, the changed ones after that."""

    def __init__(self, fleet: Fleet, store: RunningStore, steps: dict[int, Path]) -> None:
        super().__init__(fleet.url, lambda: Publisher(store.address, "run", token="t"))
        self._steps = steps

    def per_tensor(self, value: float) -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights_of(self._steps[int(value)]).items()
        self.drained += 1


async def test_verl_publishes_from_its_actors_under_a_turn_that_runs(
    engine: RealEngine, store: RunningStore, tmp_path: Path
) -> None:
    await asyncio.to_thread(write_changed, engine.model, tmp_path / "changed")
    async with fleet_of(engine, store, tmp_path, SETTINGS) as fleet:
        actors = RealActors(fleet, store, {5: engine.model, 9: tmp_path / "changed"})
        await asyncio.to_thread(verl.published, actors, 5, get)
        await fleet.ready()
        base = await fleet.alone(PROMPT, MOST)
        await slow_down(fleet.http, engine, 0.5)
        client = verl.Client(Turns(fleet.url), TokenOutput, prompt_length=16, response_length=24)
        sampling = {**GREEDY, "top_p": 1.0, "top_k": -1, "logprobs": True, "max_tokens": 60}
        asked = asyncio.create_task(
            client.generate("trajectory-1", prompt_ids=PROMPT, sampling_params=sampling)
        )
        await until(lambda: fleet.written() > 4)
        # Its tokens have to last for longer than anything here is waited for.
        await slow_down(fleet.http, engine, 2.0)
        await asyncio.to_thread(verl.published, actors, 9, get)
        await fleet.until_version(PUSHED)
        await slow_down(fleet.http, engine, None)
        output = await asked
        spans = output.extra_fields["weight_versions"]
        versions = [s["version"] for s in spans for _ in range(s["end"] - s["start"])]
        await fleet.judge(output.token_ids, versions, base)
        await client._turns.close()
        for one in actors.engines:
            await asyncio.to_thread(one.close)
    assert len(output.token_ids) == len(output.log_probs or ()) == 60
    assert [output.extra_fields[f"{word}_global_steps"] for word in ("min", "max")] == [5, 9]


async def test_skyrl_sends_chunks_and_samples_from_the_last(
    engine: RealEngine, store: RunningStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.to_thread(write_changed, engine.model, tmp_path / "changed")
    async with fleet_of(engine, store, tmp_path, SETTINGS) as fleet:
        monkeypatch.setenv("ROSE_ROUTER_URL", fleet.url)
        own = staticmethod(lambda: Publisher(store.address, "run", token="t"))
        monkeypatch.setattr(skyrl.Strategy, "publisher", own)
        strategy = installed(monkeypatch)
        info = strategy.create_init_info(None, inference_world_size=1)
        sender = strategy.create_sender(init_info=info, inference_client=None)
        answers: list[Any] = []
        for folder in (engine.model, tmp_path / "changed"):
            paused = {"mode": "keep", "clear_cache": "false"}
            await ok(fleet.http.post(f"{fleet.url}/pause", params=paused))
            chunks = [WeightChunk([name], [one]) for name, one in weights_of(folder).items()]
            await sender.send_chunks(iter(chunks), weight_metadata={"names": []})
            await ok(fleet.http.post(f"{fleet.url}/resume"))
            await fleet.until_version(f"run@1.{len(answers)}")
            answers.append(await skyrls_turn(fleet))
            assert answers[-1]["token_ids"] == await fleet.alone(PROMPT, 20)
        await asyncio.to_thread(sender.teardown)
    assert answers[0]["token_ids"] != answers[1]["token_ids"]
    assert [span["label"] for one in answers for span in one["weight_versions"]] == ["0", "1"]


async def skyrls_turn(fleet: Fleet) -> Any:  # noqa: ANN401  # JSON
    sampling = {"max_tokens": 20, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, **GREEDY}
    body = {"sampling_params": sampling, "model": "policy", "token_ids": PROMPT, "cache_salt": "1"}
    url, headers = f"{fleet.url}/inference/v1/generate", {"X-Session-ID": "t-1"}
    (choice,) = (await json_of(fleet.http.post(url, json=body, headers=headers)))["choices"]
    return choice
