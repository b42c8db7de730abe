"""What a real SGLang answers: the trained weights are committed into it as any version is."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import torch

from bench.drift.trained import State
from rose_core.delta.probe import PROMPT, Answer
from rose_core.identity import WeightVersion
from rose_dev.engine_testing import State as Stored
from rose_dev.engine_testing import start_engine, write_bundle
from rose_dev.models import Recipe
from rose_engines.process.client import TurnClient
from rose_engines.weights.control import ControlClient

_WAIT_SECONDS = 60.0


def answer(recipe: Recipe, state: State, ranks: int) -> Answer:
    """Log-probs of the fixed prompt from an engine over so many ranks."""
    version = WeightVersion("drift", 1, 0)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        write_bundle(folder / "bundle", version, _bits(state))
        with start_engine(folder, recipe, ranks=ranks) as engine:
            return asyncio.run(_ask(engine.url, engine.control, folder / "bundle", str(version)))


async def _ask(url: str, control: Path, bundle: Path, version: str) -> Answer:
    async with await ControlClient.connect(control) as client:
        staged = await client.stage(bundle)
        await client.commit(staged.version, _WAIT_SECONDS)
    async with TurnClient(url) as engine:
        by, found = await engine.prompt_logprobs(PROMPT)
    if by != version:
        message = f"the engine answered with {by} instead of {version}"
        raise RuntimeError(message)
    return found


def _bits(state: State) -> Stored:
    return {
        name: (
            "BF16",
            tuple(tensor.shape),
            tensor.contiguous().view(torch.int16).numpy().view("u2").ravel(),
        )
        for name, tensor in state.items()
    }
