"""``python -m bench.engines``: what the plugin costs and how fast it acts, on a real SGLang on CPU.

Stop and restart at iteration boundaries through the permit, and the pause of a commit; with
``--vllm`` a real vLLM does the same beside it, one engine after the other. This shows the control
path; on a GPU the iteration is another one. About a minute for each.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.record import Figure, figure, log, record
from rose_core.delta.safetensors import StoredTensor
from rose_core.identity import WeightVersion
from rose_dev.engine_testing import RealEngine, State, start_engine, state_of, write_bundle
from rose_dev.models import RECIPES
from rose_dev.vllm_testing import start_vllm
from rose_engines.process.client import TurnClient
from rose_engines.weights.control import ControlClient

GREEDY = {"temperature": 0, "ignore_eos": True}


class Arrivals:
    """Times at which tokens of one stream arrived, seconds of the monotonic clock."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.begun = asyncio.Event()

    async def read(self, client: TurnClient, tokens: int) -> None:
        """Read one long stream."""
        sampling = {"max_new_tokens": tokens, **GREEDY}
        async for _ in client.stream([104], sampling, logprobs=False, rid="bench-1."):
            self.times.append(time.monotonic())
            self.begun.set()

    def last_before(self, moment: float, until: float) -> float:
        """Milliseconds from ``moment`` to the last token that came before ``until``."""
        late = [stamp for stamp in self.times if moment <= stamp < until]
        return (late[-1] - moment) * 1e3 if late else 0.0

    def first_after(self, moment: float) -> float:
        """Milliseconds from ``moment`` to the next token."""
        return next((stamp - moment) * 1e3 for stamp in self.times if stamp > moment)


async def stops(engine: RealEngine, rounds: int) -> tuple[list[float], list[float]]:
    """Close and open the permit under a running stream: last token after, first token after."""
    arrivals = Arrivals()
    closings: list[tuple[float, float]] = []
    async with TurnClient(engine.url) as client:
        reader = asyncio.create_task(arrivals.read(client, 3900))
        await arrivals.begun.wait()
        for _ in range(rounds):
            await asyncio.sleep(0.3)
            closed = time.monotonic()
            engine.holder.close()
            await asyncio.sleep(0.3)
            opened = time.monotonic()
            engine.holder.open()
            closings.append((closed, opened))
        await asyncio.sleep(0.3)
        await client.abort("bench-1.")
        await reader
    last = [arrivals.last_before(closed, opened) for closed, opened in closings]
    return last, [arrivals.first_after(opened) for _, opened in closings]


async def commits(engine: RealEngine, state: State, share: float, rounds: int) -> list[float]:
    """Pauses of delta commits that change this share of the elements, microseconds."""
    draw = np.random.default_rng(1)
    pauses = []
    version = WeightVersion("bench", int(time.time()), 0)
    async with await ControlClient.connect(engine.control) as control:
        with tempfile.TemporaryDirectory() as name:
            write_bundle(Path(name) / "0", version, state)
            await control.stage(Path(name) / "0")
            await control.commit(str(version))
            for number in range(1, rounds + 1):
                new = {
                    key: StoredTensor(
                        dtype, shape, np.where(draw.random(bits.size) < share, bits ^ 1, bits)
                    )
                    for key, (dtype, shape, bits) in state.items()
                }
                target = WeightVersion("bench", version.incarnation, number)
                folder = Path(name) / str(number)
                write_bundle(folder, target, new, (version, state))
                await control.stage(folder)
                pauses.append(float((await control.commit(str(target))).pause_microseconds))
                version, state = target, new
    return pauses


async def measure(engine: RealEngine, model: str, rounds: int, kind: str) -> list[Figure]:
    """Every figure of one engine."""
    last, first = await stops(engine, rounds)
    pauses = await commits(engine, state_of(RECIPES[model]), 0.01, rounds)
    return [
        figure(f"{kind}: permit closed to last token, p50", statistics.median(last), "ms"),
        figure(f"{kind}: permit closed to last token, max", max(last), "ms"),
        figure(f"{kind}: permit opened to first token, p50", statistics.median(first), "ms"),
        figure(f"{kind}: commit pause at 1 % changed, p50", statistics.median(pauses), "us"),
        figure(f"{kind}: commit pause at 1 % changed, max", max(pauses), "us"),
    ]


def main(argv: list[str] | None = None) -> int:
    """Measure the engines and print the table."""
    parser = argparse.ArgumentParser(prog="bench.engines", description=__doc__)
    parser.add_argument("--model", default="mid-peaked", choices=sorted(RECIPES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--vllm", action="store_true", help="also a real vLLM (`make vllm`)")
    arguments = parser.parse_args(argv)
    kinds = {"SGLang": start_engine} | ({"vLLM": start_vllm} if arguments.vllm else {})
    figures: list[Figure] = []
    for kind, start in kinds.items():
        log(f"{kind}: a start, then {arguments.rounds} stops and as many commits")
        with (
            tempfile.TemporaryDirectory() as folder,
            start(Path(folder), arguments.model, opened=False) as engine,
        ):
            engine.holder.open()
            figures += asyncio.run(measure(engine, arguments.model, arguments.rounds, kind))
    notes = (f"model {arguments.model}, one stream, {arguments.rounds} rounds, on CPU",)
    record("engines", figures, notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
