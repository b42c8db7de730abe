"""``rose ingest``: takes checkpoints that a trainer has written and publishes them.

Some trainers push weights by telling an engine to load a folder. The router of a lease answers such
calls and asks this process, which runs where the folder can be read, to take the checkpoint in. It
answers once the version is durable in the store: the trainer may delete the folder then, and does.

    POST /ingest {"path": "/shared/weight_v000007", "label": "7"} -> {"version": "grpo@1.7", ...}

Only what has changed since the checkpoint before is stored. Folders outside ``--root`` are refused,
links followed. Asked again for the folder that it took last, with nothing in it changed, it answers
with the same version: a trainer whose call timed out asks again, and engines would be a publish
behind without a changed bit.

With ``--base`` it also reads the delta directories of slime and miles (``weight_vNNNNNN``, see
``rose_weights.send.deltadirs``): it holds the newest state and applies each to it.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from aiohttp import web
from safetensors.torch import load_file

from rose_core.identity import WeightVersion
from rose_trainer.errors import BadState, NotPublished, PublishFailed
from rose_trainer.publisher import Publisher
from rose_weights.errors import Damaged
from rose_weights.send.deltadirs import INDEX, DeltaDir
from rose_wire.daemon import listen, stop_signal
from rose_wire.errors import Refused, Unavailable
from rose_wire.flags import (
    VerbParser,
    above_zero,
    amount,
    complaint,
    listener,
    refuse_open,
    run,
    target,
    token,
)

LOG = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]
_NUMBERED = re.compile(r"weight_v(\d+)")


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


@dataclass(frozen=True)
class Push:
    """What a trainer asks to have published; equal ones are the same push, asked again.

    Attributes:
        label: the trainer's name of the version.
        files: name, size, time of change in ns and inode of every file in the folder.
    """

    folder: Path
    label: str
    files: tuple[tuple[str, int, int, int], ...]

    @classmethod
    def of(cls, folder: Path, label: str) -> Push:
        """As the folder is now.

        Raises:
            OSError: it cannot be read.
        """
        files = sorted(path for path in folder.iterdir() if path.is_file())
        stats = [(path.name, path.stat()) for path in files]
        identities = ((name, at.st_size, at.st_mtime_ns, at.st_ino) for name, at in stats)
        return cls(folder, label, tuple(identities))


@dataclass(frozen=True)
class TrainerState:
    """The state that the next delta may start from.

    Attributes:
        number: the trainer's, as in ``weight_v000007``; None = unknown, then no delta can follow.
    """

    tensors: Tensors
    number: int | None

    @classmethod
    def base(cls, folder: Path) -> TrainerState:
        """A checkpoint that was there before the run; trainers count it as 0.

        Raises:
            ValueError: as ``read_checkpoint``.
        """
        return cls(read_checkpoint(folder), number_of(folder) or 0)


class Ingest:
    """The service.

    Args:
        publisher: of the run.
        roots: folders that checkpoints may lie in.
        token: bearer token of callers; empty = none is asked.
        seconds: longest time of one checkpoint.
        base: what the first delta directory starts from; None = deltas are refused, and no copy of
            the newest state is kept for them.
    """

    def __init__(
        self,
        publisher: Publishes,
        roots: list[Path],
        token: str = "",
        seconds: float = 1800.0,
        *,
        base: TrainerState | None = None,
    ) -> None:
        self._publisher = publisher
        self._roots = [root.resolve() for root in roots]
        self._token = token
        self._seconds = seconds
        self._turn = asyncio.Lock()
        self._count = 0
        self._newest = base
        self._last: tuple[Push, WeightVersion] | None = None

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
        except (BadState, Damaged, OSError, ValueError) as error:
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
        push = Push.of(folder, label)
        version = self._version_of(push)
        if version is None:
            version = self._publish(push)
        self._publisher.wait(version, self._seconds)
        seconds = time.monotonic() - began
        LOG.info("%s (%s) is %s, %.1f s", folder, label or "no label", version, seconds)
        return {"version": str(version), "label": label, "seconds": round(seconds, 3)}

    def _version_of(self, push: Push) -> WeightVersion | None:
        """The version that this push has become already."""
        if self._last is None or self._last[0] != push:
            return None
        LOG.info("%s is asked for again", push.folder)
        return self._last[1]

    def _publish(self, push: Push) -> WeightVersion:
        read = self._read(push.folder)
        step = int(push.label) if push.label.isdecimal() else self._count
        version = self._publisher.publish(step, read.tensors)
        self._count += 1
        if self._newest is not None:
            self._newest = read
        # A folder that was written to while it was read is not known to be this version.
        unchanged = Push.of(push.folder, push.label) == push
        self._last = (push, version) if unchanged else None
        return version

    def _read(self, folder: Path) -> TrainerState:
        if not is_delta(folder):
            return TrainerState(read_checkpoint(folder), number_of(folder))
        if self._newest is None:
            message = (
                f"{folder} is a delta, of an earlier folder; start rose ingest with --base and the "
                "checkpoint that the first delta starts from, or have full checkpoints written"
            )
            raise ValueError(message)
        return apply_delta(folder, self._newest)


def is_delta(folder: Path) -> bool:
    """Whether a folder's index says that it is a delta directory.

    Raises:
        ValueError: the index is no JSON.
    """
    index = folder / INDEX
    return index.is_file() and "delta_encoding" in json.loads(index.read_text()).get("metadata", {})


def number_of(folder: Path) -> int | None:
    """The trainer's number in a folder's name, None where there is none."""
    found = _NUMBERED.fullmatch(folder.name)
    return int(found[1]) if found else None


def apply_delta(folder: Path, held: TrainerState) -> TrainerState:
    """The state after a delta directory; tensors that it does not change are those of before.

    Every tensor that it changes has a checksum. The numbers vouch for the others: a delta that was
    left out may have changed a tensor that this one does not mention.

    Raises:
        Damaged: it cannot be read, or starts from another state.
    """
    delta, before = DeltaDir.open(folder), held.tensors
    if delta.base_version != held.number:
        known = "one without a number" if held.number is None else f"{held.number}"
        message = (
            f"{folder} starts from version {delta.base_version}, the newest here is {known}; push "
            "every version in order, or a full checkpoint in a folder weight_vNNNNNN"
        )
        raise Damaged(message)

    def old(name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if name not in before:
            message = f"{folder} changes {name}, which the checkpoint before does not have"
            raise Damaged(message)
        flat = before[name].contiguous().reshape(-1).view(torch.uint8)
        return np.asarray(flat.numpy(), np.uint8)

    after = dict(before)
    for name, new in delta.apply(old):
        kind = before[name]
        after[name] = torch.from_numpy(new).view(kind.dtype).reshape(kind.shape)
    return TrainerState(after, delta.version)


def read_checkpoint(folder: Path) -> Tensors:
    """The tensors of a Hugging Face checkpoint.

    Raises:
        ValueError: no safetensors there, a shard that the index names is missing, or one is broken.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        message = f"{folder} holds no *.safetensors; other formats are not read"
        raise ValueError(message)
    index = folder / INDEX
    if index.is_file():
        contents = json.loads(index.read_text())
        named = set(contents.get("weight_map", {}).values())
        absent = named - {file.name for file in files}
        if absent:
            message = f"{sorted(absent)} are named in {index.name} and not there (yet)"
            raise ValueError(message)
    tensors: Tensors = {}
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
    flags = VerbParser(prog="rose ingest", description=__doc__)
    add = flags.add_argument
    add("--store", type=target, required=True, help="host:port of rose weights serve")
    add("--run", type=run, required=True, help="the run that is published")
    add("--token-file", type=Path, help="bearer token of the store")
    add("--root", type=Path, action="append", required=True, help="folder of checkpoints; repeat")
    add("--address", type=listener, default="127.0.0.1:7500", help="host:port to listen on")
    add(
        "--caller-token-file",
        type=Path,
        help="bearer token that the router must bring (--ingest-token-file)",
    )
    add(
        "--base",
        type=Path,
        help="checkpoint that the first delta directory starts from; without it deltas are refused",
    )
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
        ready: called with the port.
    """
    stop = stop_signal()
    runner = web.AppRunner(service.application(), access_log=None)
    await runner.setup()
    try:
        ready(await listen(runner, address))
        await stop.wait()
    finally:
        await runner.cleanup()


def main(argv: list[str]) -> int:
    """``rose ingest``: 0 stopped, 1 could not start."""
    given = parser().parse_args(argv)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        refuse_open(
            given.address,
            given.caller_token_file,
            "everybody could publish weights",
            give="--caller-token-file",
        )
        own, callers = token(given.token_file), token(given.caller_token_file)
        dtype = getattr(torch, given.dtype) if given.dtype else None
        base = TrainerState.base(given.base) if given.base else None
        LOG.info("publishing run %s to the store at %s", given.run, given.store)
        with Publisher(
            given.store,
            given.run,
            token=own,
            dtype=dtype,
            patience_seconds=given.patience_seconds,
        ) as publisher:
            service = Ingest(publisher, given.root, callers, given.seconds, base=base)
            asyncio.run(serve(service, given.address, lambda port: LOG.info("on port %d", port)))
    except (OSError, ValueError, PublishFailed, Refused, Unavailable) as error:
        sys.stderr.write(f"rose ingest: {complaint(error, argv)}\n")
        return 1
    return 0
