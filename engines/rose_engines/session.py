"""The weights of one running engine: who may stage, commit and attest when.

Two threads meet here. The control thread takes calls from the socket, one at a time; decoding and
checking a bundle is its work, while the engine serves. The engine thread passes ``at_boundary``
between two iterations; that is the only place where weights change. States and edges:

    Idle       --stage-->        Staging
    Staging    --decoded-->      Staged        --refused-->         Idle
    Staged     --commit-->       Committing    --abort or stage-->  Idle or Staging
    Committing --attested-->     Idle          --undone, late-->    Idle
    Committing --undo failed-->  Broken        (nothing is computed any more)
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rose_core.delta.digest import Digest
from rose_engines.errors import BrokenWeights, CommitRefused
from rose_engines.live import Live, StagedUpdate, commit, digest_live, stage, warm_up
from rose_engines.safetensors import write_file
from rose_engines.sglang.control import (
    Abort,
    Answer,
    Attest,
    Attested,
    Call,
    Commit,
    Committed,
    Export,
    Exported,
    GetStatus,
    Refused,
    Stage,
    Staged,
    Status,
)

log = logging.getLogger(__name__)


@dataclass
class _Order:
    """A commit that waits for the next boundary."""

    update: StagedUpdate
    done: threading.Event = field(default_factory=threading.Event)
    answer: Answer | None = None

    def wait(self, seconds: float) -> bool:
        """Whether the engine has carried it out within this time."""
        return self.done.wait(seconds)

    def result(self) -> Answer | None:
        """The engine's answer, if there is one."""
        return self.answer


class WeightSession:
    """Weights of one engine.

    Args:
        live: the engine's weights.
        version: label the engine starts with.
        set_label: moves the label of live requests and later ones; returns how many live requests
            carry tokens of the version before. Called last, in the engine thread.
        wake: makes an idle engine pass a boundary soon.
        rank: tensor-parallel rank.
    """

    def __init__(
        self,
        live: Live,
        version: str,
        set_label: Callable[[str], int] = lambda _: 0,
        wake: Callable[[], None] = lambda: None,
        rank: int = 0,
    ) -> None:
        self._live = live
        self._version = version
        self._set_label = set_label
        self._wake = wake
        self._rank = rank
        warm_up(live)
        self._digest = digest_live(live)
        self._phase = "Idle"
        self._staged: StagedUpdate | None = None
        self._order: _Order | None = None
        self._calls = threading.Lock()
        self._handover = threading.Lock()
        self._commits = 0
        self.iterations = 0
        self.permit_open: Callable[[], bool | None] = lambda: None

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
    def broken(self) -> bool:
        """An undo failed: nothing may be computed with these weights."""
        return self._phase == "Broken"

    def handle(self, call: Call) -> Answer:
        """Carry out one call; may take as long as decoding a bundle. Never raises."""
        if isinstance(call, GetStatus):
            return self.status()  # answered also while a stage is going on
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

    def status(self) -> Status:
        """What is live and staged."""
        staged = self._staged
        return Status(
            version=self._version,
            digest=str(self._digest),
            phase=self._phase,
            staged=staged.version if staged else "",
            commits=self._commits,
            pid=os.getpid(),
            rank=self._rank,
            permit_open=self.permit_open(),
            iterations=self.iterations,
        )

    def at_boundary(self) -> None:
        """Called by the engine between two iterations, under an open permit; cheap when idle."""
        self.iterations += 1
        if self._order is None:
            return
        with self._handover:
            for order in self._take_order():
                order.answer = self._commit(order.update)
                order.done.set()

    def _take_order(self) -> tuple[_Order, ...]:
        """The order that waits, if it was not withdrawn meanwhile."""
        order, self._order = self._order, None
        return (order,) if order else ()

    def _dispatch(self, call: Call) -> Answer:
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
            case _:
                return self.status()

    def _stage(self, bundle: Path) -> Staged:
        started = time.monotonic()
        self._forget()
        self._phase = "Staging"
        try:
            update = stage(bundle, self._live, self._digest)
        except BaseException:  # whatever it was, the session takes the next order
            self._phase = "Idle"
            raise
        self._staged, self._phase = update, "Staged"
        manifest = update.manifest
        return Staged(
            version=update.version,
            base=manifest.base_digest,
            digest=manifest.digest,
            changed_elements=manifest.changes,
            staged_bytes=update.staged_bytes,
            seconds=time.monotonic() - started,
        )

    def _forget(self) -> None:
        self._staged, self._phase = None, "Idle"

    def _order_commit(self, version: str, timeout_seconds: float) -> Answer:
        update = self._staged
        if update is None or update.version != version:
            held = update.version if update else "nothing"
            raise CommitRefused("NotStaged", f"{version} is not staged; {held} is")
        order = _Order(update)
        self._phase = "Committing"
        self._order = order
        self._wake()
        if not order.wait(timeout_seconds):
            with self._handover:  # either the engine has it by now, or it never gets it
                self._order = None
        answer = order.result()
        if answer is None:
            self._phase = "Staged"
            reason = f"no iteration boundary under an open permit in {timeout_seconds} s"
            raise CommitRefused("Busy", f"{version}: {reason}; it stays staged")
        return answer

    def _commit(self, update: StagedUpdate) -> Answer:
        """In the engine thread: scatter, attest, label last."""
        started = time.monotonic_ns()
        try:
            self._digest = commit(update, self._live)
        except CommitRefused as refused:
            self._forget()
            return Refused(refused.reason, refused.message)
        except BrokenWeights as broken:
            log.critical("weights are broken: %s", broken)
            self._staged, self._phase = None, "Broken"
            return Refused("Broken", str(broken))
        self._version = update.version
        self._commits += 1
        fenced = self._set_label(update.version)
        self._forget()
        return Committed(
            version=update.version,
            digest=str(self._digest),
            changed_elements=update.manifest.changes,
            pause_microseconds=(time.monotonic_ns() - started) // 1000,
            fenced_requests=fenced,
        )

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
        return Attested(self._version, str(self._digest), time.monotonic() - started)
