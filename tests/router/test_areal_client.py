"""AReaL's own engine, executor and workflows against a router: turns, groups, what became of them.

Every request is AReaL's own (release 1.0.4): ``RemoteSGLangEngine`` and what it is made of, its
``RLVRWorkflow`` and ``MultiTurnWorkflow``, its staleness manager and its queues. Its trainer, which
needs GPUs, is not run. ``make areal`` fetches the package, without what its trainer needs, and runs
this.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from rose_dev.models import make_named
from rose_trainer.adapters import areal as adapter
from tests.router.conftest import Stage
from tests.router.test_reports import meter, remembered
from tests.trainer.trl_parts import CHAT

WHY = "AReaL is not installed; make areal"
pytest.importorskip("areal.engine.sglang_remote", reason=WHY)
transformers: Any = pytest.importorskip("transformers", reason=WHY)
API: Any = importlib.import_module("areal.api.cli_args")
REMOTE: Any = importlib.import_module("areal.engine.sglang_remote")
EXECUTOR: Any = importlib.import_module("areal.infra.workflow_executor")
RLVR: Any = importlib.import_module("areal.workflow.rlvr")
MULTI_TURN: Any = importlib.import_module("areal.workflow.multi_turn")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(280)]

Tokenizer = Any  # transformers'
Make = Callable[..., AbstractAsyncContextManager[Stage]]
MEMBERS, PROMPTS, TURNS, LENGTH = 3, 4, 3, 6
NEVER = 0.0


def half(prompt: str, *_: object, **__: object) -> float:
    """A reward; the wrapper runs it in a process of its own and imports it by name."""
    return float(int(prompt.split("#")[1][0]) % 2)


def wrong(*_: object, **__: object) -> float:
    """A reward that has a conversation go on."""
    return NEVER


@pytest.fixture
def tokenizer() -> Tokenizer:
    made: Any = transformers.AutoTokenizer.from_pretrained(str(make_named("tiny")))
    made.chat_template = CHAT
    return made


@pytest.fixture
def reporting(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``install`` for the length of one test."""
    for owner, method in (
        (EXECUTOR.WorkflowExecutor, "_create_workflow_task"),
        (REMOTE.SGLangBackend, "build_generation_request"),
    ):
        monkeypatch.setattr(owner, method, getattr(owner, method))

    def install(url: str) -> None:
        monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", url.removeprefix("http://"))
        for _ in range(2):  # in the workflow's module, and by hand
            adapter.install()

    return install


def engine_of(s: Stage) -> Any:  # noqa: ANN401  # AReaL's
    """Its engine, as its trainer makes it; nothing of its configuration is set but its backend."""
    config = API.InferenceEngineConfig(backend="sglang:d1", consumer_batch_size=PROMPTS)
    engine = REMOTE.RemoteSGLangEngine(config)
    engine.initialize(addr=s.url.removeprefix("http://"), train_data_parallel_size=1)
    return engine


def rows() -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": f"#{n}"}]} for n in range(PROMPTS)]


def generation() -> Any:  # noqa: ANN401  # AReaL's
    return API.GenerationHyperparameters(max_new_tokens=LENGTH)


async def rolled_out(engine: Any, workflow: Any, **named: Any) -> Any:  # noqa: ANN401  # AReaL's
    """A batch, as its trainer asks for it from its own thread."""
    try:
        for row in rows():
            await asyncio.to_thread(engine.submit, row, workflow, **named)
        return await asyncio.to_thread(engine.wait, PROMPTS, 200.0)
    finally:
        await asyncio.to_thread(engine.destroy)


def even(trajectory: Any) -> bool:  # noqa: ANN401  # AReaL's
    """A filter of the user's: groups of reward 0 are rejected."""
    return bool(trajectory["rewards"].sum() > NEVER)


async def test_areal_names_its_groups_and_reports_what_its_executor_accepts(
    stage: Make, tokenizer: Tokenizer, reporting: Callable[[str], None]
) -> None:
    async with stage() as s:
        await s.engine("a")
        await s.engine("b")
        reporting(s.url)
        engine = await asyncio.to_thread(engine_of, s)
        workflow = RLVR.RLVRWorkflow(half, generation(), tokenizer)
        batch = await rolled_out(engine, workflow, group_size=MEMBERS, should_accept_fn=even)
        assert sum(one is not None for one in batch) == PROMPTS // 2
        counts, inferred = await meter(s)
        assert counts == {
            "trained": MEMBERS * PROMPTS // 2,
            "dropped": MEMBERS * PROMPTS // 2,
            "lost": 0,
        }
        assert inferred["joined_a_group"] == inferred["ends"] == 0
        assert not remembered(s)
        shown = await s.get("/trajectories")
        (every,) = (row for row in shown["inclusion"] if row["dimension"] == "all")
        assert sum(every[arm]["groups"] for arm in ("any", "dedicated")) == PROMPTS
        strata = {row["stratum"] for row in shown["inclusion"] if row["dimension"] == "reward"}
        assert strata == {"above 0", "0 or less"}


async def test_all_turns_of_areals_conversation_are_one_trajectory(
    stage: Make, tokenizer: Tokenizer, reporting: Callable[[str], None]
) -> None:
    async with stage() as s:
        await s.engine()
        reporting(s.url)
        engine = await asyncio.to_thread(engine_of, s)
        workflow = MULTI_TURN.MultiTurnWorkflow(
            reward_fn=wrong,
            gconfig=generation(),
            tokenizer=tokenizer,
            max_turns=TURNS,
            turn_discount=0.9,
        )
        batch = await rolled_out(engine, workflow)
        assert all(one is not None for one in batch)
        assert s.router.service.ledger.totals.turns == PROMPTS * TURNS
        assert (await meter(s))[0] == {"trained": PROMPTS, "dropped": 0, "lost": 0}


async def test_what_areal_evaluates_is_withdrawn(
    stage: Make, tokenizer: Tokenizer, reporting: Callable[[str], None]
) -> None:
    async with stage() as s:
        await s.engine()
        reporting(s.url)
        engine = await asyncio.to_thread(engine_of, s)
        workflow = RLVR.RLVRWorkflow(half, generation(), tokenizer)
        await rolled_out(engine, workflow, is_eval=True)
        assert not remembered(s)
        assert (await meter(s))[0] == {"trained": 0, "dropped": 0, "lost": 0}


async def test_without_the_hook_the_router_infers_areals_groups_and_says_so(
    stage: Make, tokenizer: Tokenizer
) -> None:
    async with stage() as s:
        await s.engine()
        engine = await asyncio.to_thread(engine_of, s)
        workflow = RLVR.RLVRWorkflow(half, generation(), tokenizer)
        await rolled_out(engine, workflow, group_size=MEMBERS)
        counts, inferred = await meter(s)
        assert counts == {"trained": 0, "dropped": 0, "lost": 0}
        assert inferred["joined_a_group"] == PROMPTS * (MEMBERS - 1)
        assert all(one.group.startswith("~") for one in remembered(s).values())
