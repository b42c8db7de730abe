"""The fake engine alone: its loop in virtual time, and its death in the middle of a commit."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rose_core.identity import WeightVersion
from rose_dev.engine_testing import PermitHolder, State, write_bundle
from rose_dev.shell import ending_with_us
from rose_engines.errors import EngineUnavailable
from rose_engines.fake.model import continuation, next_token
from rose_engines.fake.scheduler import FakeRequest, FakeScheduler
from rose_engines.tensors.canonical import host_tensors
from rose_engines.tensors.safetensors import write_file
from rose_engines.weights.control import ControlClient
from rose_engines.weights.session import WeightSession


def scheduler(**arguments: object) -> FakeScheduler:
    return FakeScheduler(WeightSession({}, "base"), **arguments)  # type: ignore[arg-type]


async def finish(*requests: FakeRequest) -> None:
    for request in requests:
        while request.finish is None:
            request.changed.clear()
            await request.changed.wait()


def test_tokens_tell_prefix_and_version() -> None:
    run = continuation([1, 2, 3], 50, "a")
    assert run == continuation([1, 2, 3], 50, "a")
    assert run[20:] == continuation([1, 2, 3, *run[:20]], 30, "a")
    assert run != continuation([1, 2, 3], 50, "b")
    assert run != continuation([1, 3, 2], 50, "a")
    lost = continuation([1, 2, 3, *run[:19]], 30, "a")
    assert lost[1:] == run[20:49]
    assert next_token([1, 2, 3, *run[:10], *run[11:20]], "a")[0] != run[20]


@pytest.mark.looptime
async def test_batches_share_iterations_and_others_queue() -> None:
    engine = scheduler(token_seconds=0.01, max_running=2)
    task = asyncio.create_task(engine.run())
    loop = asyncio.get_running_loop()
    requests = [FakeRequest(f"r{n}", [n], 10) for n in range(4)]
    for request in requests:
        engine.submit(request)
    started = loop.time()
    await finish(*requests)
    assert loop.time() - started == pytest.approx(0.2, abs=0.001)
    assert engine.counters.iterations == 20
    assert engine.counters.generated_tokens == 40
    assert requests[3].output == continuation([3], 10, "base")
    task.cancel()


@pytest.mark.looptime
async def test_prefill_costs_by_the_token() -> None:
    engine = scheduler(token_seconds=0.01, prefill_token_seconds=0.001)
    task = asyncio.create_task(engine.run())
    loop = asyncio.get_running_loop()
    request = FakeRequest("r", list(range(100)), 2)
    engine.submit(request)
    started = loop.time()
    await finish(request)
    assert loop.time() - started == pytest.approx(0.12, abs=0.001)
    task.cancel()


@pytest.mark.looptime
async def test_closed_permit_stops_every_token() -> None:
    opened = asyncio.Event()
    engine = scheduler(permit_open=opened.is_set, token_seconds=0.01)
    task = asyncio.create_task(engine.run())
    request = FakeRequest("r", [1], 10)
    engine.submit(request)
    await asyncio.sleep(5)
    assert request.output == []
    opened.set()
    await finish(request)
    assert len(request.output) == 10
    task.cancel()


@contextmanager
def process(folder: Path, model: Path, permit: PermitHolder) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "rose_engines.fake", "--model", str(model)]
    argv += ["--permit", str(folder / "permit"), "--plugin-socket", str(folder / "plugin.sock")]
    child = subprocess.Popen(
        ending_with_us(argv), stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline().startswith("url=")
        yield child
    finally:
        child.kill()
        child.communicate(timeout=60)


def test_it_ends_with_the_process_that_it_is_told_though_that_is_not_its_parent() -> None:
    with subprocess.Popen(["sleep", "600"]) as test:
        argv = [sys.executable, "-m", "rose_engines.fake", "--end-with", str(test.pid)]
        with subprocess.Popen(ending_with_us(argv), stdout=subprocess.PIPE, text=True) as engine:
            assert engine.stdout is not None
            assert engine.stdout.readline().startswith("url=")
            test.kill()
            assert engine.wait(60) == 1


async def test_kill_in_a_commit_leaves_the_base(tmp_path: Path, old: State, sparse: State) -> None:
    """Weights live in the process alone: the next one has the base again and can be caught up."""
    (tmp_path / "model").mkdir()
    write_file(tmp_path / "model" / "model.safetensors", host_tensors(dict(old)))
    base, target = WeightVersion("run", 1, 0), WeightVersion("run", 1, 1)
    manifest = write_bundle(tmp_path / "bundle", target, sparse, (base, old))
    holder = PermitHolder(tmp_path / "permit")
    try:
        with process(tmp_path, tmp_path / "model", holder) as child:
            async with await ControlClient.connect(tmp_path / "plugin.sock") as control:
                await control.stage(tmp_path / "bundle")
                commit = asyncio.create_task(control.commit(str(target)))
                await asyncio.sleep(0.2)  # waits for the permit, which is closed
                assert not commit.done()
                child.send_signal(signal.SIGKILL)
                with pytest.raises(EngineUnavailable, match="hung up"):
                    await commit
        holder.open()
        with process(tmp_path, tmp_path / "model", holder):
            async with await ControlClient.connect(tmp_path / "plugin.sock") as control:
                assert (await control.attest()).digest == manifest.base_digest
                await control.stage(tmp_path / "bundle")
                assert (await control.commit(str(target))).digest == manifest.digest
    finally:
        holder.end()
