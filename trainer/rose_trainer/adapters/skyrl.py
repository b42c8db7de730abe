"""SkyRL publishes through ROSE's weight store, and says which trajectories it trained on.

SkyRL asks ``weight_sync.get_transfer_strategy_cls`` for a strategy, on every training rank, and
then calls, in this order: ``create_init_info``, ``create_sender`` (beside it, on rank 0,
``POST /init_weight_transfer_engine`` with the info's payload), and in every sync ``POST /pause``,
``send_chunks`` (all ranks must drain them), ``POST /resume``. ``install`` makes it get this one.

Its turns need configuration alone. They carry a session, ``UID_REPETITION``, and its end is SkyRL's
own call; ``install`` adds the group (``_post`` of its client) and what a step is made of
(``convert_to_training_input`` of its trainers, which both have).

Nothing is paused by the sync itself: engines change weights between two tokens. ``skyrl`` is
imported by ``install`` alone.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from rose_trainer.adapters.host_copy import Publishes
from rose_trainer.adapters.master import Master, read_token, to_store
from rose_trainer.adapters.report import UNREADABLE, report
from rose_trainer.errors import Unsupported

__all__ = ["install"]

LOG = logging.getLogger(__name__)

BACKEND = "rose"


class Chunk(Protocol):
    """SkyRL's ``WeightChunk``."""

    @property
    def names(self) -> Sequence[str]:
        """Names, as in the checkpoint."""
        ...

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Whole tensors, gone when the next chunk is asked for."""
        ...


@dataclass(frozen=True)
class InitInfo:
    """What SkyRL passes between its ranks and sends to every server: nothing to agree on."""

    override_existing_receiver: bool = True

    def for_servers(
        self, world_size_per_server: int, num_servers: int, dp_size: int = 1
    ) -> list[Self]:
        """One for each server; the router is one."""
        del world_size_per_server, dp_size
        return [self] * num_servers

    def to_api_payload(self) -> dict[str, str]:
        """Body of ``/init_weight_transfer_engine``; the router takes no other backend."""
        return {"backend": BACKEND}


class Sender:
    """Publishes what SkyRL sends; versions are named 0, 1, 2, ... as its syncs come.

    Args:
        master: publishes; ``None`` on every rank but the first.
    """

    def __init__(self, master: Master | None) -> None:
        self._master = master
        self._syncs = 0

    async def send_chunks(
        self, chunks: Iterable[Chunk], weight_metadata: Mapping[str, list[Any]] | None = None
    ) -> None:
        """Drain the chunks, as every rank must; the first publishes.

        Raises:
            BadState: tensors that cannot be published.
            PublishFailed: an earlier version could not be published.
        """
        del weight_metadata
        for chunk in chunks:
            if self._master is not None:
                for name, tensor in zip(chunk.names, chunk.tensors, strict=True):
                    self._master.host.take(name, tensor)
        if self._master is not None:
            await self._master.publish(self._syncs)
        self._syncs += 1

    def teardown(self) -> None:
        """Publish what has been taken, and end."""
        if self._master is not None:
            self._master.close()


class Strategy:
    """SkyRL's ``WeightTransferStrategy``.

    The environment of the training ranks names the store: ``ROSE_STORE``, ``ROSE_RUN``,
    ``ROSE_STORE_TOKEN_FILE``; and the router, so that spans carry the number of the sync:
    ``ROSE_ROUTER_URL``, ``ROSE_TURN_TOKEN_FILE``.
    """

    publisher: Callable[[], Publishes] | None = None

    @staticmethod
    def create_init_info(ie_cfg: object, inference_world_size: int | None = None) -> InitInfo:
        """The same on every rank."""
        del ie_cfg, inference_world_size
        return InitInfo()

    @staticmethod
    def get_vllm_transfer_engine() -> type:
        """For engines that SkyRL starts itself.

        Raises:
            Unsupported: always.
        """
        message = "engines pull from ROSE's store; give SkyRL the router as its external servers"
        raise Unsupported(message)

    @classmethod
    def create_sender(cls, init_info: InitInfo, inference_client: object) -> Sender:
        """A sender; the first rank's publishes.

        Raises:
            KeyError: ``ROSE_STORE`` or ``ROSE_RUN`` is not set.
        """
        del init_info, inference_client
        group = torch.distributed
        if group.is_available() and group.is_initialized() and group.get_rank():
            return Sender(None)
        have = os.environ
        made = cls.publisher or to_store(
            have["ROSE_STORE"], have["ROSE_RUN"], have.get("ROSE_STORE_TOKEN_FILE", "")
        )
        token = read_token(have.get("ROSE_TURN_TOKEN_FILE", ""))
        return Sender(Master(made, have.get("ROSE_ROUTER_URL", ""), token))


def group_of(session: str) -> str:
    """SkyRL's sessions are ``UID_REPETITION``; empty for those of another shape."""
    uid, _, repetition = session.rpartition("_")
    return uid if repetition.isdecimal() else ""


def grouping(post: Callable[..., Any]) -> Callable[..., Any]:
    """SkyRL's ``_post``, whose turns carry their group."""

    def posted(
        client: object,
        url: str,
        json: object,
        headers: Mapping[str, str] | None = None,
        **named: Any,  # noqa: ANN401  # whatever a release adds
    ) -> Any:  # noqa: ANN401  # SkyRL's
        group = group_of((headers or {}).get("X-Session-ID", ""))
        if group:
            headers = {**(headers or {}), "X-Rose-Group": group}
        return post(client, url, json, headers, **named)

    return posted


def reporting_conversion(
    convert: Callable[..., Any], send: Callable[[dict[str, float | None]], object]
) -> Callable[..., Any]:
    """SkyRL's ``convert_to_training_input``, which then says what the step is made of.

    What is filtered out before is never seen here, and stays *lost*.
    """

    def converted(
        trainer: object,
        output: Mapping[str, Any],
        uids: Sequence[str],
        **named: Any,  # noqa: ANN401  # whatever a release adds
    ) -> Any:  # noqa: ANN401  # SkyRL's batch
        try:
            trained = outcomes(uids, output["rewards"], output.get("trajectory_ids"))
        except UNREADABLE as error:
            LOG.warning("what this step trains on is not reported: %r", error)
            trained = {}
        batch = convert(trainer, output, uids, **named)
        send(trained)
        return batch

    return converted


def outcomes(
    uids: Sequence[str],
    rewards: Sequence[float | Sequence[float]],
    trajectories: Sequence[Any] | None = None,
) -> dict[str, float | None]:
    """Rewards by session key.

    Args:
        uids: of each row its prompt's.
        rewards: of each row, or of its tokens.
        trajectories: of each row SkyRL's ``TrajectoryID``; without, rows of one prompt are its
            repetitions in order, as SkyRL makes them and filters them (whole prompts).
    """
    seen: Counter[str] = Counter()
    found: dict[str, float | None] = {}
    for row, (uid, reward) in enumerate(zip(uids, rewards, strict=True)):
        repetition = seen[uid] if trajectories is None else trajectories[row].repetition_id
        seen[uid] += 1
        key = f"{uid}_{repetition}"
        value = sum(reward) if isinstance(reward, Sequence) else reward
        found[key] = (found.get(key) or 0.0) + float(value)  # steps of one trajectory add up
    return found


def install(
    module: str = "skyrl.backends.skyrl_train.weight_sync",
    client: str = "skyrl.backends.skyrl_train.inference_servers.remote_inference_client",
    trainer: str = "skyrl.train.trainer",
) -> None:
    """Have SkyRL publish and report through ROSE; needed in every process before its first sync.

    Raises:
        ImportError: SkyRL has no weight sync. Without its client or its trainer, groups are
            inferred, or nothing is reported, and the log says so.
    """
    found = importlib.import_module(module)
    vars(found)["get_transfer_strategy_cls"] = lambda **_asked: Strategy
    url = os.environ.get("ROSE_ROUTER_URL", "")
    if not url:
        LOG.warning("ROSE_ROUTER_URL is not set: nothing is reported to a router")
        return
    _wrap(client, "RemoteInferenceClient", "_post", grouping)

    def report_outcomes(trained: dict[str, float | None]) -> None:
        report(url, trained, token=read_token(os.environ.get("ROSE_TURN_TOKEN_FILE", "")))

    _wrap(
        trainer,
        "RayPPOTrainer",
        "convert_to_training_input",
        lambda own: reporting_conversion(own, report_outcomes),
    )


def _wrap(
    module: str,
    owner: str,
    method: str,
    wrapped: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Put a method of SkyRL's inside one of ours; once, however often it is asked for."""
    try:
        holder = getattr(importlib.import_module(module), owner)
        own = getattr(holder, method)
    except (ImportError, AttributeError) as error:
        LOG.warning("%s.%s.%s: not reported through ROSE: %s", module, owner, method, error)
        return
    if getattr(own, "__module__", "") != __name__:
        setattr(holder, method, wrapped(own))
