"""verl samples through ROSE's router and publishes through its weight store.

verl lets three of its parts be named in its configuration; ``verl_hooks`` hands it these:

| verl's part | here |
|---|---|
| client that agent loops call (``generate``) | ``Client``: one turn of the router |
| checkpoint engine of the actors (``send_weights``) | ``CheckpointEngine``: the master publishes |
| checkpoint manager (``update_weights``) | ``published`` |
| worker of agent loops (``_run_agent_loop``) | ``reported``: names the group, says its end |
| the actors' ``update_actor`` | ``reporting``: says what was trained on, with its rewards |

Its order in every step: training, then ``update_weights``, which has every actor rank call
``send_weights`` with a generator that all must drain, then turns. No engine of a lease is slept,
aborted or waited for: engines change weights between two tokens, and every token says which version
sampled it. ``verl`` itself is not imported.
"""

from __future__ import annotations

import logging
from collections.abc import (
    AsyncIterable,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Self

from rose_trainer.adapters.host_copy import Named, Publishes, each
from rose_trainer.adapters.master import Master, read_token, to_store
from rose_trainer.adapters.report import UNREADABLE
from rose_trainer.adapters.turns import Turn, Turns
from rose_trainer.errors import Unsupported

LOG = logging.getLogger(__name__)

BACKEND = "rose"
"""``actor_rollout_ref.rollout.checkpoint_engine.backend``."""

SESSIONS = "rose_sessions"
"""Field of verl's batches: keys of the sessions that made a row, one per line."""


@dataclass
class _Rollout:
    """One agent loop that is under way; ``sessions`` is in order of their first turns."""

    group: str
    sessions: dict[str, None] = field(default_factory=dict)


_ROLLOUT: ContextVar[_Rollout | None] = ContextVar("rose_rollout", default=None)


class Client:
    """What agent loops call instead of verl's own client.

    Args:
        turns: asks the router.
        answer: verl's ``TokenOutput``.
        prompt_length, response_length: verl's budgets, for turns without a limit of their own.
    """

    def __init__(
        self, turns: Turns, answer: Callable[..., Any], *, prompt_length: int, response_length: int
    ) -> None:
        self._turns = turns
        self._answer = answer
        self._prompt_length = prompt_length
        self._response_length = response_length

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        **others: Any,  # noqa: ANN401  # media and whatever a release adds
    ) -> Any:  # noqa: ANN401  # verl's TokenOutput
        """One turn of a trajectory.

        Args:
            request_id: the trajectory's; its turns stay on one engine.
            prompt_ids: the whole context.
            sampling_params: verl's: SGLang's, with vLLM's ``max_tokens`` and ``logprobs``.
            others: media, refused unless empty.

        Raises:
            TurnRefused: see ``Turns.ask``.
            Unsupported: media.
        """
        given = sorted(name for name, value in others.items() if value and name != "priority")
        if given:
            message = f"{', '.join(given)}: turns through ROSE hold token ids only"
            raise Unsupported(message)
        prompt = [int(token) for token in prompt_ids]
        sampling = self._sampling(prompt, dict(sampling_params))
        wanted = sampling_params.get("logprobs") not in {None, False}
        rollout, key = _ROLLOUT.get(), str(request_id)
        if rollout is not None:
            rollout.sessions[key] = None
        group = "" if rollout is None else rollout.group
        return self._made(await self._turns.ask(key, prompt, sampling, group), wanted=wanted)

    async def end(self, sessions: Sequence[str], *, withdrawn: bool) -> None:
        """See ``Turns.end``."""
        await self._turns.end(sessions, withdrawn=withdrawn)

    def _sampling(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        if sampling.pop("prompt_logprobs", None) is not None:
            message = "prompt_logprobs: ask a teacher of your own, a lease's engines sample only"
            raise Unsupported(message)
        sampling.pop("logprobs", None)
        left = self._prompt_length + self._response_length - len(prompt)
        most = sampling.pop("max_tokens", None)
        sampling.setdefault(
            "max_new_tokens", min(self._response_length, left) if most is None else most
        )
        return sampling

    def _made(self, turn: Turn, *, wanted: bool) -> Any:  # noqa: ANN401  # verl's TokenOutput
        steps = [int(span["label"]) for span in turn.spans if "label" in span]
        return self._answer(
            token_ids=turn.tokens,
            log_probs=turn.logprobs if wanted else None,
            stop_reason=turn.finish,
            num_preempted=turn.moves,
            extra_fields={
                "global_steps": max(steps, default=None),
                "min_global_steps": min(steps, default=None),
                "max_global_steps": max(steps, default=None),
                "num_cached_tokens": turn.cached_tokens,
                "weight_versions": turn.spans,
            },
        )


class CheckpointEngine:
    """Registered with verl as backend ``rose``; lives in every actor process.

    Args:
        bucket_size, is_master: verl's; nothing is bucketed here, and the master publishes.
        store, run, token_file: of the weight store.
        router, router_token_file: notified which step each version is, so that replies can name it.
        durable_seconds: wait for so long that each version is durable; ``None`` = do not wait.
        publisher: makes the publisher, by default from ``store``, ``run`` and ``token_file``.
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool = False,
        *,
        store: str = "",
        run: str = "",
        token_file: str = "",
        router: str = "",
        router_token_file: str = "",
        durable_seconds: float | None = None,
        publisher: Callable[[], Publishes] | None = None,
    ) -> None:
        del bucket_size
        self._first = is_master
        self._master = Master(
            publisher or to_store(store, run, token_file),
            router,
            read_token(router_token_file) if is_master else "",
            durable_seconds,
        )

    def prepare(self) -> dict[str, Any]:
        """There is nothing to agree on."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Nobody joins a group: engines come to the store."""
        del actor_wg_world_size, rollout_world_size, metadata
        return {}, {}

    def init_process_group(self, **_kwargs: Any) -> None:  # noqa: ANN401  # of other backends
        """There is none."""

    def finalize(self) -> None:
        """Nothing was set up."""

    async def send_weights(
        self, weights: Iterable[Named] | AsyncIterable[Named], global_steps: int | None = None
    ) -> dict[str, float]:
        """Drain the generator, as every rank must; the master publishes.

        Returns:
            verl's metrics of the sync.

        Raises:
            BadState: tensors that cannot be published.
            PublishFailed: an earlier version could not be published.
        """
        async for name, tensor in each(weights):
            if self._first:
                self._master.host.take(name, tensor)
        if self._first:
            await self._master.publish(global_steps or 0)
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> None:
        """For engines that verl starts itself, of which there are none.

        Raises:
            Unsupported: always.
        """
        message = f"step {global_steps}: engines pull from ROSE's store; let verl start none"
        raise Unsupported(message)

    def close(self) -> None:
        """Publish what has been taken, and end."""
        self._master.close()


class Done(dict[str, float]):
    """A result that may be awaited too: verl's trainers do the one or the other."""

    def __await__(self) -> Generator[None, None, Self]:
        """It is there already."""
        yield from ()
        return self


def published(
    actor_wg: Any,  # noqa: ANN401  # verl's worker group
    global_steps: int | None,
    get: Callable[[Any], Iterable[object]],
) -> Done:
    """Have every actor rank publish; engines follow when they can.

    Args:
        actor_wg: the actors.
        global_steps: verl's name of the version.
        get: waits for what the actors return; Ray's.
    """
    metrics = Done()
    for result in get(actor_wg.update_weights(global_steps=global_steps, mode=BACKEND)) or ():
        metrics.update(result if isinstance(result, dict) else {})
    return metrics


async def reported(client: Client, group: str, run: Awaitable[Any], *, validate: bool) -> Any:  # noqa: ANN401  # verl's output
    """Run one agent loop whose turns carry its group, and say when it is over.

    Args:
        client: that the agent loop calls.
        group: verl's ``uid``; empty = the router infers it.
        run: the agent loop; its output's ``extra_fields`` get the session keys.
        validate: it is an evaluation, of which no step is taken.
    """
    rollout = _Rollout(group)
    mark = _ROLLOUT.set(rollout)
    try:
        output = await run
        output.extra_fields[SESSIONS] = "\n".join(rollout.sessions)
        return output
    finally:
        _ROLLOUT.reset(mark)
        await client.end(list(rollout.sessions), withdrawn=validate)


def reporting(
    update: Callable[..., Any],
    get: Callable[[Any, str], Any],
    send: Callable[[dict[str, float | None]], object],
) -> Callable[..., Any]:
    """The actors' ``update_actor``, which then says what it was given to train on.

    Args:
        update: verl's.
        get: reads a field of its batch, ``None`` where there is none; verl's.
        send: takes session keys and rewards.
    """

    def updated(batch: Any, *others: Any, **named: Any) -> Any:  # noqa: ANN401  # verl's
        try:
            trained = outcomes(get(batch, SESSIONS), get(batch, "token_level_scores"))
        except UNREADABLE as error:
            LOG.warning("what this step trains on is not reported: %r", error)
            trained = {}
        answer = update(batch, *others, **named)
        send(trained)
        return answer

    return updated


def outcomes(rows: str | Sequence[str] | None, scores: Any) -> dict[str, float | None]:  # noqa: ANN401  # a tensor
    """Rewards by session key.

    Args:
        rows: of each row the keys, one per line; plain text where all rows have the same;
            ``None`` = the batch does not say.
        scores: of each row the rewards of its tokens; ``None`` = they are not known.
    """
    if rows is None:
        LOG.warning("a batch without %s: what it trains on is not reported", SESSIONS)
        return {}
    if isinstance(rows, str):
        rows = [rows] * (1 if scores is None else len(scores))
    rewards = [None] * len(rows) if scores is None else [float(row.sum()) for row in scores]
    return {
        key: reward
        for row, reward in zip(rows, rewards, strict=True)
        for key in (row or "").splitlines()
    }
