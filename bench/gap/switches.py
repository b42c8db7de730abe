"""Four ways to bring other weights into a running SGLang; each goes there and back.

What can be prepared while the engine serves is prepared before the clock starts, for everybody:
tensors, image and checkpoint lie in memory (``/dev/shm``), the bundle is pulled. Ours alone has its
staging inside the measured time, because it reads the live weights.
"""

from __future__ import annotations

import base64
import pickle
import shutil
import time
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import numpy as np
import torch

from bench.gap import loaders
from bench.gap.models import pairs, states
from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import WeightVersion
from rose_dev.engine_testing import RealEngine, write_bundle
from rose_engines.tensors.canonical import host_tensors
from rose_engines.tensors.safetensors import write_file
from rose_engines.weights.control import ControlClient


class Switch(Protocol):
    """One way to change weights."""

    name: str

    async def prepare(self, *, there: bool) -> None:
        """Get everything ready that needs no pause."""
        ...

    async def switch(self) -> None:
        """Change the weights under a running stream."""
        ...

    def forget(self) -> None:
        """Give back what was prepared."""
        ...


class Ours:
    """Stage a delta beside the serving engine, commit it between two iterations."""

    def __init__(self, engine: RealEngine, folder: Path, share: float) -> None:
        self.name = f"ours, {share:.3g} changed"
        self._control = engine.control
        self._bundles = [folder / f"there-{share}", folder / f"back-{share}"]
        here, there = (WeightVersion("gap", round(share * 1e6) + 1, n) for n in range(2))
        before, after = states(engine.model, share)
        write_bundle(self._bundles[0], there, after, (here, before))
        write_bundle(self._bundles[1], here, before, (there, after))
        self._next = self._bundles[0]
        self.parts: dict[str, list[float]] = {"staging": [], "pause": [], "confirming": []}

    async def prepare(self, *, there: bool) -> None:
        """Choose the bundle."""
        self._next = self._bundles[0 if there else 1]

    async def switch(self) -> None:
        """Stage and commit; notes how long each part took."""
        async with await ControlClient.connect(self._control) as control:
            staged = await control.stage(self._next)
            began = time.monotonic()
            committed = await control.commit(staged.version, 600.0)
        pause = committed.pause_microseconds / 1e3
        self.parts["staging"].append(1e3 * staged.seconds)
        self.parts["pause"].append(pause)
        self.parts["confirming"].append(1e3 * (time.monotonic() - began) - pause)

    def forget(self) -> None:
        """Nothing is held."""


class Stock:
    """What the ways through SGLang's own calls have in common: pause in place, change, continue."""

    name = ""

    def __init__(self, engine: RealEngine, memory: Path, share: float) -> None:
        self._engine = engine
        self._memory = memory
        self._share = share
        self._next = memory

    def _tensors(self, *, there: bool) -> dict[str, StoredTensor]:
        found = pairs(self._engine.model, self._share)
        return {name: after if there else before for name, before, after in found}

    async def _load(self, loader: str, path: Path) -> None:
        """Have a custom loader read a file, in the session that SGLang asks for."""
        named = [("path", torch.frombuffer(bytearray(str(path).encode()), dtype=torch.uint8))]
        text = base64.b64encode(pickle.dumps(named, protocol=4)).decode()
        call = {"serialized_named_tensors": [text], "flush_cache": False, "load_format": loader}
        await self._calls(
            ("begin_weight_update", {"selector": "all"}),
            ("update_weights_from_tensor", call),
            ("end_weight_update", {}),
        )

    async def _calls(self, *calls: tuple[str, dict[str, Any]]) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            for path, body in (
                ("pause_generation", {"mode": "in_place"}),
                *calls,
                ("continue_generation", {"torch_empty_cache": False}),
            ):
                async with session.post(f"{self._engine.url}/{path}", json=body) as reply:
                    text = await reply.text()
                    if reply.status != 200:
                        message = f"{path} answered {reply.status}: {text[:300]}"
                        raise RuntimeError(message)


class TensorUpdate(Stock):
    """``update_weights_from_tensor`` with every tensor, which lie in shared memory."""

    name = "update_weights_from_tensor"

    async def prepare(self, *, there: bool) -> None:
        """Put the tensors into shared memory."""
        self._next = self._memory / "tensors.safetensors"
        write_file(self._next, host_tensors(self._tensors(there=there)))

    async def switch(self) -> None:
        """One session, one call."""
        await self._load(loaders.TENSORS, self._next)

    def forget(self) -> None:
        """Free the shared memory."""
        self._next.unlink(missing_ok=True)


class ImageCopy(Stock):
    """A whole image of the engine's parameters, copied over them."""

    name = "full RAM-image copy"

    async def prepare(self, *, there: bool) -> None:
        """The first image is the engine's own; the other differs in a share of its elements."""
        here, other = self._memory / "image", self._memory / "other"
        if not here.exists():
            await self._load(loaders.IMAGE, here)
            shutil.copyfile(here, other)
            bits = np.memmap(other, np.uint16, mode="r+")
            draw = np.random.default_rng(1)
            bits[draw.integers(0, bits.size, round(bits.size * self._share))] ^= 1
            bits.flush()
        self._next = other if there else here

    async def switch(self) -> None:
        """Have the engine copy it."""
        await self._load(loaders.IMAGE, self._next)

    def forget(self) -> None:
        """The images stay: they are what such systems hold all the time."""


class DiskUpdate(Stock):
    """``update_weights_from_disk``: the whole checkpoint is loaded again."""

    name = "update_weights_from_disk"

    async def prepare(self, *, there: bool) -> None:
        """Write the other checkpoint once."""
        self._next = self._engine.model
        if not there:
            return
        self._next = self._memory / "checkpoint"
        if not self._next.exists():
            skip = shutil.ignore_patterns("*.safetensors")
            shutil.copytree(self._engine.model, self._next, ignore=skip)
            tensors = host_tensors(self._tensors(there=True))
            write_file(self._next / "model.safetensors", tensors)

    async def switch(self) -> None:
        """Load it."""
        await self._calls(
            ("update_weights_from_disk", {"model_path": str(self._next), "flush_cache": False})
        )

    def forget(self) -> None:
        """Files only."""
