"""The exact calls of trainers that push weights, replayed against a lease of fake engines.

Each replay does what the trainer's own client does, in its order and with its bodies, and checks
what that client checks (``replays``; ``READ_FROM`` there names the commits).
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from rose_core.wire.routing import EngineKind
from rose_dev.waiting import until
from rose_engines.fake.model import continuation
from tests.router.conftest import VERSION, Stage
from tests.router.pushing import PROMPT, FakeIngest, Make, generate, json_of, ok
from tests.router.replays import AReaL, PrimeRl


async def abort_until_idle(s: Stage, url: str) -> int:
    """slime/backends/sglang_utils/server_control.py; how often it had to abort."""
    for attempt in range(1, 10):
        await ok(s.http.post(url + "/abort_request", json={"abort_all": True}))
        loads = (await json_of(s.http.get(url + "/v1/loads?include=core")))["loads"]
        if sum(load["num_reqs"] for load in loads) <= 0:
            return attempt
        await asyncio.sleep(0.1)  # slime: 3 s
    raise AssertionError("turns are left after nine aborts")


@pytest.mark.parametrize("pulls", [False, True])
async def test_slime_pushes_full_checkpoints_by_configuration_alone(
    stage: Make, ingest: FakeIngest, tmp_path: Path, pulls: bool
) -> None:
    """--rollout-external-engine-addrs and --sglang-router-ip are ours; transport ``disk``.

    ``pulls``: with --update-weight-local-checkpoint-dir, which is every engine's own disk.
    """
    async with stage(ingest_url=ingest.url, reported_gpus=2) as s:
        ours = await s.engine("ours", kind=EngineKind.DEDICATED)
        lent = await s.engine("lent", gate_open=False)  # suspended all the time
        ingest.engines = [ours]
        # slime/backends/sglang_utils/external.py
        info = await json_of(s.http.get(s.url + "/server_info"))
        assert int(info["num_gpus"]) == 2
        assert not info.get("encoder_only")
        assert info.get("disaggregation_mode") not in {"prefill", "decode"}
        bearer = {"Authorization": "Bearer None"}
        await ok(s.http.get(s.url + "/health_generate", headers=bearer))
        await ok(s.http.get(s.url + "/flush_cache", headers=bearer))
        registered = {"url": s.url, "worker_type": "regular"}
        async with s.post("/workers", registered) as reply:
            reply.raise_for_status()
        for number in (1, 2):
            # slime/rollout/sglang_rollout.py
            key = {"X-SMG-Routing-Key": "sample-7"}
            async with s.post(
                "/generate",
                {
                    "input_ids": PROMPT,
                    "sampling_params": {"max_new_tokens": 6},
                    "return_logprob": True,
                },
                headers=key,
            ) as reply:
                answer = await reply.json()
            tokens = [item[1] for item in answer["meta_info"]["output_token_logprobs"]]
            assert answer["meta_info"]["finish_reason"]["type"] == "length"
            assert len(tokens) == 6
            workers = (await json_of(s.http.get(s.url + "/workers")))["workers"]
            assert [await abort_until_idle(s, worker["url"]) for worker in workers] == [1]
            # slime/backends/megatron_utils/update_weight/update_weight_from_disk.py writes,
            # slime/ray/actor_group.py has the engine load
            folder = tmp_path / f"weight_v{number:06d}"
            folder.mkdir()
            model_path = "/engines/own/disk" if pulls else str(folder)
            if pulls:
                pull = {
                    "local_checkpoint_dir": model_path,
                    "source_dir": str(tmp_path),
                    "target_version": number,
                }
                await json_of(s.post("/pull_weights", pull))
            await ok(s.post("/pause_generation", {}))
            await ok(s.http.get(s.url + "/flush_cache"))
            body = {"model_path": model_path, "weight_version": str(number)}
            done = await json_of(s.post("/update_weights_from_disk", body))
            assert done["success"]
            document = await json_of(s.http.get(s.url + "/get_weight_version"))
            assert document["weight_version"] == str(number)  # --ci-test
            shutil.rmtree(folder)
            await ok(s.post("/continue_generation", {}))
            answer = await json_of(generate(s))
            assert answer["meta_info"]["weight_version"] == str(number)
            assert answer["meta_info"]["weight_versions"][0]["version"] == f"run@1.{number}"
        version = await json_of(s.http.get(s.url + "/get_weight_version"))
        assert version["weight_version"] == "2"
        assert lent.scheduler.session.version == VERSION
    assert [there for _, _, there in ingest.taken] == [True, True]


async def test_areal_is_given_its_partial_tokens_and_goes_on_from_them(
    stage: Make, ingest: FakeIngest, tmp_path: Path
) -> None:
    async with stage(ingest_url=ingest.url) as s:
        ours = await s.engine("ours", kind=EngineKind.DEDICATED, token_seconds=0.005)
        ingest.engines = [ours]
        areal = AReaL(s.http, s.url, PROMPT)
        await ok(areal.get("/health"))
        paused = asyncio.Event()
        paused.set()
        asked = asyncio.create_task(areal.generates(200, paused))
        await until(lambda: any(len(one.output) > 20 for one in ours.scheduler.running))
        folder = tmp_path / "update"
        folder.mkdir()
        await areal.updates(folder, paused)
        out, versions = await asked
    cut = versions.index("run@1.1")
    assert cut > 20
    assert out[:cut] == continuation(PROMPT, cut, VERSION)
    assert out[cut:] == continuation([*PROMPT, *out[:cut]], 200 - cut, "run@1.1")


async def test_prime_rl_updates_in_flight_by_configuration_alone(
    stage: Make, ingest: FakeIngest, tmp_path: Path
) -> None:
    async with stage(ingest_url=ingest.url, model="policy") as s:
        ours = await s.engine("ours", kind=EngineKind.DEDICATED, token_seconds=0.005)
        ingest.engines = [ours]
        prime = PrimeRl(s.http, s.url, PROMPT)
        await prime.starts("policy")
        running = asyncio.create_task(prime.generates("policy", 150))
        await until(lambda: any(len(one.output) > 5 for one in ours.scheduler.running))
        await prime.pauses()
        late = asyncio.create_task(json_of(generate(s, 3)))
        await until(lambda: len(s.router.service.queue) == 1)
        await prime.updates(tmp_path)
        assert not late.done()
        await prime.resumes()
        answer = await running
        assert (await late)["meta_info"]["weight_version"] == "run@1.1"
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    spans = choice["weight_versions"]
    assert [span["version"] for span in spans] == [VERSION, "run@1.1"]
    assert len(choice["token_ids"]) == 150


async def test_turns_of_another_job_are_no_reason_to_abort_again(
    stage: Make, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a word-a\nb word-b\n")
    async with stage(turn_token_file=tokens) as s:
        engine = await s.engine(token_seconds=0.005)
        mine, theirs = ({"Authorization": f"Bearer word-{job}"} for job in "ab")
        running = asyncio.create_task(json_of(generate(s, 5000, headers=theirs)))
        await until(lambda: bool(engine.scheduler.running))
        for headers, left in ((mine, 0), (theirs, 1)):
            loads = await json_of(s.http.get(s.url + "/v1/loads", headers=headers))
            assert loads["loads"][0]["num_reqs"] == left
        await ok(s.post("/abort_request", {"abort_all": True}, headers=theirs))
        await running
