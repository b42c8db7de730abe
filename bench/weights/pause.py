"""The commit's pause as an engine reports it: a real SGLang on a GPU, or its weight session alone.

On a GPU with SGLang installed in this Python, an engine of a synthetic model is started, and
bundles that change one weight in a hundred are committed there and back while it is idle. Without,
the same session runs over a tiny state on torch's CPU device, passed by a loop that stands in for
the engine's iterations: that shows that it runs, and its times mean nothing.
"""

from __future__ import annotations

import asyncio
import importlib.util
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.gap.models import SIZES, states
from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import WeightVersion
from rose_core.wire.sync import EngineSpec
from rose_dev.engine_testing import State, start_engine, state_of, write_bundle
from rose_engines.tensors.parameters import DeviceTensor
from rose_engines.weights.calls import Commit, Committed, Stage, Staged
from rose_engines.weights.control import ControlClient
from rose_engines.weights.session import WeightSession

SHARE = 0.01
ROUNDS = 5
_WAIT_SECONDS = 60.0


class NoEngine(OSError):
    """There is no SGLang in this environment."""


def real(size: str) -> dict[str, Any]:
    """Pauses of a real SGLang on the GPU, milliseconds.

    Raises:
        NoEngine: it is not installed here.
    """
    if importlib.util.find_spec("sglang") is None:
        raise NoEngine("sglang is not installed")
    spec = EngineSpec("gap", "gap", context_tokens=4096, kv_tokens=4096, max_running=2)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        with start_engine(
            folder, SIZES[size], spec, device="cuda", python=Path(sys.executable)
        ) as engine:
            bundles = _bundles(folder, *states(engine.model, SHARE))
            return asyncio.run(_rounds(engine.control, bundles))


async def _rounds(control: Path, bundles: tuple[Path, Path]) -> dict[str, Any]:
    found = []
    async with await ControlClient.connect(control) as client:
        for _ in range(ROUNDS):
            for bundle in bundles:
                staged = await client.stage(bundle)
                found.append(await client.commit(staged.version, _WAIT_SECONDS))
    return _figures(found)


def stand_in() -> dict[str, Any]:
    """The same session over a tiny state, without an engine around it."""
    recipe = SIZES["tiny"]
    before = state_of(recipe)
    after: State = {
        name: StoredTensor(dtype, shape, bits ^ (bits % 100 == 0))
        for name, (dtype, shape, bits) in before.items()
    }
    live = {
        name: DeviceTensor(name, dtype, shape, torch.tensor(bits.view("i2")))
        for name, (dtype, shape, bits) in before.items()
    }
    session = WeightSession(live, "gap@1.0")
    with tempfile.TemporaryDirectory() as text, _passing(session.on_boundary):
        bundles = _bundles(Path(text), before, after)
        return _figures([_commit(session, bundle) for _ in range(ROUNDS) for bundle in bundles])


def _commit(session: WeightSession, bundle: Path) -> Committed:
    staged = session.handle(Stage(str(bundle)))
    if not isinstance(staged, Staged):
        raise OSError(f"staging was answered by {staged}")
    answer = session.handle(Commit(staged.version, _WAIT_SECONDS))
    if not isinstance(answer, Committed):
        raise OSError(f"the commit was answered by {answer}")
    return answer


def _bundles(folder: Path, before: State, after: State) -> tuple[Path, Path]:
    here, there = (WeightVersion("gap", 1, number) for number in range(2))
    write_bundle(folder / "there", there, after, (here, before))
    write_bundle(folder / "back", here, before, (there, after))
    return folder / "there", folder / "back"


@contextmanager
def _passing(boundary: Callable[[], None]) -> Iterator[None]:
    """An engine's iterations."""
    ended = threading.Event()

    def iterate() -> None:
        while not ended.is_set():
            boundary()
            time.sleep(0.001)

    thread = threading.Thread(target=iterate, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _figures(commits: list[Committed]) -> dict[str, Any]:
    pauses = [commit.pause_microseconds / 1000 for commit in commits]
    return {
        "changes": commits[0].changed_elements,
        "pause_ms": statistics.median(pauses),
        "pause_ms_max": max(pauses),
    }
