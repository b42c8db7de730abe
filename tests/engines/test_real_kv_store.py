"""Keys that engines of a lease keep for each other: stock SGLang, two engines, one folder."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rose_core.identity import WeightVersion
from rose_core.rollouts.engines.kv_store import PAGE_TOKENS, whole_pages
from rose_core.wire.sync import EngineSpec
from rose_dev.engine_testing import RealEngine, start_engine, state_of, write_bundle
from rose_dev.models import RECIPES, Recipe, make_model
from rose_dev.waiting import until
from rose_engines.process.client import Generation, TurnClient
from rose_engines.weights.control import ControlClient

pytestmark = pytest.mark.engine

TINY = RECIPES["tiny"]
OTHER = replace(TINY, seed=7)
_STILL = 100  # looks in a row that find as many pages
FIRST, SECOND = (WeightVersion("kv", 1, number) for number in range(2))
GREEDY = {"temperature": 0, "ignore_eos": True}
SPEC = EngineSpec(
    "test",
    TINY.name,
    context_tokens=2048,
    kv_tokens=8192,
    max_running=4,
    kv_store_bytes=64 << 20,
)


def prompt(tokens: int, seed: int) -> list[int]:
    return [(seed + 7 * place + place // PAGE_TOKENS) % 250 for place in range(tokens)]


@contextmanager
def storing(folder: Path, name: str, model: Recipe | Path = TINY) -> Iterator[RealEngine]:
    """An engine at the first version; those of a test share the folder of keys."""
    place, store = folder / name, folder / "store"
    place.mkdir()
    store.mkdir(exist_ok=True)
    with start_engine(place, model, SPEC, str(FIRST), kv_store=store) as engine:
        yield engine


async def ask(
    engine: RealEngine, ids: list[int], tokens: int, key: str = "turn"
) -> tuple[Generation, int]:
    """The answer, and how many tokens of its prompt were fetched."""
    async with TurnClient(engine.url) as client:
        reply = await client.generate(ids, {**GREEDY, "max_new_tokens": tokens}, extra_key=key)
    found = reply.meta.get("cached_tokens_details") or {}  # None where nothing was cached
    return reply, int(found.get("storage") or 0)


async def cut(engine: RealEngine, ids: list[int], tokens: int) -> list[int]:
    """A turn that is ended after some tokens; what it had."""
    sampling = {**GREEDY, "max_new_tokens": 400}
    async with TurnClient(engine.url) as client:
        await client.slow_down(0.02)
        async for seen in client.stream(ids, sampling, rid="cut", extra_key="turn"):
            if len(seen.output_ids) >= tokens:
                await client.abort("cut")
                break
        await client.slow_down(None)
    return list(seen.output_ids)


def pages(folder: Path) -> list[Path]:
    return sorted((folder / "store").glob("*.page"))


async def kept(folder: Path, least: int) -> int:
    """Wait until pages, which are written beside the answers, are there; how many there are."""
    seen = [-1]

    def settled() -> bool:
        seen.append(len(pages(folder)))
        return seen[-1] >= least and set(seen[-_STILL:]) == {seen[-1]}

    await until(settled)
    return seen[-1]


def damage(files: list[Path]) -> None:
    """A flipped bit, a lost byte, another page's bytes: to each file one of them."""
    first = files[0].read_bytes()
    for index, file in enumerate(files):
        data = bytearray(file.read_bytes())
        match index % 3:
            case 0:
                data[len(data) // 2] ^= 1
            case 1:
                del data[-1]
            case _:
                data = bytearray(first)
        file.write_bytes(data)


async def test_a_cut_turn_goes_on_at_another_engine_with_the_keys_of_the_first(
    tmp_path: Path,
) -> None:
    ids, other = prompt(1501, 3), prompt(700, 91)
    with storing(tmp_path, "first") as first, storing(tmp_path, "second") as second:
        undisturbed, _ = await ask(first, ids, 80, key="undisturbed")
        count = await kept(tmp_path, len(ids) // PAGE_TOKENS)
        had = await cut(first, ids, 20)
        assert tuple(had) == undisturbed.output_ids[: len(had)]
        count = await kept(tmp_path, count + len(ids) // PAGE_TOKENS)
        after, fetched = await ask(second, ids + had, 80 - len(had))
        assert fetched >= whole_pages(len(ids))
        assert tuple(had) + after.output_ids == undisturbed.output_ids

        # Whatever has become of a file, its tokens are computed, and the answer is the same.
        whole, _ = await ask(first, other, 10)
        await kept(tmp_path, count + len(other) // PAGE_TOKENS)
        damage(pages(tmp_path))
        again, found = await ask(second, other, 10)
        assert found == 0
        assert again.output_ids == whole.output_ids


async def test_no_token_of_new_weights_is_found_under_the_version_that_a_turn_began_with(
    tmp_path: Path,
) -> None:
    ids, tokens, before = prompt(700, 5), 900, 10
    write_bundle(tmp_path / "b", SECOND, state_of(OTHER), (FIRST, state_of(TINY)))
    with storing(tmp_path, "first") as first, storing(tmp_path, "second") as second:
        async with (
            TurnClient(first.url) as client,
            await ControlClient.connect(first.control) as control,
        ):
            await control.stage(tmp_path / "b")
            await client.slow_down(0.02)
            committed = None
            sampling = {**GREEDY, "max_new_tokens": tokens}
            async for turn in client.stream(ids, sampling, extra_key="turn"):
                if committed is None and len(turn.output_ids) >= before:
                    committed = asyncio.create_task(control.commit(str(SECOND)))
                if committed is not None and committed.done():
                    await client.slow_down(None)
        assert [span.version for span in turn.spans] == [str(FIRST), str(SECOND)]
        pure = len(ids) + turn.spans[0].end
        # An engine with the old weights finds what they have made, and no more.
        _, found = await ask(second, [*ids, *turn.output_ids], 1)
        assert 0 < found <= whole_pages(pure)

        # What the new weights make from the start is found by whoever attests them.
        fresh = prompt(300, 77)
        count = await kept(tmp_path, 1)
        made, none = await ask(first, fresh, 8)
        await kept(tmp_path, count + len(fresh) // PAGE_TOKENS)
        _, old = await ask(second, fresh, 8)
        async with await ControlClient.connect(second.control) as control:
            await control.stage(tmp_path / "b")
            await control.commit(str(SECOND))
        same, new = await ask(second, fresh, 8)
        assert (none, old) == (0, 0)
        assert new == whole_pages(len(fresh))
        assert same.output_ids == made.output_ids


async def test_other_weights_under_the_same_version_find_no_key(tmp_path: Path) -> None:
    """As of a run that was begun anew: its versions are called as the first one's were."""
    ids = prompt(700, 5)
    with storing(tmp_path, "first") as first, storing(tmp_path, "anew", OTHER) as anew:
        alone, _ = await ask(anew, ids, 20, key="alone")
        count = await kept(tmp_path, len(ids) // PAGE_TOKENS)
        others, _ = await ask(first, ids, 20)
        await kept(tmp_path, count + len(ids) // PAGE_TOKENS)
        again, found = await ask(anew, ids, 20)
        assert (found, again.output_ids) == (0, alone.output_ids)
        assert others.output_ids != alone.output_ids


def other_angles(folder: Path) -> Path:
    """The same weights, to be computed with in another way."""
    made = folder / "angles"
    shutil.copytree(make_model(TINY), made)
    config = json.loads((made / "config.json").read_text())
    config["rope_theta"] = config.get("rope_theta", 10_000.0) * 8
    (made / "config.json").write_text(json.dumps(config))
    return made


async def test_the_same_weights_with_other_settings_find_no_key(tmp_path: Path) -> None:
    """No digest of weights knows how a model turns positions into angles."""
    ids, model = prompt(700, 5), other_angles(tmp_path)
    with storing(tmp_path, "first") as first, storing(tmp_path, "angles-too", model) as other:
        count = await kept(tmp_path, 0)
        await ask(first, ids, 8)
        count = await kept(tmp_path, count + len(ids) // PAGE_TOKENS)
        _, found = await ask(other, ids, 8)
        assert found == 0
        assert await kept(tmp_path, count + len(ids) // PAGE_TOKENS) > count, "it keeps its own"


async def test_an_engine_that_was_dormant_finds_its_keys_again(tmp_path: Path) -> None:
    ids = prompt(300, 9)
    with storing(tmp_path, "only") as engine:
        before, _ = await ask(engine, ids, 8)
        await kept(tmp_path, len(ids) // PAGE_TOKENS)
        async with await ControlClient.connect(engine.control) as control:
            engine.holder.close()
            await control.release()
            engine.holder.open()
            await control.activate()
        after, fetched = await ask(engine, ids, 8)
        assert fetched == whole_pages(len(ids))
        assert after.output_ids == before.output_ids
