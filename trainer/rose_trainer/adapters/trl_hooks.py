"""TRL's asynchronous GRPO names its turns and says what became of them; needs ``trl`` itself.

    trainer = AsyncGRPOTrainer(...)
    trl_hooks.install(trainer)

TRL's rollout process sends a prompt and nothing else, and its samples keep no name of the turns
that made them. ``RolloutLoop`` gives each conversation a session, each group its name and each turn
an id (asked again after a lost connection, it is the same turn), says that a conversation is over,
and hands samples on that know their session. In the trainer's process ``trl.Reporting`` stands
before the queue and notes which of them TRL takes; after each step the router is notified.

TRL sends no token; ``rose forward`` gives one to turns and reports alike.
"""

from __future__ import annotations

import uuid
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

from transformers import TrainerCallback
from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutSample

from rose_trainer.adapters.report import finish_async, report, report_async
from rose_trainer.adapters.trl import Reporting, SessionSample
from rose_trainer.errors import Unsupported

__all__ = ["install"]

_NAMES: ContextVar[dict[str, str] | None] = ContextVar("_NAMES", default=None)
"""Of the conversation whose task runs: TRL runs each in a task of its own."""


@dataclass(slots=True)
class NamedSample(RolloutSample):  # type: ignore[misc]  # untyped
    """TRL's sample, which knows the session of the turns that made it."""

    session: str = ""


_OWN: Any = vars(async_rollout_worker)["_AsyncRolloutLoop"]
"""Its rollout worker names the class that runs in its process, so that another can stand in."""


class RolloutLoop(_OWN):  # type: ignore[misc]  # untyped
    """TRL's own, in its rollout process."""

    def __init__(self, **named: Any) -> None:  # noqa: ANN401  # TRL's
        super().__init__(**named)
        # TRL counts its groups from 0 in each of its lives.
        self._life = uuid.uuid4().hex[:8]

    async def _generate_one(
        self,
        prompt: Any,  # noqa: ANN401  # TRL's
        tool_dict: Any,  # noqa: ANN401  # TRL's
        tools: Any,  # noqa: ANN401  # TRL's
        group_id: int = 0,
    ) -> Any:  # noqa: ANN401  # TRL's
        session = uuid.uuid4().hex
        _NAMES.set({"session": session, "group": f"{self._life}.{group_id}"})
        try:
            made = await super()._generate_one(prompt, tool_dict, tools, group_id)
        finally:
            await finish_async(self.vllm_server_url, session)
        rows = made[2]
        for row in rows:
            row.rollout_id = session
        if not rows:  # nothing of it can be trained on, and no sample will tell
            await report_async(self.vllm_server_url, {}, {session: None})
        return made

    async def _score_group(self, group: Any) -> list[NamedSample]:  # noqa: ANN401  # TRL's
        samples = await super()._score_group(group)
        rows = [row for rows in group.completions_sequences for row in rows]
        return [
            NamedSample(*(getattr(sample, one.name) for one in fields(sample)), row.rollout_id)
            for sample, row in zip(samples, rows, strict=True)
        ]

    async def _post(
        self,
        path: str,
        payload: dict[str, Any],
        *others: Any,  # noqa: ANN401  # TRL's
        **named: Any,  # noqa: ANN401  # TRL's
    ) -> Any:  # noqa: ANN401  # JSON
        names = _NAMES.get()
        if names is not None:  # the same payload is posted again when the connection was lost
            payload.setdefault("rose", names)
            payload.setdefault("rid", uuid.uuid4().hex)
        return await super()._post(path, payload, *others, **named)


class _ReportCallback(TrainerCallback):
    """Reports after each step, and what is left at the end."""

    def __init__(self, reporting: Reporting) -> None:
        self._reporting = reporting

    def on_step_end(self, *_: object, **__: object) -> None:
        self._reporting.report()

    def on_train_end(self, *_: object, **__: object) -> None:
        self._reporting.report(ended=True)


def install(trainer: Any) -> None:  # noqa: ANN401  # AsyncGRPOTrainer
    """Have a trainer name its turns and report; call it once on every rank, before ``train``.

    An ``OldestFirst`` must stand before the queue already: what it holds back is not yet taken.

    Args:
        trainer: an ``AsyncGRPOTrainer``.

    Raises:
        Unsupported: a rollout worker of another kind: its turns are not made where these names are.
    """
    worker = trainer.rollout_worker
    if worker is None:  # only the first rank has one
        return
    own = getattr(worker, "_loop_cls", None)
    if not isinstance(worker, AsyncRolloutWorker) or own not in {RolloutLoop, _OWN}:
        message = (
            f"{type(worker).__name__}: only turns of TRL's own rollout loop can be named; have "
            "yours send a session and a group, and report by rose_trainer.adapters.report"
        )
        raise Unsupported(message)
    if own is RolloutLoop:
        return
    vars(worker)["_loop_cls"] = RolloutLoop

    def trains_on(sample: SessionSample) -> bool:
        """TRL's own two rules: ``RolloutQueueDataset`` and ``TokenBudgetBatcher``."""
        args = trainer.args
        too_old = trainer.model_version - sample.model_version > args.max_staleness
        return not too_old and not 0 < (args.token_budget or 0) < len(sample.input_ids)

    taken = Reporting(
        trainer.rollout_queue,
        trains_on,
        lambda trained, dropped: report(trainer.args.vllm_server_base_url, trained, dropped),
    )
    trainer.rollout_queue = taken
    trainer.add_callback(_ReportCallback(taken))
