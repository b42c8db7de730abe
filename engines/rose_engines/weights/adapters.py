"""The weights of an engine that computes with LoRA adapters over a base which nobody trains.

What is live here are adapters: a version is staged, committed at a boundary and attested as that
of any run, and is a few megabytes. The base belongs to what is attested: its digest, measured on
the live weights, is one of the tensors, so a version for another base is refused when it is staged.

An engine has room for a fixed number of adapters, each of another run with a session of its own:
nothing that one run does waits for another or touches its weights, label or cache keys.

    free    --bind-->      bound
    bound   --unbind-->    closing   (its requests are ended, new ones refused)
    closing --last one gone, at a boundary--> free   (zeroed)
    closing --bind-->      bound     (an order to unbind that still waits does nothing)

The first slot is kept for the run that is bound as the first one: requests that name no run are
computed there, in whatever order runs are bound.

Next step: ``rose_engines.sglang.adapters`` finds the slots in a running SGLang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from rose_core.adapters import BASE, SCALE, run_of
from rose_core.delta.bits import Bits
from rose_core.delta.digest import Digest, digest_run, total
from rose_engines.errors import CommitRefused
from rose_engines.tensors.canonical import HostTensor, Live, Where, WholeTensor
from rose_engines.weights.calls import (
    Activate,
    Answer,
    Bind,
    Call,
    Draft,
    JoinPool,
    Refused,
    Release,
    Staged,
    Status,
    Unbind,
)
from rose_engines.weights.handover import BoundaryWork
from rose_engines.weights.live import zero
from rose_engines.weights.session import WeightSession


class BaseDigest(WholeTensor):
    """The base model as one small tensor: its digest.

    Args:
        measure: reads the digest from the live weights of the base; takes a while.
    """

    def __init__(self, measure: Callable[[], Digest]) -> None:
        self.name, self.dtype = BASE, "I64"
        self.shape: tuple[int, ...] = (2,)
        self._measure = measure
        self._bits = _bits_of(measure())

    @property
    def measured(self) -> Digest:
        """Digest of the words, as last measured."""
        return digest_run(self.name, 0, self._bits)

    def take(self, where: Where) -> Bits:
        """A copy of words, as last measured."""
        return self._bits[where].copy()

    def put(self, where: Where, bits: Bits) -> None:
        """Nothing: ``AdapterSession`` stages no other words than these."""

    def holds(self, where: Where, bits: Bits) -> bool:
        """Whether the words are these, as last measured."""
        return np.array_equal(self._bits[where], bits)

    def all_bits(self) -> Bits:
        """Both words, as last measured."""
        return self._bits

    def digest(self) -> Digest:
        """Digest of the words, measured anew: who attests an adapter attests its base."""
        self._bits = _bits_of(self._measure())
        return digest_run(self.name, 0, self._bits)


def _bits_of(digest: Digest) -> Bits:
    return np.array([digest.low, digest.high], "<u8")


def scale_tensor(use: Callable[[float], object]) -> HostTensor:
    """The factor, 0 at first; ``use`` is called with it whenever it was written."""
    bits = np.zeros(1, "<u8")
    return HostTensor(SCALE, "F64", (1,), bits, lambda: use(float(bits.view("<f8")[0])))


class AdapterSession(WeightSession):
    """Weights of one adapter on one engine; ``live`` holds it, its factor and its base's digest.

    Args:
        live: the adapter, which is zero.
        version: label that the engine starts with.
        set_label: as a ``WeightSession``'s, of this adapter's requests.
        wake: as a ``WeightSession``'s.
        end_requests: ends this adapter's requests, in the engine thread; how many there still are.

    Attributes:
        run: whose adapter it is; empty = nobody's, or the only one's.
        closing: no new request may use it.
    """

    def __init__(
        self,
        live: Live,
        version: str,
        set_label: Callable[[str], int] = lambda _: 0,
        wake: Callable[[], None] = lambda: None,
        *,
        end_requests: Callable[[], int] = lambda: 0,
    ) -> None:
        self._end_requests = end_requests
        self.run = ""
        self.closing = False
        self._owning = threading.Lock()
        super().__init__(live, version, set_label, wake)

    def _first_digest(self) -> Digest:
        """The base was measured when its tensor was made: once for all adapters over it."""
        return self._digest_over_known_base()

    def _digest_over_known_base(self) -> Digest:
        return total(
            tensor.measured if isinstance(tensor, BaseDigest) else tensor.digest()
            for tensor in self._live.values()
        )

    def status(self) -> Status:
        """What is live and staged, and whose."""
        return msgspec.structs.replace(super().status(), run=self.run)

    def bind(self, run: str) -> None:
        """It is this run's from now on; if it was about to be taken away, it stays."""
        with self._owning:  # an unbinding that has begun ends first, and leaves an empty slot
            self.run, self.closing = run, False

    def _dispatch_weights(self, call: Call) -> Answer:
        if isinstance(call, Unbind):
            return self._order_unbinding(call.timeout_seconds)
        return super()._dispatch_weights(call)

    def _order_unbinding(self, timeout_seconds: float) -> Answer:
        self._forget()
        self.closing = True
        answer = self._orders.have_done(BoundaryWork(self._unbind), timeout_seconds)
        if answer is None:
            reason = f"no iteration boundary under an open permit in {timeout_seconds} s"
            raise CommitRefused("Busy", f"{self.run}: {reason}; its adapter stays")
        return answer

    def _unbind(self) -> Answer:
        """In the engine thread: zero the adapter, once no request uses it any more."""
        with self._owning:
            if not self.closing:
                return Refused("Bound", f"run {self.run} was bound again: its adapter stays")
            return self._empty()

    def _empty(self) -> Answer:
        if left := self._end_requests():
            return Refused("Busy", f"{left} requests of run {self.run} end first; ask again")
        for tensor in self._live.values():
            if not isinstance(tensor, BaseDigest):
                zero(tensor)
        found = self._digest_over_known_base()
        if found != self._base_digest:
            return self._broken(f"the adapter of {self.run} could not be zeroed")
        self._digest, self._version = found, self._base
        self._commits += 1  # keys of what this slot computed are not used again
        self._set_label(self._base)  # the next run's turns begin with it
        self.run, self.closing = "", False
        return self.status()

    def _stage(self, bundle: Path) -> Staged:
        staged = super()._stage(bundle)
        update = self._staged
        if update is not None and self.run not in {"", update.outline.target.run}:
            self._forget()
            message = f"{staged.version} is no version of run {self.run}, whose adapter this is"
            raise CommitRefused("Layout", message)
        for change in update.changes if update is not None else ():
            if change.tensor.name == BASE and not np.array_equal(change.old, change.new):
                self._forget()
                theirs, ours = (Digest(*map(int, bits)) for bits in (change.new, change.old))
                raise CommitRefused(
                    "Layout",
                    f"{staged.version} is an adapter for the base with digest {theirs}; this "
                    f"engine's has {ours}: publish it with the folder that the engines load",
                )
        return staged


class AdapterSlots:
    """The adapters of one engine, and whose they are.

    Args:
        sessions: one a slot, in the order of the slots.
        slot_bytes: memory that each slot takes.
    """

    dormant = False

    def __init__(self, sessions: Sequence[AdapterSession], slot_bytes: int = 0) -> None:
        self._sessions = tuple(sessions)
        self._bytes = slot_bytes
        self._names = threading.Lock()

    @property
    def shared(self) -> bool:
        """Requests say which run they are for."""
        return len(self._sessions) > 1

    @property
    def broken(self) -> bool:
        """An undo failed in one of them; nothing may be computed with what it left."""
        return any(session.broken for session in self._sessions)

    def __iter__(self) -> Iterator[AdapterSession]:
        return iter(self._sessions)

    def __getitem__(self, number: int) -> AdapterSession:
        return self._sessions[number]

    def on_boundary(self) -> None:
        """Called by the engine between two iterations, under an open permit; cheap when idle."""
        for session in self._sessions:
            session.on_boundary()

    def on_rest(self) -> None:
        """Called by the engine whenever nothing is under way, also under a closed permit."""
        for session in self._sessions:
            session.on_rest()

    def slot_for(self, cache_key: str) -> int | None:
        """The slot whose adapter a request with this key is computed with.

        Returns:
            None when its run has none here. A request that names no run gets the first slot,
            whatever is there: so do health checks, which an engine must always answer.
        """
        run = run_of(cache_key) if self.shared else ""
        if not run:
            return 0
        session = self._of(run)
        if session is None or session.closing:
            return None
        return self._sessions.index(session)

    def handle(self, call: Call) -> Answer:
        """Carry out one call, as its run's session; never raises."""
        if isinstance(call, Bind):
            with self._names:
                return self._bind(call.run, first=call.first)
        if isinstance(call, Release | Activate):
            return Refused("Unsupported", "an engine with adapters cannot let go of its memory")
        if isinstance(call, Draft | JoinPool):
            return self._sessions[0].handle(call)  # of no run: it touches no weights
        session = self._of(call.run)
        if session is None:
            if isinstance(call, Unbind):
                return self._with_runs(self._sessions[0].status())
            return Refused("UnknownRun", f"no adapter of run {call.run!r} is here; bind it first")
        answer = session.handle(call)
        return self._with_runs(answer) if isinstance(answer, Status) else answer

    def _bind(self, run: str, *, first: bool) -> Answer:
        if not self.shared:
            return Refused("Unsupported", "this engine has one adapter: no run has to be named")
        if not run:
            return Refused("UnknownRun", "a slot is given to a run; name it")
        room = self._sessions[:1] if first else self._sessions[1:]
        session = self._of(run) or next((one for one in room if not one.run), None)
        if session is None:
            held = ", ".join(one.run for one in room)
            return Refused("Full", f"no slot is left for run {run}: adapters of {held} are here")
        session.bind(run)
        return self._with_runs(session.status())

    def _of(self, run: str) -> AdapterSession | None:
        if not run:
            return self._sessions[0]
        return next((session for session in self._sessions if session.run == run), None)

    def _with_runs(self, status: Status) -> Status:
        runs = tuple(session.run for session in self._sessions if session.run)
        return msgspec.structs.replace(status, runs=runs, adapter_bytes=self._bytes)
