"""The training loop: ``python -m examples.grpo.train --url URL --store HOST:PORT ...``.

Sampling, learning and publishing overlap: turns stay in flight while a step is computed in a
thread, and each step's weights go out at once; the engines take them up between two iterations.
With ``--rounds`` a step takes one round of tail batching (``grpo.rounds``), group by group as they
become ready: their gradients are added on unchanged weights while the round's tail is sampled.
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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Protocol

import aiohttp
import torch

from examples.grpo.client import LeaseClient
from examples.grpo.errors import OutOfTime, RoundTooLarge, TrainerError
from examples.grpo.evaluate import Evaluation
from examples.grpo.progress import Progress
from examples.grpo.publishing import RosePublisher, Weights
from examples.grpo.rollouts import Group, Part, Sampler, SamplerStatistics, Trajectory
from examples.grpo.rounds import RoundSampler
from examples.grpo.run import Run, Settings, begin
from examples.grpo.scoring import TurnRewards
from rose_trainer.errors import TrainerLibraryError
from rose_trainer.rewards import RewardClient
from rose_trainer.rounds import Late, RoundShape
from rose_wire import flags


def _late(text: str) -> Late:
    return "learned" if text == "learned" else flags.count(text)


_KNOBS: dict[str, Callable[[str], float | str]] = {
    "seconds": flags.above_zero,
    "per_step": flags.one_or_more,
    "group_size": flags.one_or_more,
    "learning_rate": flags.amount,
    "max_age": flags.count,
    "concurrency": flags.one_or_more,
    "publish_every": flags.one_or_more,
    "evaluate_seconds": flags.above_zero,
    "seed": flags.count,
    "surplus": flags.amount,
    "member_surplus": flags.amount,
    "late": _late,
}


class Source(Protocol):
    """Where groups come from."""

    statistics: SamplerStatistics

    async def take(self) -> Part:
        """Wait for what one step takes, or for a part of it."""

    async def report(self, groups: Sequence[Group]) -> None:
        """Say that these are trained on, and what became of the others since the last time."""

    async def close(self) -> None:
        """End everything in flight."""


async def train(
    settings: Settings,
    url: str,
    weights: Weights,
    progress: Progress,
    stop: asyncio.Event,
    *,
    turn_token: Path | None = None,
    rewards: str = "",
    reward_token: Path | None = None,
) -> Evaluation:
    """Run until the time limit or ``stop``.

    Raises:
        TrainerError: turns are refused or malformed, or model or rounds do not fit.
        TrainerLibraryError: weights are not published, or rewards are refused.
    """
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    deadline = time.monotonic() + settings.seconds
    run = begin(settings, weights, progress)
    await asyncio.to_thread(run.publish)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = LeaseClient(url, session, deadline, token_file=turn_token, counters=run.counters)
        score = None
        if rewards:
            asked = RewardClient(rewards, session, reward_token)
            score = TurnRewards(asked, settings.group_size, deadline).scored
        sampler = _source(run, client, score)
        reason = await _until_over(run, sampler, stop, deadline)
    await asyncio.to_thread(run.report_published, wait=True)
    evaluation = await asyncio.to_thread(run.evaluate, final=True)
    dropped = sampler.statistics.dropped_groups
    progress.write(
        "end", reason=reason, step=run.step, dropped_groups=dropped, **asdict(run.counters)
    )
    return evaluation


def _source(
    run: Run,
    client: LeaseClient,
    score: Callable[[Trajectory, str], Awaitable[Trajectory]] | None,
) -> Source:
    settings = run.settings
    if settings.rounds:
        return RoundSampler(
            client,
            shape=_shape(settings),
            bound=settings.max_age,
            head=lambda: run.head,
            seed=settings.seed,
            write=run.progress.write,
            score=score,
        )
    return Sampler(
        client,
        group_size=settings.group_size,
        per_step=settings.per_step,
        bound=settings.max_age,
        concurrency=settings.concurrency,
        head=lambda: run.head,
        seed=settings.seed,
    )


def _shape(settings: Settings) -> RoundShape:
    surplus, members = settings.surplus, settings.member_surplus
    late = settings.late
    shape = RoundShape(settings.per_step, settings.group_size, surplus, members, late)
    if shape.started > settings.concurrency:
        message = (
            f"a short round starts {shape.started} groups at once, --concurrency allows "
            f"{settings.concurrency}: raise it, or lower --per-step, --surplus or --late"
        )
        raise RoundTooLarge(message)
    return shape


async def _until_over(run: Run, sampler: Source, stop: asyncio.Event, deadline: float) -> str:
    """Sample and learn; returns why it ended."""
    loop = asyncio.create_task(_steps(run, sampler))
    try:
        return await _first_of(loop, stop, deadline)
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await sampler.close()


async def _steps(run: Run, sampler: Source) -> None:
    while True:
        part = await sampler.take()
        await sampler.report(part.groups)
        # Shielded: a step in its thread cannot be stopped half-way, so it is waited for.
        work = run.learn if part.last else run.add
        await _to_thread(partial(work, list(part.groups)))
        if not part.last:
            continue
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
    result.add_argument(
        "--turn-token-file", type=Path, help="token for the lease (docs/rl-team.md)"
    )
    result.add_argument("--run", default="grpo", help="name of the training run (spec.weights.run)")
    result.add_argument("--model", type=Path, help="model folder; default: made on the spot")
    result.add_argument("--out", type=Path, required=True, help="folder of progress.jsonl")
    result.add_argument(
        "--rounds",
        action="store_true",
        help="tail batching: short rounds start a surplus of groups and of members, and keep the "
        "first; late groups wait for a long round",
    )
    result.add_argument(
        "--rewards", default="", metavar="URL", help="rose rewards; with --rounds (grpo.scoring)"
    )
    result.add_argument("--reward-token-file", type=Path, help="the team's token for it")
    result.add_argument("--quiet", action="store_true", help="do not print progress")
    defaults = Settings(Path())
    for name, kind in _KNOBS.items():
        default = getattr(defaults, name)
        flag = "--" + name.replace("_", "-")
        result.add_argument(flag, type=kind, default=default, help=f"default {default}")
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
    token = flags.token(arguments.token_file)
    flags.token(arguments.turn_token_file)  # a missing one is told now
    with (
        Progress(arguments.out, echo=echo) as progress,
        RosePublisher(arguments.store, run=arguments.run, token=token) as weights,
    ):
        try:
            return await train(
                _settings(arguments),
                arguments.url,
                weights,
                progress,
                stop,
                turn_token=arguments.turn_token_file,
                rewards=arguments.rewards,
                reward_token=arguments.reward_token_file,
            )
        except (TrainerError, TrainerLibraryError) as error:
            progress.write("end", reason=f"{type(error).__name__}: {error}")
            raise


def main(argv: list[str] | None = None) -> int:
    """Train until the time limit.

    Returns:
        0 when the run ended at its limit, 1 when turns were refused, weights not published or a
            file could not be used.
    """
    asked = parser()
    arguments = asked.parse_args(argv)
    if arguments.rewards and not arguments.rounds:
        asked.error("--rewards: give --rounds too; other steps have the task's own rewards")
    if arguments.late != 0 and not arguments.rewards:
        asked.error("--late: give --rewards too; without it no reward comes after its last token")
    if arguments.late != 0 and arguments.max_age < 1:
        asked.error("--late: give --max-age of at least 1: what is late is a publish old")
    try:
        evaluation = asyncio.run(_run(arguments))
    except (TrainerError, TrainerLibraryError, OSError) as error:
        given = sys.argv[1:] if argv is None else argv
        message = flags.complaint(error, given)
        sys.stderr.write(f"examples.grpo.train: {type(error).__name__}: {message}\n")
        return 1
    print(
        f"reward on fixed tasks: trained {evaluation.trained:.3f}, frozen {evaluation.frozen:.3f}, "
        f"shuffled control {evaluation.shuffled:.3f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
