"""What verl's configuration names; needs ``verl`` itself.

    actor_rollout_ref.rollout.checkpoint_engine.backend=rose
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=rose_trainer.adapters.verl_hooks
    actor_rollout_ref.rollout.checkpoint_manager_class=rose_trainer.adapters.verl_hooks.CheckpointManager
    actor_rollout_ref.rollout.agent.agent_loop_manager_class=rose_trainer.adapters.verl_hooks.AgentLoopManager

The router's URL and its callers' token are ``ROSE_ROUTER_URL`` and ``ROSE_TURN_TOKEN`` of the
process that starts the agent loops. What ``update_actor`` is given is reported as trained on.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from verl import checkpoint_engine
from verl.experimental import agent_loop
from verl.utils import tensordict_utils
from verl.workers.rollout.replica import TokenOutput

from rose_trainer.adapters.report import report
from rose_trainer.adapters.turns import Turns
from rose_trainer.adapters.verl import (
    BACKEND,
    CheckpointEngine,
    Client,
    Done,
    published,
    reported,
    reporting,
)

__all__ = ["AgentLoopManager", "AgentLoopManagerV1", "AgentLoopWorker", "CheckpointManager"]

try:
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ
except ImportError:  # a release without them, or without the queue that they need
    AgentLoopManagerTQ = None

checkpoint_engine.CheckpointEngineRegistry.register(BACKEND)(CheckpointEngine)


def client(config: Any) -> Client:  # noqa: ANN401  # OmegaConf
    """The client that verl's configuration and the environment describe.

    Raises:
        KeyError: ``ROSE_ROUTER_URL`` is not set.
    """
    rollout = config.actor_rollout_ref.rollout
    turns = Turns(os.environ["ROSE_ROUTER_URL"], os.environ.get("ROSE_TURN_TOKEN", ""))
    return Client(
        turns,
        TokenOutput,
        prompt_length=rollout.prompt_length,
        response_length=rollout.response_length,
    )


class _ThroughRouter:
    """Before a manager of verl's: turns go through the router, whatever client it is handed."""

    def __init__(self, config: Any, llm_client: object, *others: Any, **named: Any) -> None:  # noqa: ANN401  # verl's
        del llm_client
        super().__init__(config, client(config), *others, **named)  # type: ignore[call-arg]


class AgentLoopWorker(agent_loop.AgentLoopWorker):  # type: ignore[misc]  # untyped
    """verl's own; each agent loop's turns carry its group, and its end is reported."""

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        **named: Any,  # noqa: ANN401  # verl's
    ) -> Any:  # noqa: ANN401  # verl's
        run = super()._run_agent_loop(sampling_params, trajectory, **named)
        group, validate = str(named.get("uid", "")), bool(trajectory.get("validate"))
        return await reported(self.llm_client, group, run, validate=validate)


class AgentLoopManager(_ThroughRouter, agent_loop.AgentLoopManager):  # type: ignore[misc]  # untyped
    """verl's own, with turns through the router."""

    agent_loop_workers_class = ray.remote(AgentLoopWorker)


if AgentLoopManagerTQ is not None:

    class AgentLoopManagerV1(_ThroughRouter, AgentLoopManagerTQ):  # type: ignore[misc]  # untyped
        """The same for trainers whose agent loops put their outputs into a transfer queue."""


class CheckpointManager(checkpoint_engine.CheckpointEngineManager):  # type: ignore[misc]  # no types
    """verl's own, whose engines stay asleep: weights go to ROSE's store alone.

    What the actors are given to train on is reported to the router.
    """

    def __init__(self, *others: Any, **named: Any) -> None:  # noqa: ANN401  # verl's
        super().__init__(*others, **named)
        url, token = os.environ["ROSE_ROUTER_URL"], os.environ.get("ROSE_TURN_TOKEN", "")
        self.actor_wg.update_actor = reporting(
            self.actor_wg.update_actor,
            tensordict_utils.get,
            lambda trained: report(url, trained, token=token),
        )

    def update_weights(self, global_steps: int | None = None) -> Done:
        """Publish."""
        return published(self.actor_wg, global_steps, ray.get)
