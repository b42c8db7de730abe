"""A publisher's side of the weight plane: stage blocks, then move the head.

A publish is idempotent until it is done: after a lost connection or a full disk the same call sends
what is missing and commits again. A publisher that has been fenced learns it here and must stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

import grpc
import msgspec

from rose_core.delta import BlockEntry, Manifest, faults
from rose_core.delta.parts import RankPart
from rose_core.identity import WeightVersion
from rose_weights.call_policy import promptly, understanding
from rose_weights.errors import BadManifest, Incomplete, StoreFailed, from_text
from rose_weights.messages import (
    CommitRequest,
    DescribeRequest,
    Description,
    MissingRequest,
    OpenRequest,
    PartReply,
    PartRequest,
    PutReply,
    VersionInfo,
)
from rose_weights.methods import COMMIT, DESCRIBE, MISSING, OPEN, PART, PUT
from rose_wire import rpc
from rose_wire.errors import Refused, Unavailable

LOG = logging.getLogger(__name__)

_ResultT = TypeVar("_ResultT")

ANSWER_SECONDS = 60.0
BLOCK_SECONDS = 120.0
"""For a block to go out and be kept, also over a slow link; longer is a disk that hangs."""
NAMES_PER_CALL = 100_000


class WeightsWriter:
    """Publishes one run to a store.

    Args:
        address: ``host:port``, or ``tls://host:port`` (``rose_wire.tls``).
        token: bearer token.
        credentials: instead of those that the address asks for.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._channel = rpc.connect(address, credentials=credentials)
        self._token = token

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        await self._channel.close()

    async def open(self, run: str, publisher: str) -> Description:
        """Take the run over; every earlier publisher is fenced.

        Raises:
            WeightsError: the store's reason.
            Unavailable: the store does not answer.
        """
        with understanding():
            return await rpc.call(
                self._channel,
                OPEN,
                OpenRequest(run, publisher),
                timeout=ANSWER_SECONDS,
                token=self._token,
            )

    async def describe(self, run: str) -> Description:
        """The run's kept versions.

        Raises:
            UnknownRun: no such run.
            Unavailable: the store does not answer.
        """
        with understanding():
            return await rpc.call(
                self._channel,
                DESCRIBE,
                DescribeRequest(run),
                timeout=ANSWER_SECONDS,
                token=self._token,
            )

    async def publish(
        self,
        manifest: Manifest,
        blocks: Mapping[bytes, bytes],
        expected: WeightVersion | None,
        *,
        on_base: Manifest | None = None,
        encode_seconds: float = 0.0,
        patience_seconds: float = 300.0,
    ) -> VersionInfo:
        """Stage the blocks and make the manifest the head; tries again while it may help.

        Args:
            manifest: the version.
            blocks: name -> bytes of every block it lists.
            expected: the head this publisher believes in.
            on_base: the same version with blocks coded on their base (``Builder.on_base``).
            encode_seconds: what comparing and encoding took; kept with the version.
            patience_seconds: how long to go on while the store is away or full.

        Raises:
            Fenced: another publisher has taken the run over.
            HeadMoved, BadManifest: the store does not accept it.
            StoreFailed, Unavailable: still so after ``patience_seconds``.
        """
        listed = (*manifest.blocks, *(on_base.blocks if on_base else ()))
        smaller = on_base.encode() if on_base else b""
        request = CommitRequest(manifest.encode(), expected, smaller, encode_seconds)

        async def attempt() -> VersionInfo:
            await self._stage(listed, blocks)
            faults.at("publisher.staged")
            return await self._commit(request)

        return await self._patiently(attempt, str(manifest.target), patience_seconds)

    async def restore(self, manifest: Manifest) -> None:
        """Have the store keep a published version's manifest again, which it says is damaged.

        Raises:
            WeightsError, Unavailable: as ``publish``; also when it was never published.
        """
        await self._commit(CommitRequest(manifest.encode(), None))

    async def publish_part(
        self,
        part: RankPart,
        blocks: Mapping[bytes, bytes],
        expected: WeightVersion | None,
        *,
        encode_seconds: float = 0.0,
        patience_seconds: float = 300.0,
    ) -> VersionInfo:
        """Stage one rank's blocks and wait until the parts of all ranks made a version.

        Args:
            part: what this rank owns.
            blocks: name -> bytes of every block it lists.
            expected: the head this publisher believes in.
            encode_seconds: what comparing and encoding took this rank; the version keeps the
                longest of all ranks.
            patience_seconds: how long to go on while the store or another rank is away.

        Raises:
            Fenced: another publisher has taken the run over.
            HeadMoved, BadManifest: the store does not accept it.
            Incomplete: other ranks' parts did not come in ``patience_seconds``.
            StoreFailed, Unavailable: still so after ``patience_seconds``.
        """
        request = self._request(part, expected, patience_seconds, encode_seconds)

        async def attempt() -> VersionInfo:
            await self._stage(part.blocks, blocks)
            faults.at("publisher.staged")
            reply = await self._together(part, request)
            if reply.head is None:
                message = f"the store has no {part.target} and asks for it in full"
                raise BadManifest(message)
            return reply.head

        return await self._patiently(attempt, str(part.target), patience_seconds)

    async def continue_part(
        self, part: RankPart, expected: WeightVersion | None, *, patience_seconds: float = 300.0
    ) -> VersionInfo | None:
        """Ask, as one rank of all, whether a kept version is the state whose digests these are.

        Args:
            part: what this rank owns, without blocks.
            expected: the head this publisher believes in.
            patience_seconds: how long to go on while the store or another rank is away.

        Returns:
            The version, which is the head now as an empty delta; None = send it in full.

        Raises:
            WeightsError, Unavailable: as ``publish_part``.
        """
        request = self._request(part, expected, patience_seconds, continues=True)

        async def attempt() -> VersionInfo | None:
            return (await self._together(part, request)).head

        return await self._patiently(attempt, str(part.target), patience_seconds)

    @staticmethod
    def _request(
        part: RankPart,
        expected: WeightVersion | None,
        patience_seconds: float,
        encode_seconds: float = 0.0,
        *,
        continues: bool = False,
    ) -> PartRequest:
        seconds = min(patience_seconds, ANSWER_SECONDS / 4)
        data = msgspec.msgpack.encode(part)
        return PartRequest(data, expected, seconds, encode_seconds, continues)

    async def _together(self, part: RankPart, request: PartRequest) -> PartReply:
        """What the store answers when the parts of all ranks are there.

        Raises:
            Incomplete: they did not come in time; ask again.
        """
        with understanding():
            reply: PartReply = await rpc.call(
                self._channel, PART, request, timeout=ANSWER_SECONDS, token=self._token
            )
        if reply.head is None and not reply.in_full:
            message = f"parts of other ranks of {part.target} have not arrived"
            raise Incomplete(message)
        return reply

    async def _patiently(
        self, attempt: Callable[[], Awaitable[_ResultT]], what: str, patience_seconds: float
    ) -> _ResultT:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_seconds
        pause = 0.1
        while True:
            try:
                return await attempt()
            except (Unavailable, StoreFailed, Incomplete) as error:
                if loop.time() + pause > deadline:
                    raise
                LOG.warning("publish of %s goes on: %s", what, error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 5.0)

    async def _stage(self, listed: Iterable[BlockEntry], blocks: Mapping[bytes, bytes]) -> None:
        names = list(dict.fromkeys(block.sha256 for block in listed))
        wanted: list[bytes] = []
        for start in range(0, len(names), NAMES_PER_CALL):
            request = MissingRequest(tuple(names[start : start + NAMES_PER_CALL]))
            with understanding():
                reply = await rpc.call(
                    self._channel, MISSING, request, timeout=ANSWER_SECONDS, token=self._token
                )
            wanted += reply.names
        await self._put([blocks[name] for name in wanted], wanted)

    async def _put(self, blocks: Sequence[bytes], names: Sequence[bytes]) -> None:
        if not blocks:
            return

        async def send() -> AsyncIterator[bytes]:
            for block in blocks:
                yield block

        staged = 0
        try:
            stream = rpc.converse(self._channel, PUT, send(), token=self._token)
            answers = promptly(stream, BLOCK_SECONDS, "the store's answer to a block")
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    _check_answer(answer, names[staged])
                    staged += 1
        except Refused as error:
            # A connection lost while we write looks like an internal error to gRPC.
            raise Unavailable(str(error)) from error
        if staged != len(blocks):
            message = f"the store took {staged} of {len(blocks)} blocks"
            raise Incomplete(message)

    async def _commit(self, request: CommitRequest) -> VersionInfo:
        with understanding():
            return await rpc.call(
                self._channel, COMMIT, request, timeout=ANSWER_SECONDS, token=self._token
            )


def _check_answer(answer: PutReply, name: bytes) -> None:
    """Whether the store keeps the block that was sent.

    Raises:
        Incomplete: it does not, or what it keeps is another one.
        WeightsError: as the store says.
    """
    if answer.error:
        raise from_text(answer.error) or Incomplete(answer.error)
    if answer.name != name:
        message = f"block {name.hex()[:16]} arrived damaged at the store"
        raise Incomplete(message)
