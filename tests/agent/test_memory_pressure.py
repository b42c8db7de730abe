"""Serving needs memory: the guard takes the engine's and gives it back afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose_core.wire.host import EngineState, EngineStatus, HostStatusRequest
from rose_wire.errors import WireError
from rose_wire.rpc import call, connect
from rose_wire.services import STATUS
from tests.agent.node import Node, node, tap_refusal

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(bool(tap_refusal()), reason=tap_refusal() or "can tap"),
]

GIB = 1 << 30


def write_gpu(file: Path, used: int) -> None:
    draft = file.with_suffix(".draft")
    draft.write_text(f"gpus: [{{uuid: GPU-0, memoryBytes: {80 * GIB}, usedBytes: {used}}}]\n")
    draft.replace(file)


async def status(n: Node) -> EngineStatus | None:
    """The engine as its host lists it."""
    channel = connect(f"local:{n.rundir.host_socket}")
    try:
        listed = await call(channel, STATUS, HostStatusRequest(), timeout=5)
    except WireError:
        return None
    finally:
        await channel.close()
    return listed.engines[0] if listed.engines else None


async def is_in(n: Node, state: EngineState) -> bool:
    found = await status(n)
    return found is not None and found.state is state


async def is_known_to_serve(n: Node) -> bool:
    """Whether the guard has heard from the host that the engine serves: it asks once a second."""
    return any(one["what"] == "engine" and one["state"] == "Serving" for one in await n.trace())


async def test_an_engine_gives_its_memory_back_and_gets_it_again(short_dir: Path) -> None:
    gpus = short_dir / "gpus.yaml"
    write_gpu(gpus, 40 * GIB)
    flags = ("--static-gpus", str(gpus), "--calm-seconds", "1")
    async with node(short_dir, *flags) as n:
        n.operator.arguments = {"token-seconds": "0.002", "kv-bytes": str(96 << 20)}
        await n.until(lambda: is_in(n, EngineState.SERVING), "the engine is lent")
        await n.until(lambda: n.gate(is_open=True), "the gate is open")
        # One of which the guard does not know yet that it serves is ended instead.
        await n.until(lambda: is_known_to_serve(n), "the guard knows that it serves")
        before = n.engine()
        # Less than a quarter of the headroom of 3 GiB is left.
        write_gpu(gpus, 80 * GIB - GIB // 2)
        await n.until(lambda: is_in(n, EngineState.DORMANT), "the engine is dormant")
        found = await status(n)
        assert found is not None
        assert found.released_bytes > 48 << 20
        assert not await n.gate(is_open=True)
        await n.until(lambda: n.operator.slot and n.operator.slot.state == "Stopped", "it is told")
        assert await n.generate(20) == 20, "serving is untouched"
        write_gpu(gpus, 40 * GIB)
        await n.until(lambda: is_in(n, EngineState.SERVING), "the engine serves again")
        await n.until(lambda: n.gate(is_open=True), "the gate is open again")
        after = n.engine()
        assert before is not None
        assert after is not None
        assert after.pids[0] == before.pids[0], "the same process"
        assert after.started_ns > before.started_ns, "its weights are to be attested anew"
