"""The weight session of an engine over several ranks: all change between the same two iterations.

Every rank stages its own part (``rose_engines.tensors.slices``); the leader, rank 0, takes the
calls and passes staging and attestation on to their control sockets. A commit uses ``rank_board``
alone. The leader plans it one boundary ahead: the requests that it broadcasts in between take every
rank past that plan, so all of them stop at the same boundary, where

    leader: permit open?    --> Go        every rank: scatter its part, read it back, its digests
    all voted, digests add up to the manifest's    --> Commit    every rank: label, next iteration
    a digest is wrong, a rank failed or is late    --> Undo      every rank: old bits back, checked

Parts that several ranks hold must have the same digest; distinct parts must add up to the tensor.
A rank that does not even undo makes the engine Broken: it ends and is started afresh.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import msgspec

from rose_core.delta import faults
from rose_core.delta.digest import Digest, total
from rose_engines.errors import BrokenWeights, CommitRefused
from rose_engines.tensors.canonical import Live
from rose_engines.weights.calls import (
    Abort,
    Answer,
    Attest,
    Attested,
    Call,
    Commit,
    Export,
    Refused,
    Stage,
    Staged,
    ask,
)
from rose_engines.weights.decoding import HeldTensor
from rose_engines.weights.live import first_wrong, put_back, scatter
from rose_engines.weights.parts import Ranks
from rose_engines.weights.rank_board import RankState
from rose_engines.weights.session import WeightSession
from rose_engines.weights.stager import InThread, Stager
from rose_engines.weights.staging import StagedUpdate

log = logging.getLogger(__name__)

STAGE_SECONDS = 600.0
ASK_SECONDS = 60.0


class RankSession(WeightSession):
    """One rank's weights; what leader and members have in common.

    Args:
        ranks: all of them.
        live, version, set_label, wake, stager: as ``WeightSession``.
    """

    def __init__(
        self,
        live: Live,
        version: str,
        ranks: Ranks,
        set_label: Callable[[str], int] = lambda _: 0,
        wake: Callable[[], None] = lambda: None,
        *,
        stager: Callable[[Sequence[HeldTensor]], Stager] = InThread,
    ) -> None:
        self._ranks = ranks
        self._board = ranks.board
        self._parts: dict[str, Digest] = {}
        self._number = 0
        super().__init__(live, version, set_label, wake, rank=ranks.rank, stager=stager)

    def _first_digest(self) -> Digest:
        self._measure()
        self._ranks.meet()
        return total(self._ranks.whole(self._live).values())

    def _measure(self) -> None:
        """Digests of everything that this rank holds, onto the board."""
        self._parts = {name: tensor.digest() for name, tensor in self._live.items()}
        self._board.write(self._ranks.rank, self._parts)

    def _export(self, path: Path) -> NoReturn:
        raise CommitRefused(
            "Unsupported", f"cannot write {path}: the weights lie in several ranks; attest them"
        )

    def _scatter(self, update: StagedUpdate | None) -> None:
        """This rank's part of the swap, and its vote."""
        if update is None:
            self._post(RankState.FAILED)
            return
        try:
            wrong = scatter(update, self._live)
            found = self._moved(update)
        except Exception:  # a vote, so that the others undo too
            log.exception("rank %d could not swap its weights", self._ranks.rank)
            self._post(RankState.FAILED)
            return
        self._board.write(self._ranks.rank, found)
        self._post(RankState.FAILED if wrong else RankState.SCATTERED)

    def _moved(self, update: StagedUpdate) -> dict[str, Digest]:
        """Digests of this rank's parts of the touched tensors once the changes are in."""
        return {name: self._parts[name].plus(update.moved[name]) for name in update.wanted}

    def _put_back(self, update: StagedUpdate | None) -> bool:
        """Undo this rank's part; whether what it held before is back."""
        if update is not None:
            put_back(update, self._live)
            if any(self._parts[name] != self._live[name].digest() for name in update.wanted):
                self._post(RankState.BROKEN)
                return False
        self._post(RankState.UNDONE)
        return True

    def _keep(self, update: StagedUpdate) -> Digest:
        """The new weights are everybody's."""
        for name in update.wanted:
            self._parts[name] = self._board.read(self._ranks.rank, name)
        return Digest.parse(update.outline.digest)

    def _post(self, state: RankState) -> None:
        self._board.post(self._ranks.rank, self._number, state)


class LeaderSession(RankSession):
    """Rank 0: takes the calls, plans, counts the votes and decides."""

    _planned = False

    @property
    def restless(self) -> bool:
        """A commit is planned for the next boundary, which must come soon."""
        return self._planned

    def on_boundary(self) -> None:
        """Plan what waits for the next boundary, or carry out what was planned for this one."""
        self.iterations += 1
        if self._planned:
            self._planned = False
            self._orders.run(lambda: self._board.announce(self._number, RankState.CANCEL))
        elif self._orders.waiting is not None and self._settled():
            self._number += 1
            self._planned = True
            self._board.plan(self._number, self.iterations + 1)
            self._wake()

    def _settled(self) -> bool:
        """Every rank has read how the last commit ended; the leader may run ahead of them."""
        _, state = self._board.announced()
        return state is not RankState.COMMIT or self._all_posted({RankState.KEPT}, 0.0)

    def _swap(self, update: StagedUpdate) -> Digest:
        self._board.announce(self._number, RankState.GO)
        self._scatter(update)
        problem = self._count(update)
        faults.at("engine.commit.checked")
        if problem is None:
            self._board.announce(self._number, RankState.COMMIT)
            return self._keep(update)
        log.warning("all ranks undo: %s", problem)
        self._board.announce(self._number, RankState.UNDO)
        restored = self._put_back(update)
        if not restored or not self._all_posted({RankState.UNDONE}, self._ranks.undo_seconds):
            raise BrokenWeights(f"{update.version}: {problem}; not every rank could undo")
        raise CommitRefused(problem.reason, f"{problem.message}; the old weights are back")

    def _confirm(self, update: StagedUpdate, before: str) -> Answer | None:  # noqa: ARG002
        """Every rank reads its weights again; what is wrong now cannot be put right by an undo."""
        try:
            found = self._attest().digest
        except CommitRefused as refused:
            found = refused.message
        if found == update.outline.digest:
            return None
        return self._broken(f"{update.version}: the live weights were not confirmed: {found}")

    def _count(self, update: StagedUpdate) -> CommitRefused | None:
        """Why the new weights may not stay, None = they may."""
        version = update.version
        voted = {RankState.SCATTERED, RankState.FAILED}
        if not self._all_posted(voted, self._ranks.vote_seconds):
            late = [rank for rank in self._ranks.others if self._posted(rank) not in voted]
            return CommitRefused("RankLate", f"{version}: no vote from ranks {late}")
        failed = [r for r in range(len(self._ranks.parts)) if self._posted(r) is RankState.FAILED]
        if failed:
            return CommitRefused("RankFailed", f"{version}: ranks {failed} could not swap")
        try:
            wrong = first_wrong(update, self._ranks.whole(update.wanted))
        except CommitRefused as refused:
            return refused
        return CommitRefused("DigestMismatch", f"{version}: {wrong}") if wrong else None

    def _posted(self, rank: int) -> RankState:
        number, state = self._board.posted(rank)
        return state if number == self._number else RankState.QUIET

    def _all_posted(self, states: set[RankState], seconds: float) -> bool:
        return self._board.wait(
            lambda: all(self._posted(rank) in states for rank in self._ranks.others), seconds
        )

    def _stage(self, bundle: Path) -> Staged:
        with ThreadPoolExecutor(len(self._ranks.others)) as pool:
            answers = [
                pool.submit(self._ask, rank, Stage(str(bundle)), STAGE_SECONDS)
                for rank in self._ranks.others
            ]
            mine = super()._stage(bundle)
            try:
                staged = [answer.result() for answer in answers]
            except CommitRefused:
                self._forget()
                raise
        sizes = [one.staged_bytes for one in staged if isinstance(one, Staged)]
        return msgspec.structs.replace(mine, staged_bytes=mine.staged_bytes + sum(sizes))

    def _dispatch_weights(self, call: Call) -> Answer:
        if isinstance(call, Abort):
            for rank in self._ranks.others:
                self._ask(rank, call, ASK_SECONDS)
        return super()._dispatch_weights(call)

    def _attest(self) -> Attested:
        started = time.monotonic()
        with ThreadPoolExecutor(len(self._ranks.others)) as pool:
            theirs = [
                pool.submit(self._ask, rank, Attest(), STAGE_SECONDS) for rank in self._ranks.others
            ]
            self._measure()
            for answer in theirs:
                answer.result()
        self._digest = total(self._ranks.whole(self._live).values())
        return Attested(self._version, str(self._digest), time.monotonic() - started)

    def _ask(self, rank: int, call: Call, seconds: float) -> Answer:
        try:
            answer = ask(self._ranks.sockets[rank], call, seconds)
        except OSError as error:
            raise CommitRefused("RankLate", f"rank {rank} does not answer: {error}") from error
        if isinstance(answer, Refused):
            raise CommitRefused(answer.reason, f"rank {rank}: {answer.message}")
        return answer


class MemberSession(RankSession):
    """Any other rank: stages when it is asked to, and does what the leader has posted."""

    # Its memory is unlocked where it is let go of: beside the serving engine, not in its pause.
    _spent: StagedUpdate | None = None

    def on_boundary(self) -> None:
        """Take part in the commit that is planned for this boundary."""
        self.iterations += 1
        number, _ = self._board.announced()
        if self._board.planned != self.iterations or number == self._number:
            return
        self._number = number
        self._board.wait_for(
            lambda: (
                self._led() in {RankState.GO, RankState.CANCEL, RankState.COMMIT, RankState.UNDO}
            )
        )
        if self._led() is RankState.CANCEL:
            return
        update = self._spent = self._staged
        self._phase = "Committing"
        self._scatter(update)
        self._board.wait_for(lambda: self._led() in {RankState.COMMIT, RankState.UNDO})
        if self._led() is RankState.UNDO:
            restored = self._put_back(update)
            self._forget()
            self._phase = self._phase if restored else "Broken"
        elif update is not None:
            self._digest, self._version = self._keep(update), update.version
            self._commits += 1
            self._set_label(update.version)
            self._forget()
            self._post(RankState.KEPT)

    def _led(self) -> RankState:
        """The leader's state for this commit; QUIET once it has gone on to the next."""
        number, state = self._board.announced()
        return state if number == self._number else RankState.CANCEL

    def _stage(self, bundle: Path) -> Staged:
        self._spent = None  # of a commit that was undone, after which nobody attests
        return super()._stage(bundle)

    def _dispatch_weights(self, call: Call) -> Answer:
        if isinstance(call, Commit | Export):
            raise CommitRefused("NotLeader", "ask rank 0")
        return super()._dispatch_weights(call)

    def _attest(self) -> Attested:
        started = time.monotonic()
        self._measure()
        self._spent = None
        digest = total(self._parts.values())
        return Attested(self._version, str(digest), time.monotonic() - started)
