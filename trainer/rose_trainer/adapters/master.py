"""The rank that publishes for a trainer whose other ranks only take part in gathering."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import aiohttp

from rose_core.identity import WeightVersion
from rose_trainer.adapters.host_copy import HostCopy, Publishes
from rose_trainer.publisher import Publisher


class Master:
    """Copies tensors out, publishes them, and tells the router the trainer's name of the version.

    Args:
        publisher: makes the publisher, when the first version comes.
        router: URL of the lease; empty = no router is notified.
        token: bearer token of its callers.
        durable_seconds: wait for so long that each version is durable; ``None`` = do not wait.
    """

    def __init__(
        self,
        publisher: Callable[[], Publishes],
        router: str = "",
        token: str = "",
        durable_seconds: float | None = None,
    ) -> None:
        self.host = HostCopy()
        self._make = publisher
        self._router = router.rstrip("/")
        self._token = token
        self._durable_seconds = durable_seconds
        self._publisher: Publishes | None = None

    async def publish(self, step: int) -> None:
        """Publish what was taken.

        Args:
            step: the trainer's name of the version; replies carry it as ``label``.

        Raises:
            BadState: tensors that cannot be published.
            PublishFailed: an earlier version could not be published.
            aiohttp.ClientError: the router could not be notified.
        """
        if self._publisher is None:
            self._publisher = await asyncio.to_thread(self._make)
        version = self._publisher.publish(step, self.host.tensors)
        await self._send(version, step)
        if self._durable_seconds is not None:
            await asyncio.to_thread(self._publisher.wait, version, self._durable_seconds)

    def close(self) -> None:
        """Publish what has been taken, and end."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    async def _send(self, version: WeightVersion, step: int) -> None:
        if not self._router:
            return
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        body = {"version": str(version), "label": str(step)}
        async with (
            aiohttp.ClientSession(headers=headers, raise_for_status=True) as http,
            http.post(f"{self._router}/labels", json=body),
        ):
            pass


def to_store(address: str, run: str, token_file: str) -> Callable[[], Publisher]:
    """Makes the publisher of a run."""
    return lambda: Publisher(address, run, token=read_token(token_file))


def read_token(path: str) -> str:
    """The token in a file; empty without one."""
    return Path(path).read_text().strip() if path else ""
