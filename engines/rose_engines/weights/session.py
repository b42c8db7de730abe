"""The weights of one running engine: who may stage, commit and attest when.

Two threads meet here. The control thread takes calls from the socket, one at a time; decoding and
checking a bundle is its work, while the engine serves. The engine thread passes ``on_boundary``
between two iterations; that is the only place where weights change. States and edges:

    Idle       --stage-->        Staging
    Staging    --decoded-->      Staged        --refused-->         Idle
    Staged     --commit-->       Committing    --abort or stage-->  Idle or Staging
    Committing --attested-->     Idle          --undone, late-->    Idle
    Committing --undo failed-->  Broken        (nothing is computed any more)
    Idle, Staged --release-->    Dormant       (weights and cache are gone)
    Dormant    --activate-->     Idle          --restored wrongly--> Broken

A release is carried out at ``on_rest``, which the engine thread also passes while its permit is
closed: it computes nothing. An activation waits for a boundary under an open permit, as a commit.
Next step: ``rose_engines.weights.memory`` for what is let go of and how.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rose_core.delta.digest import Digest
from rose_core.rollouts.engines.kv_store import PoolCounts
from rose_engines.errors import BrokenWeights, CommitRefused
from rose_engines.node.pace import Pace, give_way
from rose_engines.process.device import Device
from rose_engines.tensors.canonical import Live
from rose_engines.tensors.safetensors import write_file
from rose_engines.weights.calls import (
    Abort,
    Activate,
    Activated,
    Answer,
    Attest,
    Attested,
    Bind,
    Call,
    Commit,
    Committed,
    Draft,
    Drafted,
    Export,
    Exported,
    GetStatus,
    JoinPool,
    PoolJoined,
    Refused,
    Release,
    Released,
    Stage,
    Staged,
    Status,
    Unbind,
)
from rose_engines.weights.decoding import HeldTensor, held_of
from rose_engines.weights.handover import BoundaryWork, Handover
from rose_engines.weights.host_memory import HostMemory
from rose_engines.weights.live import commit, confirm, digest_live, readable, revert, warm_up
from rose_engines.weights.memory import EngineMemory
from rose_engines.weights.stager import InThread, Stager
from rose_engines.weights.staging import StagedUpdate, stage

log = logging.getLogger(__name__)

# Time in which an engine comes to a rest, so that a swap that was not confirmed can be undone.
UNDO_SECONDS = 30.0


class WeightSession:
    """Weights of one engine.

    Args:
        live: the engine's weights.
        version: label the engine starts with.
        set_label: moves the label of live requests and later ones; returns how many live requests
            carry tokens of the version before. Called last, in the engine thread.
        wake: makes an idle engine pass a boundary soon.
        rank: tensor-parallel rank.
        memory: lets go of the engine's memory; None = it cannot.
        stager: makes what decodes bundles for it.
    """

    def __init__(
        self,
        live: Live,
        version: str,
        set_label: Callable[[str], int] = lambda _: 0,
        wake: Callable[[], None] = lambda: None,
        *,
        rank: int = 0,
        memory: EngineMemory | None = None,
        stager: Callable[[Sequence[HeldTensor]], Stager] = InThread,
    ) -> None:
        self._live = live
        self._version = self._base = version
        self._memory = memory
        self._set_label = set_label
        self._wake = wake
        self._rank = rank
        warm_up(live)
        self._stager = stager(held_of(live))
        self._host = HostMemory.of(live, threads=None)
        self._digest = self._base_digest = self._first_digest()
        self._phase = "Idle"
        self._staged: StagedUpdate | None = None
        self._orders = Handover(wake)
        self._calls = threading.Lock()
        self._commits = 0
        self.iterations = 0
        self.permit_open: Callable[[], bool | None] = lambda: None
        self.device: Callable[[], Device] = Device
        self.recomputed: Callable[[], tuple[int, int]] = lambda: (0, 0)  # requests, tokens
        self.draft: Callable[[list[list[int]]], int] | None = None
        self.join: Callable[[str], PoolCounts] | None = None
        self._resting = False
        self._confirmed = True

    @property
    def version(self) -> str:
        """Label of the live weights."""
        return self._version

    @property
    def digest(self) -> Digest:
        """Digest of the live weights as last attested."""
        return self._digest

    @property
    def commits(self) -> int:
        """Commits since the engine started."""
        return self._commits

    @property
    def confirmed(self) -> bool:
        """The live weights are what ``digest`` says: no commit waits to be confirmed."""
        return self._confirmed

    @property
    def broken(self) -> bool:
        """An undo failed: nothing may be computed with these weights."""
        return self._phase == "Broken"

    @property
    def dormant(self) -> bool:
        """Weights and cache are released: nothing can be computed."""
        return self._phase == "Dormant"

    def _first_digest(self) -> Digest:
        """Digest of the whole state at the start."""
        return digest_live(self._live)

    def handle(self, call: Call) -> Answer:
        """Carry out one call; may take as long as decoding a bundle. Never raises."""
        if isinstance(call, GetStatus):
            return self.status()  # answered also while a stage is going on
        if isinstance(call, Draft | JoinPool):  # likewise: they touch no weights
            return self._draft(call) if isinstance(call, Draft) else self._join_pool(call)
        with self._calls:
            if self.broken:
                return Refused("Broken", "an undo failed; this engine must be restarted")
            try:
                return self._dispatch(call)
            except CommitRefused as refused:
                log.warning("refused: %s", refused)
                return Refused(refused.reason, refused.message)
            except Exception as error:  # a bad bundle must not end the thread
                log.exception("control call failed")
                self._forget()
                return Refused("Corrupt", f"{type(error).__name__}: {error}")

    def _draft(self, call: Draft) -> Answer:
        if self.draft is None:
            return Refused("NoDrafts", "this engine drafts nothing")
        try:
            return Drafted(self.draft(call.texts))
        except (ValueError, RuntimeError) as error:
            return Refused("BadDrafts", str(error))

    def _join_pool(self, call: JoinPool) -> Answer:
        if self.join is None:
            return Refused("NoPool", "this engine keeps no keys for others")
        try:
            return PoolJoined(self.join(call.secret))
        except ValueError as error:
            return Refused("NoPool", str(error))

    def status(self) -> Status:
        """What is live and staged."""
        staged, permit_open, device = self._staged, self.permit_open(), self.device()
        if permit_open is False and not self._resting:
            self._wake()  # an idle engine has no boundary of itself
        return Status(
            version=self._version,
            digest="" if self.dormant else str(self._digest),
            phase=self._phase,
            staged=staged.version if staged else "",
            commits=self._commits,
            pid=os.getpid(),
            rank=self._rank,
            permit_open=permit_open,
            iterations=self.iterations,
            codecs=readable(self._live),
            resting=self._resting,
            multiprocessors=device.multiprocessors,
            device_bytes=device.memory_bytes,
        )

    def on_boundary(self) -> None:
        """Called by the engine between two iterations, under an open permit; cheap when idle."""
        self._resting = False
        self.iterations += 1
        self._orders.carry_out(at_rest=False)

    def on_rest(self) -> None:
        """Called by the engine whenever nothing is under way, also under a closed permit."""
        self._resting = True
        self._orders.carry_out(at_rest=True)

    def _dispatch(self, call: Call) -> Answer:
        if isinstance(call, Release):
            return self._order_release(call.timeout_seconds)
        if isinstance(call, Activate):
            return self._order_activation(call.timeout_seconds)
        if self.dormant and not isinstance(call, Abort):
            raise CommitRefused("Dormant", "the weights are released; activate the engine first")
        return self._dispatch_weights(call)

    def _dispatch_weights(self, call: Call) -> Answer:
        match call:
            case Stage(bundle):
                return self._stage(Path(bundle))
            case Commit(version, timeout_seconds):
                return self._order_commit(version, timeout_seconds)
            case Abort():
                self._forget()
                return self.status()
            case Attest():
                return self._attest()
            case Export(path):
                return self._export(Path(path))
            case Bind() | Unbind():
                raise CommitRefused("Unsupported", "this engine has no slots for adapters")
            case _:
                return self.status()

    def _stage(self, bundle: Path) -> Staged:
        started = time.monotonic()
        give_way(os.getpid())  # also when it confirms, later
        self._forget()
        self._phase = "Staging"
        try:
            pace = Pace(lambda: self.permit_open() is False)
            update = stage(bundle, self._live, self._digest, pace, self._stager, self._host)
        except BaseException:  # whatever it was, the session takes the next order
            self._phase = "Idle"
            raise
        self._staged, self._phase = update, "Staged"
        outline = update.outline
        return Staged(
            version=update.version,
            base=outline.base_digest,
            digest=outline.digest,
            changed_elements=outline.changes,
            staged_bytes=update.staged_bytes,
            seconds=time.monotonic() - started,
        )

    def _forget(self) -> None:
        self._staged, self._phase = None, "Dormant" if self.dormant else "Idle"

    def _order_commit(self, version: str, timeout_seconds: float) -> Answer:
        update = self._staged
        if update is None or update.version != version:
            held = update.version if update else "nothing"
            raise CommitRefused("NotStaged", f"{version} is not staged; {held} is")
        self._phase, before, attested = "Committing", self._version, self._confirmed
        answer = self._orders.have_done(BoundaryWork(lambda: self._commit(update)), timeout_seconds)
        if answer is None:
            self._phase = "Staged"
            reason = f"no iteration boundary under an open permit in {timeout_seconds} s"
            raise CommitRefused("Busy", f"{version}: {reason}; it stays staged")
        if isinstance(answer, Committed):
            undone = self._confirm(update, before)
            if undone is None:
                self._confirmed = attested  # only what this one has touched was looked at
            return undone or answer
        return answer

    def _confirm(self, update: StagedUpdate, before: str) -> Answer | None:
        """Beside the serving engine: the touched tensors are what they should be, or go back."""
        wrong = confirm(update, self._live)
        if wrong is None:
            return None
        order = BoundaryWork(lambda: self._revert(update, before, wrong), at_rest=True)
        return self._orders.have_done(order, UNDO_SECONDS) or self._broken(
            f"{wrong}; no rest to undo it"
        )

    def _revert(self, update: StagedUpdate, before: str, wrong: str) -> Answer:
        """In the engine thread: old bits and old label."""
        try:
            revert(update, self._live, wrong)
        except BrokenWeights as broken:
            return self._broken(str(broken))
        self._version, self._digest, self._confirmed = before, update.current, True
        self._commits += 1  # what the cache holds of the wrong weights is not used again
        self._set_label(before)
        message = f"{update.version}: {wrong}; the old weights are back"
        return Refused("DigestMismatch", message)

    def _broken(self, reason: str) -> Refused:
        log.critical("weights are broken: %s", reason)
        self._staged, self._phase = None, "Broken"
        return Refused("Broken", reason)

    def _order_release(self, timeout_seconds: float) -> Answer:
        memory = self._memory
        if memory is None:
            raise CommitRefused("Unsupported", "this engine cannot let go of its memory")
        if self.dormant:
            return Released(0, 0.0)
        self._forget()
        order = BoundaryWork(lambda: self._release(memory), at_rest=True)
        answer = self._orders.have_done(order, timeout_seconds)
        if answer is None:
            raise CommitRefused("Busy", f"the engine came to no rest in {timeout_seconds} s")
        return answer

    def _release(self, memory: EngineMemory) -> Answer:
        """In the engine thread: from here on nothing can be computed."""
        started = time.monotonic()
        self._phase = "Dormant"
        try:
            claimed = memory.release()
        except Exception as error:  # half released is not usable either
            log.exception("the release failed")
            return self._broken(f"release: {type(error).__name__}: {error}")
        return Released(claimed, time.monotonic() - started)

    def _order_activation(self, timeout_seconds: float) -> Answer:
        memory = self._memory
        if memory is None or not self.dormant:
            return Activated(self._version, str(self._digest), 0.0)
        answer = self._orders.have_done(
            BoundaryWork(lambda: self._activate(memory)), timeout_seconds
        )
        if answer is None:
            reason = f"no iteration boundary under an open permit in {timeout_seconds} s"
            raise CommitRefused("Busy", f"{reason}; the engine stays dormant")
        return answer

    def _activate(self, memory: EngineMemory) -> Answer:
        """In the engine thread: restore, attest, label last."""
        started = time.monotonic()
        try:
            memory.restore(self._live)
            digest = digest_live(self._live)
        except Exception as error:  # what is half there must not compute
            log.exception("the activation failed")
            return self._broken(f"activation: {type(error).__name__}: {error}")
        if digest != self._base_digest:
            wanted = self._base_digest
            return self._broken(f"restored weights have digest {digest} instead of {wanted}")
        self._digest, self._version, self._confirmed = digest, self._base, True
        self._commits += 1
        self._set_label(self._version)
        self._phase = "Idle"
        return Activated(self._version, str(digest), time.monotonic() - started)

    def _commit(self, update: StagedUpdate) -> Answer:
        """In the engine thread: scatter, attest, label last."""
        started = time.monotonic_ns()
        try:
            self._digest = self._swap(update)
        except CommitRefused as refused:
            self._forget()
            return Refused(refused.reason, refused.message)
        except BrokenWeights as broken:
            return self._broken(str(broken))
        self._version, self._confirmed = update.version, False
        self._commits += 1
        requests, tokens = self.recomputed()
        fenced = self._set_label(update.version)
        retracted, recomputed = self.recomputed()
        self._forget()
        return Committed(
            version=update.version,
            digest=str(self._digest),
            changed_elements=update.outline.changes,
            pause_microseconds=(time.monotonic_ns() - started) // 1000,
            fenced_requests=fenced,
            retracted_requests=retracted - requests,
            recomputed_tokens=recomputed - tokens,
        )

    def _swap(self, update: StagedUpdate) -> Digest:
        """New weights for old, attested; all or nothing."""
        return commit(update, self._live)

    def _export(self, path: Path) -> Exported:
        try:
            write_file(path, self._live)
        except OSError as error:
            raise CommitRefused("Aborted", f"cannot write {path}: {error}") from error
        return Exported(self._version)

    def _attest(self) -> Attested:
        """Weights do not change meanwhile: commits come through this same thread."""
        started = time.monotonic()
        self._digest = digest_live(self._live)
        self._confirmed = True
        return Attested(self._version, str(self._digest), time.monotonic() - started)
