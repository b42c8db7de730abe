"""SkyRL publishes through ROSE's weight store; its turns need configuration alone.

SkyRL asks ``weight_sync.get_transfer_strategy_cls`` for a strategy, on every training rank, and
then calls, in this order: ``create_init_info``, ``create_sender`` (beside it, on rank 0,
``POST /init_weight_transfer_engine`` with the info's payload), and in every sync ``POST /pause``,
``send_chunks`` (all ranks must drain them), ``POST /resume``. ``install`` makes it get this one.

Nothing is paused by the sync itself: engines change weights between two tokens. ``skyrl`` is
imported by ``install`` alone.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from rose_trainer.adapters.host import Publishes
from rose_trainer.adapters.master import Master, to_store, word
from rose_trainer.errors import Unsupported

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
        token = word(have.get("ROSE_TURN_TOKEN_FILE", ""))
        return Sender(Master(made, have.get("ROSE_ROUTER_URL", ""), token))


def install(module: str = "skyrl.backends.skyrl_train.weight_sync") -> None:
    """Have SkyRL take this strategy; needed in every training process, before its first sync."""
    found = importlib.import_module(module)
    vars(found)["get_transfer_strategy_cls"] = lambda **_asked: Strategy
