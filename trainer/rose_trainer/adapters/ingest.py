"""``rose ingest``: takes checkpoints that a trainer has written and publishes them.

Some trainers push weights by telling an engine to load a folder. The router of a lease answers such
calls and asks this process, which runs where the folder can be read, to take the checkpoint in. It
answers once the version is durable in the store: the trainer may delete the folder then, and does.

    POST /ingest {"path": "/shared/weight_v000007", "label": "7"} -> {"version": "grpo@1.7", ...}

Only what has changed since the checkpoint before is stored. Folders outside ``--root`` are refused,
links followed.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from aiohttp import web
from safetensors.torch import load_file

from rose_core.identity import WeightVersion
from rose_trainer.errors import BadState, NotPublished, PublishFailed
from rose_trainer.publisher import Publisher
from rose_wire.errors import Refused, Unavailable
from rose_wire.flags import above_zero, amount, complaint, listener, run, target, token

LOG = logging.getLogger(__name__)


class Publishes(Protocol):
    """The part of ``Publisher`` that is needed."""

    def publish(
        self, step: int, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> WeightVersion:
        """Take a snapshot."""
        ...

    def wait(self, version: WeightVersion, timeout_seconds: float | None = None) -> object:
        """Wait until it is durable."""
        ...


class Ingest:
    """The service.

    Args:
        publisher: of the run.
        roots: folders that checkpoints may lie in.
        token: bearer token of callers; empty = none is asked.
        seconds: longest time of one checkpoint.
    """

    def __init__(
        self, publisher: Publishes, roots: list[Path], token: str = "", seconds: float = 1800.0
    ) -> None:
        self._publisher = publisher
        self._roots = [root.resolve() for root in roots]
        self._token = token
        self._seconds = seconds
        self._turn = asyncio.Lock()
        self._count = 0

    def application(self) -> web.Application:
        """The HTTP face."""
        app = web.Application()
        app.add_routes([web.post("/ingest", self._ingest), web.get("/health", self._health)])
        return app

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _ingest(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").encode()
        if self._token and not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return _refusal(401, "bearer token missing or wrong")
        try:
            body = await request.json()
            folder = self._folder(body.get("path"))
            label = str(body.get("label") or "")
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            return _refusal(400, f"path: {error}")
        try:
            async with self._turn:  # one at a time: versions are in the order of their pushes
                answer = await asyncio.to_thread(self._take, folder, label)
        except (BadState, OSError, ValueError) as error:
            return _refusal(400, f"{folder} cannot be published: {error}")
        except (PublishFailed, NotPublished) as error:
            return _refusal(503, str(error))
        return web.json_response(answer)

    def _folder(self, path: object) -> Path:
        if not isinstance(path, str) or not path.startswith("/"):
            message = f"expected the absolute name of a folder, got {path!r:.200}"
            raise ValueError(message)
        folder = Path(path).resolve()
        if not any(folder.is_relative_to(root) for root in self._roots):
            roots = ", ".join(map(str, self._roots))
            message = f"{path} is outside of {roots}; start rose ingest with --root for it"
            raise ValueError(message)
        return folder

    def _take(self, folder: Path, label: str) -> dict[str, Any]:
        began = time.monotonic()
        tensors = read_checkpoint(folder)
        step = int(label) if label.isdecimal() else self._count
        version = self._publisher.publish(step, tensors)
        self._publisher.wait(version, self._seconds)
        self._count += 1
        seconds = time.monotonic() - began
        LOG.info("%s (%s) is %s, %.1f s", folder, label or "no label", version, seconds)
        return {"version": str(version), "label": label, "seconds": round(seconds, 3)}


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a Hugging Face checkpoint.

    Raises:
        ValueError: no safetensors there, a shard that the index names is missing, or one is broken.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        message = f"{folder} holds no *.safetensors; other formats are not read"
        raise ValueError(message)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        told = json.loads(index.read_text())
        if "delta_encoding" in told.get("metadata", {}):
            message = f"{folder} is a delta, of an earlier folder; have full checkpoints written"
            raise ValueError(message)
        named = set(told.get("weight_map", {}).values())
        absent = named - {file.name for file in files}
        if absent:
            message = f"{sorted(absent)} are named in {index.name} and not there (yet)"
            raise ValueError(message)
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except Exception as error:  # the library raises classes of its own that it does not export
            message = f"{file} is no safetensors file: {error}"
            raise ValueError(message) from error
    return tensors


def _refusal(status: int, message: str) -> web.Response:
    LOG.warning("refused with %d: %s", status, message)
    return web.json_response({"message": message}, status=status)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="rose ingest", description=__doc__)
    add = flags.add_argument
    add("--store", type=target, required=True, help="host:port of rose weights serve")
    add("--run", type=run, required=True, help="the run that is published")
    add("--token-file", type=Path, help="bearer token of the store")
    add("--root", type=Path, action="append", required=True, help="folder of checkpoints; repeat")
    add("--address", type=listener, default="127.0.0.1:7500", help="host:port to listen on")
    add("--caller-token-file", type=Path, help="bearer token that the router must bring")
    add("--dtype", choices=("bfloat16", "float16", "float32"), help="cast to this on the way")
    add("--patience-seconds", type=amount, default=1800.0, help="how long the store may be away")
    add("--seconds", type=above_zero, default=1800.0, help="longest time of one checkpoint")
    return flags


async def serve(
    service: Ingest, address: str, ready: Callable[[int], None] = lambda _: None
) -> None:
    """Run until SIGTERM or SIGINT.

    Args:
        service: what to serve.
        address: ``host:port``.
        ready: told the port.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(service.application(), access_log=None)
    await runner.setup()
    host, port = address.rsplit(":", 1)
    try:
        await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        ready(runner.addresses[0][1])
        await stop.wait()
    finally:
        await runner.cleanup()


def main(argv: list[str]) -> int:
    """``rose ingest``: 0 stopped, 1 could not start."""
    given = parser().parse_args(argv)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        own, callers = token(given.token_file), token(given.caller_token_file)
        dtype = getattr(torch, given.dtype) if given.dtype else None
        LOG.info("publishing run %s to the store at %s", given.run, given.store)
        with Publisher(
            given.store,
            given.run,
            token=own,
            dtype=dtype,
            patience_seconds=given.patience_seconds,
        ) as publisher:
            service = Ingest(publisher, given.root, callers, given.seconds)
            asyncio.run(serve(service, given.address, lambda port: LOG.info("on port %d", port)))
    except (OSError, PublishFailed, Refused, Unavailable) as error:
        sys.stderr.write(f"rose ingest: {complaint(error, argv)}\n")
        return 1
    return 0
