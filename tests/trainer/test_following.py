"""What a trainer asks about those who follow it: barriers, ages, smaller blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from rose_core.delta import Codec
from rose_core.delta.quorum import check, reach
from rose_core.identity import WeightVersion
from rose_trainer.errors import NotPublished, NotReached
from rose_trainer.lineage import Published
from rose_trainer.publisher import Publisher
from rose_trainer.sharded import ShardedPublisher
from rose_trainer.staleness import Consumed, Order
from rose_weights.receive.client import WeightsClient
from tests.trainer.test_publisher import RunningStore, running, small_model

__all__ = ["running"]


def attest(store: RunningStore, holder: str, published: Published) -> None:
    async def publish_one() -> None:
        async with WeightsClient(store.address, token="t", holder=holder) as client:
            assert await client.report_attested(published.version, published.digest)

    asyncio.run(publish_one())


def referred(store: RunningStore, published: Published) -> tuple[float, ...]:
    """The trainer's answer to the fixed prompt, as an engine hears it."""

    async def ask() -> tuple[float, ...]:
        async with WeightsClient(store.address, token="t", holder="a") as client:
            return (await client.compare(published.version, published.digest, ())).trainer

    return asyncio.run(ask())


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    rendezvous = f"file://{tmp_path / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_barrier_waits_until_enough_engines_attested_the_step(running: RunningStore) -> None:
    model = small_model(1)
    with Publisher(running.address, "run", token="t", source=lambda: model) as publisher:
        first = publisher.wait(publisher.publish(10), 60)
        with pytest.raises(NotReached, match="none that reports"):
            publisher.wait(10, 0.0, quorum=1.0)
        attest(running, "a", first)
        attest(running, "b", first)
        assert publisher.wait(10, 60, quorum=2) == first
        model["model.norm.weight"][0] = 7.0
        second = publisher.wait(publisher.publish(11), 60)
        attest(running, "a", second)
        assert publisher.wait(11, 60, quorum=0.5) == second
        with pytest.raises(NotReached, match="behind: b"):
            publisher.wait(11, 0.0, quorum=1.0)
        late = threading.Thread(target=attest, args=(running, "b", second))
        late.start()
        assert publisher.wait(11, 60, quorum=1.0) == second
        late.join()
        with pytest.raises(NotPublished, match="step 12"):
            publisher.wait(12, 1)
        with pytest.raises(ValueError, match=r"quorum 1\.5"):
            publisher.wait(11, 1, quorum=1.5)


def test_engines_are_told_what_the_trainer_computes(running: RunningStore) -> None:
    model = small_model(1)
    with Publisher(running.address, "run", token="t", source=lambda: model) as publisher:
        done = publisher.wait(publisher.publish(10), 60)
        assert referred(running, done) == ()
        publisher.refer(10, [-1.5, -2.5])
        assert referred(running, done) == (-1.5, -2.5)
        with pytest.raises(NotPublished, match="step 12"):
            publisher.refer(12, [-1.0])


@pytest.mark.usefixtures("alone")
def test_a_sharded_trainer_asks_and_tells_the_same(running: RunningStore) -> None:
    model = small_model(1)
    with ShardedPublisher(running.address, "run", token="t") as publisher:
        first = publisher.publish(10, model)
        attest(running, "a", first)
        assert publisher.wait(10, 60, quorum=1) == publisher.wait(first.version) == first
        with pytest.raises(NotReached, match="quorum=2"):
            publisher.wait(10, 0.0, quorum=2)
        with pytest.raises(NotPublished, match="step 11"):
            publisher.wait(11)
        publisher.refer(first.version, [-1.5])
        assert referred(running, first) == (-1.5,)
        model["model.norm.weight"][0] = 7.0
        publisher.publish(11, model)
        found = publisher.consume(str(first.version), most=0)
        assert (found.age, found.fresh) == (1, False)


def test_nobody_is_no_quorum() -> None:
    one, two = WeightVersion("run", 1, 1), WeightVersion("run", 1, 2)
    assert not reach(one, {}).meets(1.0)
    assert not reach(two, {"a": one}).meets(0.1)
    assert reach(one, {"a": one, "b": two}).meets(2)
    assert reach(two, {"a": one, "b": two}).behind == ("a",)
    for bad in (0, -1, 0.0, 1.1):
        with pytest.raises(ValueError, match="number of receivers"):
            check(bad)


def test_ages_are_counted_in_publishes_across_incarnations(running: RunningStore) -> None:
    model = small_model(1)
    with Publisher(running.address, "run", token="t", source=lambda: model) as publisher:
        old = publisher.publish(0)
        publisher.wait(publisher.publish(1), 60)
    with Publisher(running.address, "run", token="t", source=lambda: model) as publisher:
        newest = publisher.publish(1)
        assert publisher.consume(newest, most=0).fresh
        found = publisher.consume(str(old), most=1)
        assert (found.age, found.fresh) == (2, False)
        unknown = publisher.consume("run@1.99", most=10)
        assert (unknown.age, unknown.fresh) == (None, False)
        publisher.wait(newest, 60)


def test_a_checkpoint_from_before_the_first_publish_is_one_publish_older() -> None:
    base = WeightVersion.of_base("run", "a" * 32)
    order = Order()
    assert order.consume(base, 0).age == 0
    for sequence in range(2):
        order.add(WeightVersion("run", 1, sequence))
    assert order.consume(base, 2) == Consumed(base, 2, fresh=True)
    assert not order.consume(base, 1).fresh
    # Whatever a later trainer began with, this was not asked of it.
    order.add(WeightVersion("run", 2, 0))
    assert order.consume(base, 9) == Consumed(base, None, fresh=False)


def test_a_publisher_may_send_smaller_blocks_too(running: RunningStore, tmp_path: Path) -> None:
    model = small_model(1)
    bits = model["model.embed_tokens.weight"].view(-1)
    with Publisher(
        running.address, "run", token="t", source=lambda: model, on_base=True
    ) as publisher:
        first = publisher.wait(publisher.publish(0), 60)
        bits[bits.abs() < 0.05] *= 1.01  # the smaller a value, the likelier it moves
        publisher.wait(publisher.publish(1), 60)
    kept = running.store.state("run").versions[-1]
    forms = running.store.manifests(kept)
    assert [max(block.codec for block in form.blocks) for form in forms] == [
        Codec.STEPS,
        Codec.RICE,
    ]
    assert forms[1].block_bytes < forms[0].block_bytes
    assert running.pull(tmp_path / "b", first.version, first.digest) == forms[0]
