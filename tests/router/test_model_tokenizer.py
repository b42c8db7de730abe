"""The tokenizer that engines bring: by digest, bounded, never what its digest does not say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from rose_core.wire.routing import EngineKind, EngineUpdate
from rose_core.wire.tokenizer_files import (
    MOST_OF,
    TOKENIZER,
    BadTokenizerFiles,
    digest,
    pack,
    unpack,
)
from rose_router.engines.engine_client import Target
from rose_router.engines.fleet import Fleet
from rose_router.errors import Overloaded
from rose_router.http.tokenizer.model_tokenizer import ModelTokenizer
from tests.router.scripts import folder

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def frame(**more: bytes) -> bytes:
    return pack({TOKENIZER: (folder() / TOKENIZER).read_bytes(), **more})


GOOD = frame()
OTHER = frame(**{"generation_config.json": b'{"temperature": 0.5}'})
BROKEN = pack({TOKENIZER: b"no JSON"})


class Nodes:
    """What engines' nodes answer, by the engine's url."""

    def __init__(self) -> None:
        self.frames: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.fleet = Fleet(asyncio.get_running_loop().time, pause_seconds=5)
        self.words = ModelTokenizer(self.fleet, None, self.fetch)

    async def fetch(self, target: Target, most: int) -> bytes:
        self.asked.append(target.url)
        if target.url not in self.frames:
            raise OSError("no route to it")
        assert len(self.frames[target.url]) <= most
        return self.frames[target.url]

    def attach(self, name: str, content: bytes, digest_sent: str | None = None) -> None:
        self.frames[f"http://{name}"] = content
        named = digest(content) if digest_sent is None else digest_sent
        update = EngineUpdate(name, EngineKind.BORROWED, "a/b", f"http://{name}", tokenizer=named)
        self.fleet.apply(update, 1)


@asynccontextmanager
async def nodes() -> AsyncIterator[Nodes]:
    made = Nodes()
    running = asyncio.create_task(made.words.run())
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def settled(made: Nodes) -> None:
    await made.words.wait(60)


async def test_it_is_fetched_once_however_often_engines_speak() -> None:
    async with nodes() as n:
        waiting = asyncio.create_task(n.words.wait(60))
        n.attach("a", GOOD)
        n.attach("b", GOOD)
        await waiting
        for _ in range(5):
            n.attach("a", GOOD)
            await asyncio.sleep(1)
        assert n.words.current is not None
        assert n.asked == ["http://a"]


async def test_what_is_not_as_its_digest_says_is_never_taken() -> None:
    async with nodes() as n:
        n.attach("a", OTHER, digest_sent=digest(GOOD))
        await settled(n)
        assert "came is" in n.words.missing()
        n.attach("b", OTHER)
        await settled(n)
        assert n.words.current is not None
        assert n.words.current.sampling_defaults == {"temperature": 0.5}


async def test_an_engine_that_names_what_it_has_not_keeps_nobody_from_those_that_have_it() -> None:
    async with nodes() as n:
        n.attach("a", OTHER, digest_sent=digest(GOOD))
        n.attach("b", GOOD)
        await settled(n)
        assert n.words.current is not None
        assert n.asked == ["http://a", "http://b"]


async def test_what_is_no_tokenizer_is_asked_for_once_and_named() -> None:
    async with nodes() as n:
        n.attach("a", BROKEN)
        await settled(n)
        for _ in range(3):
            n.attach("a", BROKEN)
            await asyncio.sleep(60)
        assert n.asked == ["http://a"]
        assert "is no tokenizer.json" in n.words.missing()


async def test_another_engine_is_asked_when_one_does_not_answer() -> None:
    async with nodes() as n:
        n.attach("a", GOOD)
        n.attach("b", GOOD)
        del n.frames["http://a"]
        await settled(n)
        assert n.asked == ["http://a", "http://b"]


async def test_a_lease_whose_engines_all_have_another_one_takes_that() -> None:
    async with nodes() as n:
        n.attach("a", GOOD)
        await settled(n)
        n.attach("b", OTHER)
        await asyncio.sleep(1)
        assert n.asked == ["http://a"]
        n.attach("a", OTHER)
        await asyncio.sleep(1)
        assert n.words.current is not None
        assert n.words.current.sampling_defaults == {"temperature": 0.5}


async def test_whoever_waits_too_long_is_told_when_to_come_back() -> None:
    async with nodes() as n:
        with pytest.raises(Overloaded, match="within 60 s") as found:
            await settled(n)
        assert found.value.retry_after > 0


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no tokenizer.json"),
        ({TOKENIZER: b"{}", "../../etc/passwd": b""}, "is none, or too large"),
        ({TOKENIZER: b"{}", "chat_template.jinja": bytes(2 << 20)}, "is none, or too large"),
    ],
)
async def test_frames_hold_what_a_model_needs_and_no_more(
    files: dict[str, bytes], words: str
) -> None:
    packed = pack(files)
    with pytest.raises(BadTokenizerFiles, match=words):
        unpack(packed, digest(packed))


async def test_frames_are_the_same_whoever_packs_them() -> None:
    names = sorted(MOST_OF)
    files = {name: name.encode() for name in names}
    assert pack(files) == pack(dict(reversed(files.items())))
    assert unpack(pack(files), digest(pack(files))) == files
    for raw in (b"", b"\x81", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"files": 3})):
        with pytest.raises(BadTokenizerFiles):
            unpack(raw, digest(raw))
