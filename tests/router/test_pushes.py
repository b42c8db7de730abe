"""A push by itself: whom it waits for, what it refuses, what a pause does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rose_core.identity import WeightVersion
from rose_core.rollouts.placement.selection import EngineView
from rose_core.rollouts.training.quorum import Quorum, missing
from rose_core.wire.routing import EngineKind
from rose_dev.waiting import until
from tests.router.conftest import VERSION
from tests.router.pushing import FakeIngest, Make, generate, json_of, ok


async def test_a_push_waits_for_every_dedicated_engine_and_for_no_borrowed_one(
    stage: Make, ingest: FakeIngest, tmp_path: Path
) -> None:
    async with stage(ingest_url=ingest.url) as s:
        first = await s.engine("first", kind=EngineKind.DEDICATED)
        second = await s.engine("second", kind=EngineKind.DEDICATED)
        await s.engine("lent")
        ingest.engines = [first]
        body = {"model_path": str(tmp_path)}
        push = asyncio.create_task(json_of(s.post("/update_weights_from_disk", body)))
        await until(lambda: str(s.router.service.fleet.get("first").version) == "run@1.1")  # type: ignore[union-attr]
        assert not push.done()
        ingest.bring(second, "run@1.1")
        assert (await push)["success"]


async def test_a_quorum_that_does_not_come_is_503_and_names_who_is_missing(
    stage: Make, ingest: FakeIngest, tmp_path: Path
) -> None:
    async with stage(ingest_url=ingest.url, quorum=Quorum(seconds=0.05)) as s:
        await s.engine("ours", kind=EngineKind.DEDICATED)
        answer = await json_of(s.post("/update_weights", {"weight_dir": str(tmp_path)}), 503)
        assert answer["type"] == "NoQuorum"
        assert "ours" in answer["message"]
        answer = await json_of(s.post("/update_weights", {"weight_dir": str(tmp_path)}), 503)


@pytest.mark.parametrize(
    ("kinds", "quorum", "met"),
    [
        ("", None, False),  # nobody is no quorum
        ("b", None, False),
        ("B", None, True),  # without dedicated engines, any one will do
        ("dB", None, False),
        ("Db", None, True),
        ("Dd", None, False),
        ("Dd", 1, True),
        ("D", 2, False),
        ("", 0, True),  # asked for in so many words
    ],
)
def test_who_makes_a_quorum(kinds: str, quorum: int | None, met: bool) -> None:
    new, old = WeightVersion("run", 1, 5), WeightVersion("run", 1, 4)
    engines = [
        EngineView(
            str(index),
            EngineKind.DEDICATED if letter in "Dd" else EngineKind.BORROWED,
            new if letter.isupper() else old,
            gate_open=True,
            cap=1,
        )
        for index, letter in enumerate(kinds)
    ]
    assert (missing(engines, new, Quorum(quorum)) == "") == met


async def test_a_push_asked_for_twice_is_published_once(
    stage: Make, ingest: FakeIngest, tmp_path: Path
) -> None:
    async with stage(ingest_url=ingest.url) as s:
        ours = await s.engine("ours", kind=EngineKind.DEDICATED)
        ingest.engines = [ours]
        ingest.gate.clear()
        body: dict[str, Any] = {"model_path": str(tmp_path), "weight_version": "1"}
        hasty = aiohttp.ClientTimeout(total=0.1)
        with pytest.raises(TimeoutError):
            await s.post("/update_weights_from_disk", body, timeout=hasty)
        running = asyncio.create_task(json_of(generate(s, 5000)))
        await until(lambda: len(s.router.service.ledger) == 1)
        body |= {"abort_all_requests": True}
        again = asyncio.create_task(json_of(s.post("/update_weights_from_disk", body)))
        await running  # ended by the second try, so that is there
        ingest.gate.set()
        assert (await again)["success"]
    assert len(ingest.taken) == 1


async def test_a_checkpoint_that_cannot_be_taken_is_400_and_old_weights_stay(
    stage: Make, ingest: FakeIngest, tmp_path: Path
) -> None:
    ingest.status = 400
    async with stage(ingest_url=ingest.url) as s:
        await s.engine("ours", kind=EngineKind.DEDICATED)
        answer = await json_of(s.post("/update_weights", {"weight_dir": str(tmp_path)}), 400)
        assert "shards are missing" in answer["message"]
        assert (await json_of(generate(s)))["meta_info"]["weight_version"] == VERSION


async def test_without_an_ingest_a_push_says_how_to_have_one(stage: Make, tmp_path: Path) -> None:
    async with stage() as s:
        answer = await json_of(s.post("/update_weights", {"weight_dir": str(tmp_path)}), 400)
        assert "--ingest-url" in answer["message"]


@pytest.mark.parametrize(
    "path", ["/update_weights_from_tensor", "/init_weights_update_group", "/load_lora_adapter"]
)
async def test_transports_that_need_one_engine_are_refused_by_name(stage: Make, path: str) -> None:
    async with stage() as s:
        answer = await json_of(s.post(path, {}), 501)
        assert path in answer["message"]


async def test_vllms_sequence_publishes_the_folder_at_its_finish(
    stage: Make, ingest: FakeIngest, tmp_path: Path
) -> None:
    async with stage(ingest_url=ingest.url) as s:
        ingest.engines = [await s.engine("ours", kind=EngineKind.DEDICATED)]
        await json_of(s.post("/init_weight_transfer_engine", {"init_info": {"backend": "rose"}}))
        await json_of(s.post("/start_weight_update", {}))
        sent = {"update_info": {"weight_dir": str(tmp_path)}}
        await json_of(s.post("/update_weights", sent))
        assert ingest.taken == []
        done = await json_of(s.post("/finish_weight_update", {"weight_version": "step-1"}))
        assert done["weight_version"] == "run@1.1"
        assert ingest.taken == [(str(tmp_path), "step-1", True)]
        assert (await json_of(generate(s)))["meta_info"]["weight_version"] == "step-1"
        # The sequence is over: another finish publishes nothing.
        again = await json_of(s.post("/finish_weight_update", {}), 400)
        assert again["type"] == "NothingSent"
        await json_of(s.post("/shutdown_weight_transfer_engine", {}))


async def test_vllms_sequence_begins_again_while_the_finish_before_it_is_under_way(
    stage: Make, ingest: FakeIngest, tmp_path: Path
) -> None:
    async with stage(ingest_url=ingest.url) as s:
        ingest.engines = [await s.engine("ours", kind=EngineKind.DEDICATED)]
        ingest.gate.clear()
        folders = [str(tmp_path / "one"), str(tmp_path / "two")]

        async def send(folder: str) -> None:
            await json_of(s.post("/start_weight_update", {}))
            await json_of(s.post("/update_weights", {"update_info": {"weight_dir": folder}}))

        await send(folders[0])
        first = asyncio.create_task(json_of(s.post("/finish_weight_update", {})))
        await until(lambda: ingest.asked == 1)
        await send(folders[1])
        ingest.gate.set()
        await first
        await json_of(s.post("/finish_weight_update", {}))
        assert [one[0] for one in ingest.taken] == folders


async def test_vllms_sequence_has_an_order_and_takes_no_handles_of_gpus(
    stage: Make, tmp_path: Path
) -> None:
    async with stage() as s:
        folder = {"update_info": {"weight_dir": str(tmp_path)}}
        assert (await json_of(s.post("/update_weights", folder), 400))["type"] == "NotStarted"
        await json_of(s.post("/start_weight_update", {}))
        assert (await json_of(s.post("/finish_weight_update", {}), 400))["type"] == "NothingSent"
        for info in ({"names": ["a"], "dtype_names": ["bfloat16"]}, [{"ipc_handles_pickled": "x"}]):
            refused = await json_of(s.post("/update_weights", {"update_info": info}), 501)
            assert "/update_weights" in refused["message"]


async def test_a_pause_that_nobody_ends_is_over_after_a_while(stage: Make) -> None:
    async with stage(quorum=Quorum(hold_seconds=0.1)) as s:
        await s.engine()
        await ok(s.post("/pause_generation", {"mode": "in_place"}))
        assert (await json_of(s.http.get(s.url + "/is_paused")))["is_paused"]
        assert (await json_of(generate(s)))["meta_info"]["finish_reason"]["type"] == "length"


async def test_a_pause_ends_what_runs_with_what_it_has(stage: Make) -> None:
    async with stage() as s:
        engine = await s.engine(token_seconds=0.005)
        running = asyncio.create_task(json_of(generate(s, 5000)))
        await until(lambda: any(len(one.output) > 20 for one in engine.scheduler.running))
        await ok(s.post("/pause_generation", {}))
        meta = (await running)["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert meta["completion_tokens"] > 8
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]


async def test_a_wrong_mode_is_refused(stage: Make) -> None:
    async with stage() as s, s.post("/pause_generation", {"mode": "freeze"}) as reply:
        assert reply.status == 400
