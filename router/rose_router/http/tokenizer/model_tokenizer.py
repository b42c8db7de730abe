"""The tokenizer of a router: its own, or that of the model on its engines' nodes.

| state | event | next |
|---|---|---|
| none | the router was given one (``--tokenizer``) | given, for good |
| none | an engine names a digest, and its node answers with what the digest says | brought |
| none, brought | it is no tokenizer | as before; that digest is never asked for again |
| none, brought | it is not what the digest says | as before; that engine is never asked again |
| brought | no engine has that digest any more, and one has another | brought anew |

A text that comes before the tokenizer waits for it, as turns wait for engines. Next step:
``rose_agent.host.route.proxy`` answers, ``rose_core.wire.tokenizer_files`` bounds what it may
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp

from rose_core.wire.tokenizer_files import MOST_BYTES, BadTokenizerFiles, digest, unpack
from rose_router.engines.engine_client import Target
from rose_router.engines.fleet import Engine, Fleet
from rose_router.errors import BadRequest, Overloaded
from rose_router.http.tokenizer.tokenization import Tokenizer

LOG = logging.getLogger(__name__)

_RETRY_SECONDS = (0.5, 1.0, 2.0, 5.0, 15.0)
_MOST_BROKEN = 64
"""What is remembered as no tokenizer; a lease has one model, and so one digest."""
_PART = 1 / 16
"""Of the router's memory that the files may have: a tokenizer takes some ten times their size
while it is made."""
_FETCH_SECONDS = aiohttp.ClientTimeout(total=60)
_CHUNK = 1 << 18

Fetch = Callable[[Target, int], Awaitable[bytes]]
"""Reads the frame behind an engine's data route, of at most so many bytes."""


class ModelTokenizer:
    """What turns text into token ids, as soon as it is known.

    Args:
        fleet: the engines.
        given: the router's own; ``None`` = that of its engines.
        fetch: reads files from an engine's node.
        memory_bytes: that the process may have; 0 = unknown.
        most_text: characters that it takes at a time; 0 = any number.
    """

    def __init__(
        self,
        fleet: Fleet,
        given: Tokenizer | None = None,
        fetch: Fetch | None = None,
        *,
        memory_bytes: int = 0,
    ) -> None:
        self._fleet = fleet
        self._given = given
        self._fetch = fetch
        self._most = min(MOST_BYTES, int(memory_bytes * _PART) or MOST_BYTES)
        self._digest = ""
        # By digest, or by digest and engine where the engine gave something else.
        self._broken: dict[tuple[str, str], str] = {}
        self._failures = 0
        self._came = asyncio.Event()
        self.most_text = 0
        self.current = given

    def bound(self, most_text: int) -> None:
        """Take no more characters at a time."""
        self.most_text = most_text
        self._keep(self.current)

    def missing(self) -> str:
        """Why there is none, and what to do; empty while one may come."""
        if self.current is not None or self._may_come():
            return ""
        why = next(iter(self._broken.values()), "the engines' nodes have no tokenizer.json for it")
        return (
            f"this router has no tokenizer of its own, and {why}; add it to the model's folder "
            "there, give the router one (--tokenizer, router.template of the chart), or send "
            "token ids"
        )

    def _may_come(self) -> bool:
        if self._fetch is None:
            return False
        return not len(self._fleet) or any(self._is_fresh(one) for one in self._fleet)

    def _is_fresh(self, engine: Engine) -> bool:
        """Whether it names a tokenizer that may be good, as far as it is known."""
        named = engine.update.tokenizer
        return bool(named) and self._broken.keys().isdisjoint({(named, ""), (named, engine.name)})

    async def wait(self, seconds: float) -> None:
        """Return when it is known, or when none will come.

        Raises:
            Overloaded: neither within that time.
        """
        try:
            async with asyncio.timeout(seconds):
                while self.current is None and self._may_come():
                    came = asyncio.ensure_future(self._came.wait())
                    changed = asyncio.ensure_future(self._fleet.changed.wait())
                    try:
                        await asyncio.wait({came, changed}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        came.cancel()
                        changed.cancel()
        except TimeoutError:
            message = (
                f"no engine brought the model's tokenizer within {seconds:.0f} s; try again later, "
                "or send token ids"
            )
            raise Overloaded("NoTokenizer", message, retry_after=5) from None

    async def run(self) -> None:
        """Fetch what engines name, until cancelled."""
        fetch = self._fetch
        if fetch is None or self._given is not None:
            await asyncio.Event().wait()  # nothing to do; a loop that ends ends the router
            return
        while True:
            engine = self._wanted()
            if engine is None:
                await self._fleet.changed.wait(lambda: self._wanted() is None)
                continue
            named, frame = engine.update.tokenizer, b""
            try:
                frame = await fetch(Target.of(engine.update), self._most)
                source = Path(f"tokenizer of engine {engine.name}")
                made = await asyncio.to_thread(_made, frame, named, source)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                wait = _RETRY_SECONDS[min(self._failures, len(_RETRY_SECONDS) - 1)]
                self._failures += 1
                LOG.warning("tokenizer of engine %s: %s; again in %g s", engine.name, error, wait)
                await asyncio.sleep(wait)
            except (BadTokenizerFiles, BadRequest) as error:
                LOG.warning("tokenizer of engine %s cannot be used: %s", engine.name, error)
                if len(self._broken) == _MOST_BROKEN:
                    self._broken.clear()
                # Others may have what this one had no right to name.
                whose = "" if digest(frame) == named else engine.name
                self._broken[named, whose] = f"that of its engines cannot be used ({error})"
                self._fleet.changed.fire()
            else:
                self._failures, self._digest = 0, named
                self._keep(made)
                LOG.info("tokenizer %.12s came from engine %s", named, engine.name)

    def _keep(self, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None:
            return
        if self.most_text:
            tokenizer.most_text = self.most_text
        self.current = tokenizer
        self._came.set()

    def _wanted(self) -> Engine | None:
        """Whose tokenizer to fetch now."""
        able = [one for one in self._fleet if one.update.tokenizer and one.update.url]
        named = {one.update.tokenizer for one in able}
        if self.current is not None and (not named or self._digest in named):
            return None
        fresh = (one for one in able if self._is_fresh(one))
        # After a failure the next one is asked.
        found = sorted(fresh, key=lambda one: (one.detached_at is not None, one.name))
        return found[self._failures % len(found)] if found else None


def _made(frame: bytes, named: str, source: Path) -> Tokenizer:
    return Tokenizer(source, unpack(frame, named))


def _pin(certificate: str) -> aiohttp.Fingerprint | bool:
    """What is taken at the other end; True = what an authority has signed."""
    return aiohttp.Fingerprint(bytes.fromhex(certificate)) if certificate else True


def over_http(session: aiohttp.ClientSession) -> Fetch:
    """Fetches from engines' data routes."""

    async def fetch(target: Target, most: int) -> bytes:
        *earlier, last = map(_pin, target.certificates or ("",))
        for pin in earlier:  # while a host renews its certificate there are two
            with contextlib.suppress(aiohttp.ServerFingerprintMismatch):
                return await read(target, most, pin)
        return await read(target, most, last)

    async def read(target: Target, most: int, pin: aiohttp.Fingerprint | bool) -> bytes:
        url = f"{target.url.rstrip('/')}/tokenizer"
        headers = {"Authorization": f"Bearer {target.token}"} if target.token else {}
        async with session.get(
            url, headers=headers, timeout=_FETCH_SECONDS, raise_for_status=True, ssl=pin
        ) as reply:
            frame = bytearray()
            async for piece in reply.content.iter_chunked(_CHUNK):
                frame += piece
                if len(frame) > most:
                    message = (
                        f"it has more than {most >> 20} MiB of files, and this router has memory "
                        "for no more"
                    )
                    raise BadTokenizerFiles(message)
        return bytes(frame)

    return fetch
