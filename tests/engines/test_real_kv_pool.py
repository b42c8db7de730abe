"""Keys that engines of a lease have for each other on several nodes: stock SGLang, Mooncake, TCP.

Each engine has a folder of its own, as on a node of its own; the pool is all that they share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from rose_core.rollouts.engines.kv_store import PAGE_TOKENS, KvPoolSpec, pool_secret, whole_pages
from rose_dev.engine_testing import RealEngine, start_engine, state_of, write_bundle
from rose_dev.mooncake_environment import Pool, is_ready, mooncake_python, serving
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

# Whether pages come in time depends on how fast engines are: where the cores are busy a page that
# is late is left, as it should be, and these tests count those that came.
pytestmark = [pytest.mark.engine, pytest.mark.long]

SPEC = replace(NODE_SPEC, context_tokens=4096)  # SGLang asks for its pages in two batches
_STILL = 100  # looks in a row that find as many pages
SECRET = pool_secret("token of the lease", "uid-1")


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
    spec = KvPoolSpec(pool.master, python=str(mooncake_python()), secret=secret)
    with start_engine(place, TINY.name, SPEC, str(FIRST), kv_store=store, kv_pool=spec) as engine:
        yield engine


async def learn_to_be_slow(engine: RealEngine, seed: int) -> None:
    """Let the engine see that its prefills take long, so that pulls are worth their time."""
    async with TurnClient(engine.url) as client:
        await client.slow_down(2.0)
        await ask(engine, prompt(300, seed), 1, key=f"slow {seed}")
        await client.slow_down(None)


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
        undisturbed, _ = await ask(first, ids, 80, key="undisturbed")
        had = await cut(first, ids, 20)
        assert tuple(had) == undisturbed.output_ids[: len(had)]
        count = await written(pool, 2 * len(ids) // PAGE_TOKENS)
        await learn_to_be_slow(second, 1)
        after, fetched = await ask(second, ids + had, 80 - len(had))
        assert fetched >= whole_pages(len(ids))
        assert len(ids) + len(had) - after.meta["cached_tokens"] <= len(had) + PAGE_TOKENS
        assert tuple(had) + after.output_ids == undisturbed.output_ids

        # The master is lost: nothing is found, nobody waits for it for long.
        whole, _ = await ask(first, other, 10)
        await written(pool, count + len(other) // PAGE_TOKENS)
        pool.kill_master()
        again, found = await ask(second, other, 10)
        assert (found, again.output_ids) == (0, whole.output_ids)


async def test_keys_of_other_weights_or_of_another_lease_are_not_found_in_the_pool(
    tmp_path: Path, pool: Pool
) -> None:
    ids, fresh, last = prompt(700, 5), prompt(300, 77), prompt(300, 47)
    write_bundle(tmp_path / "b", SECOND, state_of(OTHER), (FIRST, state_of(TINY)))
    with (
        node(tmp_path, pool, "first") as first,
        node(tmp_path, pool, "second") as second,
        node(tmp_path, pool, "stranger", pool_secret("token of the lease", "uid-2")) as stranger,
    ):
        await ask(first, ids, 8)
        count = await written(pool, len(ids) // PAGE_TOKENS)
        await learn_to_be_slow(stranger, 1)
        assert (await ask(stranger, ids, 8))[1] == 0
        await learn_to_be_slow(second, 2)
        for engine in (first, second):
            async with await ControlClient.connect(engine.control) as control:
                await control.stage(tmp_path / "b")
                await control.commit(str(SECOND))
        assert (await ask(second, ids, 8))[1] == 0

        # What the new weights make is found by whoever attests them.
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
