"""Routed experts of a real mixture of experts: a turn that moves says those of every token.

SGLang captures experts into host memory that it pins for CUDA. That one function is replaced in the
engine's processes, since there is no CUDA here; everything else is stock.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from rose_dev.engine_environment import is_ready
from rose_dev.engine_testing import RealEngine, start_engine
from rose_dev.models import make_named
from rose_dev.owners import Owner
from rose_router.http.tokenizer.tokenization import Tokenizer
from rose_router.main import RunningRouter
from tests.router.real_fleet import before_two
from tests.router.test_real_engines import PROMPT, VERSION

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.asyncio]

MOST = 60
LAYERS, EACH = 2, 2
ROW = LAYERS * EACH * 4
"""Bytes of a token's row: numbers of its experts in each layer."""

UNPINNED = """
import runpy

from sglang.srt.mem_cache.pool_host import common

common._cuda_host_register = lambda *_, **__: None
runpy.run_module("rose_engines.sglang.launch", run_name="__main__", alter_sys=True)
"""


def mixture(folder: Path) -> Path:
    """A tiny Qwen 3 mixture with random weights, and the tokenizer of another tiny model."""
    other = make_named("tiny-peaked")
    torch.manual_seed(0)
    import transformers  # noqa: PLC0415  # two seconds, which each worker of a lane would spend

    made = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=json.loads((other / "config.json").read_text())["vocab_size"],
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,  # type: ignore[call-arg]  # the class takes what it does not name
            moe_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=EACH,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            norm_topk_prob=True,
        )
    )
    for one in made.parameters():
        if one.dim() > 1:  # spread out: a token's experts are then no close call
            torch.nn.init.normal_(one, std=0.3)
    made.bfloat16().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(other / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealEngine]]:
    """Two SGLang engines of one model."""
    if not is_ready():
        pytest.fail("no engine environment; run `make engine`")
    program = tmp_path_factory.mktemp("unpinned") / "launch.py"
    program.write_text(UNPINNED)
    model = mixture(tmp_path_factory.mktemp("mixture"))
    more = ["--enable-return-routed-experts"]
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:  # its threads live as long as both

        def start(folder: Path) -> RealEngine:
            made = start_engine(folder, model, version=VERSION, program=program, more=more)
            return stack.enter_context(made)

        yield list(pool.map(start, folders))


@dataclass
class Lease:
    """A router before both; the second's gate is closed until it is opened."""

    router: RunningRouter
    http: aiohttp.ClientSession
    engines: list[RealEngine]
    owners: tuple[Owner, Owner]

    async def ask(self, url: str, ids: list[int], most: int, **sampling: object) -> dict[str, Any]:
        """A greedy answer with its experts."""
        given = {"max_new_tokens": most, "temperature": 0, "ignore_eos": True, **sampling}
        body = {"input_ids": ids, "sampling_params": given, "return_routed_experts": True}
        # Its own keys: nothing is read from a cache.
        body["extra_key"] = f"{most}-{len(ids)}-{sorted(sampling)}"
        async with self.http.post(f"{url}/generate", json=body) as reply:
            answer: dict[str, Any] = await reply.json()
            return answer

    async def turn(self, **sampling: object) -> dict[str, Any]:
        """Play a turn through the lease's router."""
        return await self.ask(f"http://127.0.0.1:{self.router.http_port}", PROMPT, MOST, **sampling)

    async def moved(self, **sampling: object) -> dict[str, Any]:
        """A turn that the first engine aborts after thirty tokens; it then says what it held back.

        SGLang holds back tokens that may belong to a stop string, so the engine is asked how many
        it has.
        """
        (first, second), engine = self.owners, self.engines[0].url
        await self._post(f"{engine}/slow_down", {"forward_sleep_time": 0.1})
        try:
            asked = asyncio.create_task(self.turn(**sampling))
            async with asyncio.timeout(60):
                while await self._used(engine) < len(PROMPT) + 30:  # noqa: ASYNC110  # a process
                    await asyncio.sleep(0.02)
            first.send(gate_open=False)
            second.send(gate_open=True)
            await self._post(f"{engine}/abort_request", {"abort_all": True})
            return await asked
        finally:
            await self._post(f"{engine}/slow_down", {"forward_sleep_time": None})

    async def _post(self, url: str, body: object) -> None:
        async with self.http.post(url, json=body) as reply:
            await reply.read()

    async def _used(self, engine: str) -> int:
        async with self.http.get(f"{engine}/v1/loads") as reply:
            (load,) = (await reply.json())["loads"]
        return int(load["num_used_tokens"])


@pytest.fixture
async def lease(engines: list[RealEngine]) -> AsyncIterator[Lease]:
    async with before_two(*engines) as (router, http, owners):
        yield Lease(router, http, engines, owners)


def rows_of(answer: dict[str, Any]) -> list[bytes]:
    """Experts of each token."""
    data = base64.b64decode(answer["meta_info"]["routed_experts"])
    return [data[n : n + ROW] for n in range(0, len(data), ROW)]


async def test_a_moved_turn_has_the_experts_of_an_unmoved_one_and_of_teacher_forcing(
    lease: Lease,
) -> None:
    stayed = await lease.turn()
    moved = await lease.moved()
    (move,) = moved["meta_info"]["rose"]["moves"]
    assert [leg["engine"] for leg in moved["meta_info"]["rose"]["engines"]] == ["first", "second"]
    assert moved["output_ids"] == stayed["output_ids"]
    whole = [*PROMPT, *moved["output_ids"]]
    rows = rows_of(moved)
    assert len(rows) == len(whole) - 1, "one for each token but the last"
    assert len(set(rows)) > 10, "tokens go different ways"
    assert moved["meta_info"]["routed_experts_recomputed"] == move["at_token"]
    assert rows == rows_of(stayed)
    for engine in lease.engines:
        forced = rows_of(await lease.ask(engine.url, whole, 1))
        assert forced[: len(rows)] == rows


async def test_a_turn_that_a_stop_string_ends_behind_a_move_has_its_experts(lease: Lease) -> None:
    whole = (await lease.turn())["output_ids"]
    # It begins before the move and ends after it, so that neither engine sees it whole.
    stop = Tokenizer(lease.engines[0].model).decode(whole[20:44], skip_special=False)
    stayed = await lease.turn(stop=stop)
    moved = await lease.moved(stop=stop)
    (move,) = moved["meta_info"]["rose"]["moves"]
    assert 20 < move["at_token"] < len(stayed["output_ids"])
    assert moved["meta_info"]["finish_reason"] == stayed["meta_info"]["finish_reason"]
    assert moved["output_ids"] == stayed["output_ids"]
    rows = rows_of(moved)
    assert len(rows) == len(PROMPT) + len(stayed["output_ids"]) - 1
    assert rows == rows_of(stayed)
    whole = [*PROMPT, *moved["output_ids"]]
    forced = rows_of(await lease.ask(lease.engines[1].url, whole, 1))
    assert forced[: len(rows)] == rows
