"""Stock SGLang under an engine host: how tests start the two, order an engine and wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import yaml

from rose_agent.host import main
from rose_agent.host.options.arguments import parser
from rose_agent.os import freezers
from rose_agent.weightsync.follower import Options
from rose_agent.weightsync.main import Followers
from rose_core.api import RolloutLease
from rose_core.identity import SlotKey, SlotUid
from rose_core.wire.host import EngineState, EnsureEngine
from rose_core.wire.sync import EngineSpec, WeightSource
from rose_dev.engine_environment import engine_python, is_ready
from rose_dev.models import make_named
from rose_engines.node.rundir import RunDir
from tests.host.helpers import TOKEN, status_of, until
from tests.weightsync.run import RUN, PublishedRun

READY_SECONDS = 240.0
SAMPLE = Path(__file__).parents[2] / "crds" / "samples" / "rolloutlease.yaml"


def needed_model() -> Path:
    """The small model; a test without engine environment fails and says what to run."""
    if not is_ready():
        pytest.fail("no engine environment; run `make engine`")
    return make_named("tiny-peaked")


def order(
    model: Path, endpoint: str, ranks: int = 1, engine_class: str = "sglang-cpu"
) -> EnsureEngine:
    """An order with the arguments that the sample of a lease names, where SGLang runs it."""
    spec = EngineSpec(
        engine_class, model.name, context_tokens=8192, kv_tokens=16384, max_running=4, ranks=ranks
    )
    if engine_class == "sglang-cpu":
        lease = RolloutLease.model_validate(yaml.safe_load(SAMPLE.read_text()))
        spec = msgspec.structs.replace(spec, arguments=dict(lease.spec.engine_arguments))
    return EnsureEngine(
        slot=SlotKey(SlotUid("slot-1"), 1),
        slot_name="real",
        engine=spec,
        weights=WeightSource(endpoint, RUN),
        token=TOKEN,
    )


@asynccontextmanager
async def syncing_host(
    rundir: Path, models: Path, python: Path | None = None
) -> AsyncIterator[main.RunningHost]:
    """A host inside this process with weight-sync beside it; both end with the test.

    Args:
        rundir: its run directory.
        models: folder of models.
        python: of the engines' environment; None = SGLang's.
    """
    arguments = parser().parse_args(
        [
            *("--rundir", str(rundir), "--models", str(models)),
            *("--engine-python", str(python or engine_python())),
            *("--data-port", "0", "--http-port", "0"),
        ]
    )
    host = await main.start(arguments, freezers.detect("auto", scope=str(rundir)))
    syncing = asyncio.create_task(Followers(RunDir(rundir), Options()).run())
    try:
        yield host
    finally:
        syncing.cancel()
        await asyncio.wait({syncing})
        assert await host.stop(0.0)


async def ready(host: main.RunningHost) -> None:
    async def serves() -> bool:
        status = await status_of(host)
        assert status.restarts == 0, status.message
        assert status.state is not EngineState.FAILED, status.message
        return status.state is EngineState.SERVING

    await until(serves, "SGLang is ready", READY_SECONDS)


async def attested(host: main.RunningHost, run: PublishedRun) -> None:
    assert run.manifest is not None
    wanted = (str(run.manifest.target), run.manifest.digest)

    async def arrived() -> bool:
        status = await status_of(host)
        return (status.version, status.digest) == wanted

    await until(arrived, f"{wanted} is attested")
