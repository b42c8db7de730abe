"""Keys that engines of a lease have for each other on several nodes: stock SGLang, Mooncake, TCP.

Each engine has a folder of its own, as on a node of its own; the pool is all that they share.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from rose_core.rollouts.engines.kv_store import (
    PAGE_TOKENS,
    KvPoolSpec,
    PoolCounts,
    pool_secret,
    whole_pages,
)
from rose_dev.engine_testing import RealEngine, start_engine, state_of, write_bundle
from rose_dev.mooncake_environment import Pool, is_ready, serving
from rose_dev.waiting import until
from rose_engines.process.client import TurnClient
from rose_engines.weights.control import ControlClient
from tests.engines.test_real_kv_store import (
    FIRST,
    OTHER,
    SECOND,
    TINY,
    ask,
    cut,
    prompt,
)
from tests.engines.test_real_kv_store import (
    SPEC as NODE_SPEC,
)

# Where the cores are busy a page that is late is left, as it should be, and these tests count those
# that came. So engines learn that their prefills take long, and turns that are to pull are long.
pytestmark = pytest.mark.engine

SPEC = replace(NODE_SPEC, context_tokens=4096)  # SGLang asks for its pages in two batches
_STILL = 100  # looks in a row that find as many pages
SECRET, STRANGER = (pool_secret("token of the lease", f"uid-{number}") for number in (1, 2))


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    if not is_ready():
        pytest.skip("no Mooncake; `make engine` sets it up where Debian's packages can be had")
    with serving(tmp_path, 128) as made:
        yield made


@contextmanager
def node(folder: Path, pool: Pool, name: str, secret: str = SECRET) -> Iterator[RealEngine]:
    """An engine at the first version, on a node of its own."""
    place, store = folder / name, folder / f"{name}-store"
    place.mkdir()
    store.mkdir()
    spec = KvPoolSpec(pool.master, python=str(pool.python))
    with start_engine(place, TINY.name, SPEC, str(FIRST), kv_store=store, kv_pool=spec) as engine:
        yield engine


async def join(engine: RealEngine, secret: str = SECRET) -> PoolCounts:
    """Tell an engine its lease's secret, as its host does; what it says of the pool."""
    async with await ControlClient.connect(engine.control) as control:
        return (await control.join_pool(secret)).counts


async def joined(*engines: RealEngine) -> None:
    """Wait until engines, of the lease, have joined the pool."""
    for engine in engines:
        async with asyncio.timeout(120):
            while not (await join(engine)).joined:  # noqa: ASYNC110  # it is asked
                await asyncio.sleep(0.1)


async def learn(engine: RealEngine, seed: int) -> None:
    """Let the engine see how slow its prefills are, and what it gets of the pool.

    Nobody tells it: what it has computed is written, and a part of that read back.
    """
    await learn_to_be_slow(engine, seed)
    await until(lambda: "rose: the pool of keys brings" in engine.log_tail())


async def learn_to_be_slow(engine: RealEngine, seed: int) -> None:
    """Let the engine see that its prefills take long, so that pulls are worth their time."""
    async with TurnClient(engine.url) as client:
        await client.slow_down(2.0)
        await ask(engine, prompt(300, seed), 1, key=f"slow {seed}")  # 7 ms a token
        await client.slow_down(None)


def told(secret: str) -> set[Path]:
    """Processes of this user in whose environment or command line a secret is."""
    found = set()
    for kind in ("environ", "cmdline"):
        for path in Path("/proc").glob(f"[0-9]*/{kind}"):
            with suppress(OSError):  # it has ended, or is another user's
                if secret.encode() in path.read_bytes():
                    found.add(path)
    return found


def networks(pool: Pool, *engines: RealEngine) -> set[str]:
    """Network namespaces of all that speaks to the pool."""
    pids = [one.pid for one in pool.processes]
    for engine in engines:
        children = psutil.Process(engine.process.pid).children(recursive=True)
        pids += [one.pid for one in children if "rose_engines.kv.pool_process" in one.cmdline()]
    assert len(pids) == len(pool.processes) + len(engines)
    return {network_of(f"/proc/{pid}/ns/net") for pid in pids}


def network_of(path: str) -> str:
    """Which network namespace it is."""
    return str(Path(path).readlink())


async def written(pool: Pool, least: int) -> int:
    """Wait until pages, which are written beside the answers, are in the pool; how many are."""
    seen = [-1]

    def settled() -> bool:
        seen.append(pool.objects())
        return seen[-1] >= least and set(seen[-_STILL:]) == {seen[-1]}

    await until(settled)
    return seen[-1]


async def test_a_cut_turn_goes_on_at_another_node_with_the_keys_of_the_first(
    tmp_path: Path, pool: Pool
) -> None:
    ids, other = prompt(3001, 3), prompt(700, 91)
    with node(tmp_path, pool, "first") as first, node(tmp_path, pool, "second") as second:
        await joined(first, second)
        undisturbed, _ = await ask(first, ids, 80, key="undisturbed")
        had = await cut(first, ids, 20)
        assert tuple(had) == undisturbed.output_ids[: len(had)]
        await written(pool, 2 * len(ids) // PAGE_TOKENS)
        await learn(second, 1)
        after, fetched = await ask(second, ids + had, 80 - len(had))
        assert fetched >= whole_pages(len(ids))
        assert len(ids) + len(had) - after.meta["cached_tokens"] <= len(had) + PAGE_TOKENS
        assert tuple(had) + after.output_ids == undisturbed.output_ids

        # The master is lost: nothing is found, nobody waits for it for long.
        count = await written(pool, 1)
        whole, _ = await ask(first, other, 10)
        await written(pool, count + len(other) // PAGE_TOKENS)
        pool.kill_master()
        again, found = await ask(second, other, 10)
        assert (found, again.output_ids) == (0, whole.output_ids)


async def test_keys_of_other_weights_or_of_another_lease_are_not_found_in_the_pool(
    tmp_path: Path, pool: Pool
) -> None:
    # Long enough for a machine whose cores are busy: a turn waits as long as it would prefill.
    ids, fresh, last = prompt(700, 5), prompt(1500, 77), prompt(1500, 47)
    write_bundle(tmp_path / "b", SECOND, state_of(OTHER), (FIRST, state_of(TINY)))
    with (
        node(tmp_path, pool, "first") as first,
        node(tmp_path, pool, "second") as second,
        node(tmp_path, pool, "stranger", STRANGER) as stranger,
    ):
        await joined(first, second)
        if os.geteuid() == 0:
            assert networks(pool, first, second) == {network_of(pool.network)}
        assert not (await join(stranger, STRANGER)).failures
        assert not told(SECRET) | told(STRANGER)
        await ask(first, ids, 8)
        await written(pool, len(ids) // PAGE_TOKENS)
        await learn(stranger, 1)
        assert (await ask(stranger, ids, 8))[1] == 0
        await learn(second, 2)
        for engine in (first, second):
            async with await ControlClient.connect(engine.control) as control:
                await control.stage(tmp_path / "b")
                await control.commit(str(SECOND))
        assert (await ask(second, ids, 8))[1] == 0

        # What the new weights make is found by whoever attests them.
        count = await written(pool, 1)
        made, _ = await ask(first, fresh, 8)
        whole, _ = await ask(first, last, 8)
        await written(pool, count + (len(fresh) + len(last)) // PAGE_TOKENS)
        await learn_to_be_slow(second, 3)  # what it has prefilled since was quick
        same, found = await ask(second, fresh, 8)
        assert found == whole_pages(len(fresh))
        assert same.output_ids == made.output_ids

        # The memory's node stands still in the middle: pages are there, and do not come.
        await learn_to_be_slow(second, 4)
        pool.stand_still(still=True)
        again, found = await ask(second, last, 8)
        assert (found, again.output_ids) == (0, whole.output_ids)
