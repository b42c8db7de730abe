"""The training loop: ``python -m examples.grpo.train --url URL --store HOST:PORT ...``.

Sampling, learning and publishing overlap: turns stay in flight while a step is computed in a
thread, and each step's weights go out at once; the engines take them up between two iterations.
The run ends at the time limit (or on SIGINT/SIGTERM) with a final evaluation. An unreachable
router is waited for; a refused turn ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import torch

from examples.grpo.client import Counters, LeaseClient
from examples.grpo.errors import OutOfTime, TrainerError
from examples.grpo.evaluate import Evaluation, answer, judge
from examples.grpo.learner import (
    Batch,
    Policy,
    StepStatistics,
    make_batch,
    one_version,
    pool,
    sampled_pairs,
)
from examples.grpo.progress import Progress
from examples.grpo.publishing import RosePublisher, Weights
from examples.grpo.rollouts import Group, Sampler, age
from examples.grpo.task import evaluation_tasks
from rose_core.identity import WeightVersion
from rose_trainer.errors import TrainerLibraryError
from rose_trainer.mismatch import MismatchMeter

# Versions whose weights are kept to recompute what an engine should have said.
_KEPT_VERSIONS = 8
# Trajectories recomputed per step, version and kind of engine for the mismatch meter.
_MISMATCH_ROWS = 8


@dataclass(frozen=True)
class Settings:
    """Knobs of a run.

    Attributes:
        seconds: time limit, final evaluation included.
        per_step, group_size: groups per gradient step, trajectories per group.
        max_age: highest age of a trajectory at consumption, in publishes.
        concurrency: most groups in flight.
        publish_every: steps per published version.
        evaluate_seconds: time between evaluations on the fixed tasks.
    """

    model: Path
    seconds: float = 240.0
    per_step: int = 8
    group_size: int = 8
    learning_rate: float = 2e-3
    max_age: int = 3
    concurrency: int = 12
    publish_every: int = 1
    evaluate_seconds: float = 20.0
    seed: int = 0


@dataclass
class Run:
    """State of a run: three policies that started equal, and what has been published."""

    settings: Settings
    weights: Weights
    progress: Progress
    trained: Policy
    frozen: Policy
    shuffled: Policy
    meter: MismatchMeter
    head: WeightVersion | None = None
    step: int = 0
    published: OrderedDict[str, dict[str, torch.Tensor]] = field(default_factory=OrderedDict)
    counters: Counters = field(default_factory=Counters)
    _evaluated: float = float("-inf")

    def publish(self) -> None:
        """Send the trained policy's weights out and remember them by version."""
        state = self.trained.published_state()
        self.head = self.weights.publish(self.step, self.trained.named_tensors())
        self.published[str(self.head)] = state
        while len(self.published) > _KEPT_VERSIONS:
            self.published.popitem(last=False)
        self.report_published()

    def report_published(self, *, wait: bool = False) -> None:
        """Write a line for every version that has become durable."""
        for done in self.weights.finished(wait=wait):
            self.progress.write("publish", **(asdict(done) | {"version": str(done.version)}))

    def report_mismatch(self) -> None:
        """Engine against trainer log-probs so far, over all and by kind of engine."""
        pools = sorted({place.pool for place in self.meter.rows()})
        self.progress.write(
            "mismatch",
            **asdict(self.meter.total()),
            pools={pool: asdict(self.meter.total(pool=pool)) for pool in pools},
        )

    def learn(self, groups: list[Group]) -> None:
        """One step of the trained policy and of its shuffled control, then a publish."""
        batch = make_batch(groups)
        self._measure_mismatch(batch, groups)
        statistics = self.trained.step(batch)
        generator = torch.Generator().manual_seed(self.settings.seed + self.step)
        self.shuffled.step(batch.shuffled(generator))
        self.step += 1
        self._report(groups, statistics)
        if self.step % self.settings.publish_every == 0:
            self.publish()

    def evaluate(self, *, final: bool = False) -> Evaluation:
        """Compare the three policies on the fixed tasks."""
        tasks = evaluation_tasks()
        rewards = [
            answer(policy, tasks, self.settings.seed)
            for policy in (self.trained, self.frozen, self.shuffled)
        ]
        evaluation = judge(*rewards)
        self.report_mismatch()
        self.progress.write(
            "evaluation", step=self.step, tasks=len(tasks), final=final, **evaluation.record()
        )
        return evaluation

    def evaluate_when_due(self, now: float) -> None:
        """``evaluate`` every ``evaluate_seconds``."""
        if now - self._evaluated >= self.settings.evaluate_seconds:
            self._evaluated = now
            self.evaluate()

    def _measure_mismatch(self, batch: Batch, groups: list[Group]) -> None:
        """Engine log-probs against ours under the very version that sampled them."""
        places: dict[tuple[str, str], list[int]] = {}
        members = [member for group in groups for member in group]
        for row, member in enumerate(members):
            version = one_version(member)
            if version is not None and version in self.published:
                places.setdefault((version, pool(member)), []).append(row)
        for (version, kinds), found in places.items():
            rows = found[:_MISMATCH_ROWS]
            recomputed = torch.zeros_like(batch.behaviour)
            state = self.published[version]
            recomputed[rows] = self.trained.logprobs_with(state, batch.tokens[rows])
            behaviour, expected = sampled_pairs(batch, recomputed, rows)
            self.meter.add(behaviour, expected, version=version, pool=kinds)

    def _report(self, groups: list[Group], statistics: StepStatistics) -> None:
        members = [member for group in groups for member in group]
        ages = [age(member, self.head) or 0 for member in members]
        self.progress.write(
            "step",
            step=self.step,
            reward=float(np.mean([member.reward for member in members])),
            version=str(self.head),
            lag=min(ages),
            staleness_mean=float(np.mean(ages)),
            staleness_max=max(ages),
            tokens=self.counters.tokens,
            turns=self.counters.turns,
            turn_seconds=float(
                np.median([turn.seconds for member in members for turn in member.turns])
            ),
            **asdict(statistics),
        )


async def train(
    settings: Settings, url: str, weights: Weights, progress: Progress, stop: asyncio.Event
) -> Evaluation:
    """Run until the time limit or ``stop``.

    Raises:
        TrainerError: turns are refused or malformed, or the model does not fit.
    """
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    deadline = time.monotonic() + settings.seconds
    trained, frozen, shuffled = (
        Policy(settings.model, learning_rate=settings.learning_rate) for _ in range(3)
    )
    run = Run(settings, weights, progress, trained, frozen, shuffled, MismatchMeter())
    progress.write("start", **{k: str(v) for k, v in asdict(settings).items()})
    await asyncio.to_thread(run.publish)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = LeaseClient(url, session, deadline, counters=run.counters)
        sampler = Sampler(
            client,
            group_size=settings.group_size,
            per_step=settings.per_step,
            bound=settings.max_age,
            concurrency=settings.concurrency,
            head=lambda: run.head,
            seed=settings.seed,
        )
        loop = asyncio.create_task(_steps(run, sampler))
        try:
            reason = await _first_of(loop, stop, deadline)
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
            await sampler.close()
    await asyncio.to_thread(run.report_published, wait=True)
    evaluation = await asyncio.to_thread(run.evaluate, final=True)
    dropped = sampler.statistics.dropped_groups
    progress.write(
        "end", reason=reason, step=run.step, dropped_groups=dropped, **asdict(run.counters)
    )
    return evaluation


async def _steps(run: Run, sampler: Sampler) -> None:
    while True:
        groups = list(await sampler.take())
        # Shielded: a step in its thread cannot be stopped half-way, so it is waited for.
        await _to_thread(lambda taken=groups: run.learn(taken))  # type: ignore[misc]
        await _to_thread(lambda: run.evaluate_when_due(time.monotonic()))


async def _to_thread(work: Callable[[], None]) -> None:
    task = asyncio.create_task(asyncio.to_thread(work))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


async def _first_of(loop: asyncio.Task[None], stop: asyncio.Event, deadline: float) -> str:
    """Wait for the time limit, a stop, or the loop's failure; returns why it ended."""
    stopping = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait(
            {loop, stopping},
            timeout=max(deadline - time.monotonic(), 0),
            return_when=asyncio.FIRST_COMPLETED,
        )
    finally:
        stopping.cancel()
    if loop in done:
        with contextlib.suppress(OutOfTime):  # a turn that saw the limit a moment before we did
            loop.result()
    return "stopped" if stopping in done else "time limit"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(prog="python -m examples.grpo.train", description=__doc__)
    result.add_argument("--url", required=True, help="the lease's status.routerURL")
    result.add_argument("--store", required=True, help="weight store, host:port")
    result.add_argument("--token-file", type=Path, help="bearer token of the weight store")
    result.add_argument("--run", default="grpo", help="name of the training run (spec.weights.run)")
    result.add_argument("--model", type=Path, help="model folder; default: made on the spot")
    result.add_argument("--out", type=Path, required=True, help="folder of progress.jsonl")
    result.add_argument("--quiet", action="store_true", help="do not print progress")
    defaults = Settings(Path())
    for name in (
        "seconds",
        "per_step",
        "group_size",
        "learning_rate",
        "max_age",
        "concurrency",
        "publish_every",
        "evaluate_seconds",
        "seed",
    ):
        default = getattr(defaults, name)
        flag = "--" + name.replace("_", "-")
        result.add_argument(flag, type=type(default), default=default, help=f"default {default}")
    return result


def _settings(arguments: argparse.Namespace) -> Settings:
    from rose_dev.models import make_named  # noqa: PLC0415  # only when no model is given

    model = arguments.model or make_named("tiny")
    names = [name for name in Settings.__dataclass_fields__ if name != "model"]
    return Settings(model, **{name: getattr(arguments, name) for name in names})


async def _run(arguments: argparse.Namespace) -> Evaluation:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    echo = None if arguments.quiet else sys.stdout
    token = arguments.token_file.read_text().strip() if arguments.token_file else ""
    with (
        Progress(arguments.out, echo=echo) as progress,
        RosePublisher(arguments.store, run=arguments.run, token=token) as weights,
    ):
        try:
            return await train(_settings(arguments), arguments.url, weights, progress, stop)
        except TrainerError as error:
            progress.write("end", reason=f"{type(error).__name__}: {error}")
            raise


def main(argv: list[str] | None = None) -> int:
    """Train until the time limit.

    Returns:
        0 when the run ended at its limit, 1 when turns were refused or weights not published.
    """
    arguments = parser().parse_args(argv)
    try:
        evaluation = asyncio.run(_run(arguments))
    except (TrainerError, TrainerLibraryError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    print(
        f"reward on fixed tasks: trained {evaluation.trained:.3f}, frozen {evaluation.frozen:.3f}, "
        f"shuffled control {evaluation.shuffled:.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
