"""The exact calls of trainers that push weights, replayed against a lease of fake engines.

Each replay does what the trainer's own client does, in its order and with its bodies, and checks
what that client checks. ``FakeIngest`` plays ``rose ingest`` and, as weight-sync would, brings the
version to the engines; ``tests/trainer/test_ingest.py`` has the real one.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rose_core.identity import WeightVersion
from rose_core.rollouts.placement import EngineView
from rose_core.rollouts.quorum import Quorum, missing
from rose_core.wire.routing import EngineKind
from rose_dev.owners import until
from rose_engines.fake.model import continuation
from tests.router.conftest import VERSION, Fake, Stage

Make = Callable[..., AbstractAsyncContextManager[Stage]]
PROMPT = [3, 1, 4, 1, 5]


class FakeIngest:
    """Publishes by counting; engines it was told of get the version after a moment."""

    def __init__(self) -> None:
        self.url = ""
        self.taken: list[tuple[str, str, bool]] = []
        self.engines: list[Fake] = []
        self.status = 200
        self.gate = asyncio.Event()
        self.gate.set()

    async def ingest(self, request: web.Request) -> web.Response:
        body = await request.json()
        await self.gate.wait()
        there = await asyncio.to_thread(Path(body["path"]).exists)
        self.taken.append((body["path"], body["label"], there))
        if self.status != 200:
            return web.json_response({"message": "shards are missing"}, status=self.status)
        version = f"run@1.{len(self.taken)}"
        for engine in self.engines:
            asyncio.get_running_loop().call_later(0.02, self.bring, engine, version)
        return web.json_response({"version": version})

    @staticmethod
    def bring(engine: Fake, version: str) -> None:
        engine.scheduler.session._version = version
        engine.owner.say(version=version, head=version)


@pytest.fixture
async def ingest() -> AsyncIterator[FakeIngest]:
    fake = FakeIngest()
    app = web.Application()
    app.router.add_post("/ingest", fake.ingest)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


async def json_of(call: Any, status: int = 200) -> Any:  # noqa: ANN401  # aiohttp's, JSON
    async with call as reply:
        assert reply.status == status, await reply.text()
        return await reply.json()


async def ok(call: Any) -> None:  # noqa: ANN401  # aiohttp's
    async with call as reply:
        assert reply.status == 200, await reply.text()


def generate(s: Stage, most: int = 6, **fields: object) -> Any:  # noqa: ANN401  # aiohttp's
    sampling = {"max_new_tokens": most, "temperature": 1.0}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, **fields}
    return s.post("/generate", body)


async def test_slime_pushes_full_checkpoints_by_configuration_alone(
    stage: Make, ingest: FakeIngest, tmp_path: Path
) -> None:
    """--rollout-external-engine-addrs and --sglang-router-ip are ours; transport ``disk``."""
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
            for worker in workers:
                await ok(s.http.post(worker["url"] + "/abort_request", json={"abort_all": True}))
            # slime/backends/megatron_utils/update_weight/update_weight_from_disk.py
            await ok(s.post("/pause_generation", {}))
            await ok(s.http.get(s.url + "/flush_cache"))
            folder = tmp_path / f"weight_v{number:06d}"
            folder.mkdir()
            body = {"model_path": str(folder), "weight_version": str(number)}
            done = await json_of(s.post("/update_weights_from_disk", body))
            assert done["success"]
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
    """AREAL_LLM_SERVER_ADDRS is ours; weight update mode ``disk``."""
    async with stage(ingest_url=ingest.url) as s:
        ours = await s.engine("ours", kind=EngineKind.DEDICATED, token_seconds=0.005)
        ingest.engines = [ours]
        await ok(s.http.get(s.url + "/health"))
        paused = asyncio.Event()
        paused.set()

        async def agenerate(most: int) -> tuple[list[int], list[str]]:
            # areal/engine/sglang_remote.py: loops until a real stop, keeping partial tokens
            sample = {
                "top_p": 1.0,
                "top_k": -1,
                "max_new_tokens": most,
                "temperature": 1.0,
                "stop_token_ids": [],
                "frequency_penalty": 0.0,
            }
            body: dict[str, Any] = {
                "input_ids": list(PROMPT),
                "image_data": None,
                "sampling_params": sample,
                "return_logprob": True,
                "stream": False,
            }
            out: list[int] = []
            versions: list[str] = []
            stop = None
            while stop not in {"stop", "tool_calls", "length"} and len(out) < most:
                await paused.wait()
                result = await json_of(s.post("/generate", body))
                meta = result["meta_info"]
                stop = meta["finish_reason"]["type"]
                new = [x[1] for x in meta["output_token_logprobs"]]
                out += new
                for span in meta["weight_versions"]:
                    versions += [span["version"]] * (span["end"] - span["start"])
                body["input_ids"] += new
                sample["max_new_tokens"] = int(sample["max_new_tokens"]) - len(new)  # type: ignore[call-overload]
            return out, versions

        asked = asyncio.create_task(agenerate(200))
        await until(lambda: any(len(one.output) > 20 for one in ours.scheduler.running))
        paused.clear()
        async with s.http.post(s.url + "/pause_generation") as reply:  # no body at all
            assert reply.status == 200
        folder = tmp_path / "update"
        folder.mkdir()
        body = {"model_path": str(folder), "abort_all_request": True}
        await json_of(s.post("/update_weights_from_disk", body))
        shutil.rmtree(folder)
        async with s.http.post(s.url + "/continue_generation") as reply:
            assert reply.status == 200
        paused.set()
        out, versions = await asked
    cut = versions.index("run@1.1")
    assert cut > 20
    assert out[:cut] == continuation(PROMPT, cut, VERSION)
    assert out[cut:] == continuation([*PROMPT, *out[:cut]], 200 - cut, "run@1.1")


async def test_prime_rl_updates_in_flight_by_configuration_alone(
    stage: Make, ingest: FakeIngest, tmp_path: Path
) -> None:
    """base_url = admin_base_url = ours; filesystem broadcast."""
    async with stage(ingest_url=ingest.url, model="policy") as s:
        ours = await s.engine("ours", kind=EngineKind.DEDICATED, token_seconds=0.005)
        ingest.engines = [ours]
        # src/prime_rl/utils/client.py
        await ok(s.http.get(s.url + "/health"))
        models = (await json_of(s.http.get(s.url + "/v1/models")))["data"]
        assert any(model["id"] == "policy" for model in models)
        body = {
            "model": "policy",
            "token_ids": PROMPT,
            "cache_salt": "0",
            "sampling_params": {"max_tokens": 150, "temperature": 1.0, "logprobs": 0},
        }
        headers = {"X-Session-ID": "trajectory-1"}
        running = asyncio.create_task(
            json_of(s.post("/inference/v1/generate", body, headers=headers))
        )
        await until(lambda: any(len(one.output) > 5 for one in ours.scheduler.running))
        keep = {"mode": "keep", "clear_cache": "false"}
        async with s.http.post(s.url + "/pause", params=keep) as reply:
            assert reply.status == 200
        late = asyncio.create_task(json_of(generate(s, 3)))
        await until(lambda: len(s.router.service.room) == 1)
        await json_of(s.post("/update_weights", {"weight_dir": str(tmp_path)}))
        assert not late.done()
        async with s.http.post(s.url + "/resume") as reply:
            assert reply.status == 200
        answer = await running
        assert (await late)["meta_info"]["weight_version"] == "run@1.1"
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length"
    spans = choice["weight_versions"]
    assert [span["version"] for span in spans] == [VERSION, "run@1.1"]
    assert len(choice["token_ids"]) == 150


# --- the barrier by itself


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
