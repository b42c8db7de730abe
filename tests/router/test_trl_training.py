"""TRL itself trains: its rollout process samples through the router, its syncs reach the store.

A tiny model on a CPU against a lease of fake engines, for three steps. Three things of TRL are
stood in for: its attention kernel, which is for GPUs only, its question for the GPU's name, and
whether vLLM is installed, which it asks although it speaks to vLLM over HTTP alone. ``make trl``
makes an environment that has TRL and runs this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from rose_dev.models import make_named
from rose_trainer.adapters.trl import WeightTransfer
from rose_trainer.publisher import Publisher
from tests.router.conftest import Stage
from tests.router.test_reports import meter
from tests.router.test_verl import follow
from tests.trainer.test_publisher import RunningStore
from tests.trainer.trl_parts import ANSWER, CHAT, PlainAttention, by_place

WHY = "TRL is not installed; make trl"
pytest.importorskip("trl", minversion="1.16", reason=WHY)
async_grpo: Any = pytest.importorskip("trl.experimental.async_grpo", reason=WHY)
trl_hooks: Any = pytest.importorskip("rose_trainer.adapters.trl_hooks", reason=WHY)
transformers: Any = pytest.importorskip("transformers", reason=WHY)
datasets: Any = pytest.importorskip("datasets", reason=WHY)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow, pytest.mark.timeout(580)]

STEPS, MEMBERS, PROMPTS, LENGTH, CONTEXT = 3, 4, 16, 12, 512
CHILD_SECONDS = 560
"""Its rollout process imports torch and transformers anew; on a busy machine that takes minutes."""
Make = Callable[..., AbstractAsyncContextManager[Stage]]


def trainer_of(url: str, transfer: WeightTransfer, folder: Path) -> Any:  # noqa: ANN401  # TRL's
    model = str(make_named("tiny"))
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHAT
    tokenizer.response_template = ANSWER
    config = async_grpo.AsyncGRPOConfig(
        output_dir=str(folder),
        vllm_server_base_url=url,
        max_steps=STEPS,
        per_device_train_batch_size=MEMBERS,
        num_generations=MEMBERS,
        max_completion_length=LENGTH,
        learning_rate=1e-3,
        weight_sync_steps=1,
        max_staleness=8,
        use_cpu=True,
        bf16=False,
        dtype="float32",
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
    )
    prompts = [[{"role": "user", "content": f"count {n}"}] for n in range(PROMPTS)]
    return async_grpo.AsyncGRPOTrainer(
        model,
        reward_funcs=by_place,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        weight_transfer=transfer,
    )


async def test_trl_trains_through_the_router_and_the_store_and_says_on_what(
    stage: Make, store: RunningStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(async_grpo.async_rollout_worker, "is_vllm_available", lambda *_, **__: True)
    trainers = async_grpo.async_grpo_trainer
    monkeypatch.setattr(trainers, "get_peak_flops_per_device", lambda *_: None)
    monkeypatch.setattr(async_grpo.packing, "_flash_attn", PlainAttention)
    publisher = Publisher(store.address, "run", token="t")
    transfer = WeightTransfer(publisher, durable_seconds=60)
    async with stage(model=str(make_named("tiny")), context_tokens=CONTEXT) as s:
        engines = [await s.engine("a"), await s.engine("b")]
        following = asyncio.create_task(follow(store, engines))
        trainer = trainer_of(s.url, transfer, tmp_path / "trl")
        vars(trainer.rollout_worker)["_child_ready_timeout"] = CHILD_SECONDS
        trl_hooks.install(trainer)
        trl_hooks.install(trainer)  # asked again it changes nothing
        before = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}
        try:
            await asyncio.to_thread(trainer.train)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        totals = s.router.service.ledger.totals
        versions = {str(engine.version) for engine in s.router.service.fleet}
        counts, inferred = await meter(s)
        shown = await s.get("/trajectories")
    changed = [
        name for name, one in trainer.model.named_parameters() if not one.equal(before[name])
    ]
    assert trainer.state.global_step == STEPS
    assert changed
    assert totals.turns >= STEPS * MEMBERS
    # One sync before the first step, and one after each.
    assert transfer.version is not None
    assert transfer.version.sequence == STEPS
    assert versions == {str(transfer.version)}
    # What a step took was named, has ended by TRL's word, and came with its reward.
    assert counts["trained"] >= STEPS * MEMBERS
    assert counts["lost"] == 0
    assert inferred["joined_a_group"] == inferred["ends"] == inferred["mistaken_ends"] == 0
    rewarded = {
        row["stratum"]: sum(row[arm]["trained"] for arm in ("any", "dedicated"))
        for row in shown["inclusion"]
        if row["dimension"] == "reward"
    }
    assert sum(rewarded.values()) == counts["trained"]
    assert set(rewarded) == {"above 0", "0 or less"}
    (every,) = (row for row in shown["inclusion"] if row["dimension"] == "all")
    groups = sum(every[arm]["groups"] for arm in ("any", "dedicated"))
    assert counts["trained"] / MEMBERS <= groups <= counts["trained"] / MEMBERS + 1
    assert trainer.args.token_budget == CONTEXT  # as the router's /v1/models says
    pulled = await asyncio.to_thread(store.pull, tmp_path / "bundle")
    assert pulled.target == transfer.version
