"""SGLang loads patched checkpoints by itself, where elements cannot be written in place.

Where a loader computes (quantisation that repacks, transposed layouts), no index leads from a
checkpoint tensor to its live place. Only where the platform says so (``FALLBACK_VARIABLE``) does
such an engine load its weights anew, through its own loader. Otherwise it ends, and its reason is
on stderr:

    Stage    check the bundle against a mirror of the checkpoint in host memory and write the
             patched checkpoint beside it, while the engine serves
    Commit   between two iterations: the mirror changes, the engine loads the patched checkpoint
    undone   the engine loads the checkpoint of the version before; if it cannot, it is Broken

The pause grows with the model. What is attested is the mirror, and that the engine said it loaded
it: ``Status.attests`` says ``Copy``, and the fixed-prompt probe is what looks at the engine itself.
Host memory: one copy of the model; in ``folder``: two more. Such an engine does not go dormant.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from rose_core.delta.digest import Digest
from rose_engines.errors import BrokenWeights, CommitRefused, UnsupportedEngine
from rose_engines.sglang.arguments import FALLBACK_VARIABLE
from rose_engines.sglang.ranks import read_live
from rose_engines.tensors.canonical import LiveTensor, host_tensors
from rose_engines.tensors.safetensors import read_checkpoint, write_file
from rose_engines.weights.calls import Answer, Staged, Status
from rose_engines.weights.decoding import HeldTensor
from rose_engines.weights.live import put_back, scatter
from rose_engines.weights.session import WeightSession
from rose_engines.weights.stager import InThread, OwnProcess, Stager
from rose_engines.weights.staging import StagedUpdate

log = logging.getLogger(__name__)

DISK, ALWAYS = "disk", "disk-always"


class ReloadSession(WeightSession):
    """The weight session of an engine that loads its weights from disk.

    Args:
        model: the checkpoint that the engine has loaded.
        folder: for patched copies; made when missing.
        load: has the engine load a checkpoint; returns why it did not, None = it did.
        version, set_label, wake, stager: as ``WeightSession``.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        load: Callable[[Path], str | None],
        *,
        version: str,
        set_label: Callable[[str], int] = lambda _: 0,
        wake: Callable[[], None] = lambda: None,
        stager: Callable[[Sequence[HeldTensor]], Stager] = InThread,
    ) -> None:
        self._model = model
        self._folders = (folder / "0", folder / "1")
        self._load = load
        self._loaded = self._before = model
        stored = read_checkpoint(model)
        mirror = {name: one._replace(bits=one.bits.copy()) for name, one in stored.items()}
        super().__init__(host_tensors(mirror), version, set_label, wake, stager=stager)

    def status(self) -> Status:
        """What is live and staged; digests are of the copy that was loaded."""
        return msgspec.structs.replace(super().status(), attests="Copy")

    @property
    def _next(self) -> Path:
        """Where the next patched checkpoint goes; the engine may have the other one mapped."""
        return self._folders[1 if self._loaded == self._folders[0] else 0]

    def _stage(self, bundle: Path) -> Staged:
        staged = super()._stage(bundle)
        update = self._staged
        if update is not None:
            try:
                self._write(update)
            except OSError as error:
                self._forget()
                message = f"{update.version}: the patched checkpoint cannot be written: {error}"
                raise CommitRefused("Aborted", message) from error
        return staged

    def _write(self, update: StagedUpdate) -> None:
        """The checkpoint as it will be; the mirror is as before afterwards."""
        folder = self._next
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in self._model.iterdir():
            if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
                (folder / path.name).symlink_to(path.resolve())
        try:
            scatter(update, self._live)
            write_file(folder / "model.safetensors", self._live)
        finally:
            put_back(update, self._live)

    def _swap(self, update: StagedUpdate) -> Digest:
        digest = super()._swap(update)
        problem = self._load(self._next)
        if problem is None:
            self._before, self._loaded = self._loaded, self._next
            return digest
        put_back(update, self._live)
        again = self._load(self._loaded)
        if again is not None:
            message = f"{update.version}: {problem}; the checkpoint before cannot be loaded either"
            raise BrokenWeights(f"{message}: {again}")
        message = f"{update.version}: {problem}; the weights before were loaded again"
        raise CommitRefused("LoadFailed", message)

    def _revert(self, update: StagedUpdate, before: str, wrong: str) -> Answer:
        problem = self._load(self._before)
        if problem is not None:
            return self._broken(f"{update.version}: {wrong}; {problem}")
        self._loaded = self._before
        return super()._revert(update, before, wrong)

    def _export(self, path: Path) -> NoReturn:
        message = f"cannot write {path}: the engine's layout is not known, only its copy is"
        raise CommitRefused("Unsupported", message)


def read_in_place(scheduler: Any, folder: Path, fallback: str) -> dict[str, LiveTensor]:  # noqa: ANN401
    """The weights in place.

    Raises:
        UnsupportedEngine: the layout cannot be learnt, or nobody wants it to be.
    """
    if fallback == ALWAYS:
        raise UnsupportedEngine(f"{FALLBACK_VARIABLE}={ALWAYS}")
    return read_live(scheduler, folder)


def check_may_reload(scheduler: Any, fallback: str, refused: UnsupportedEngine) -> None:  # noqa: ANN401
    """Whether this engine may load patched checkpoints.

    Raises:
        UnsupportedEngine: it may or can not; ``refused`` is why it would have to.
    """
    if fallback not in {DISK, ALWAYS}:
        hint = f"{FALLBACK_VARIABLE}={DISK} in the engine host's environment lets it load copies"
        raise UnsupportedEngine(f"{refused}; {hint}") from refused
    if int(scheduler.tp_size) > 1:
        message = f"{refused}; an engine over several ranks does not load patched checkpoints"
        raise UnsupportedEngine(message) from refused
    updater = getattr(scheduler, "weight_updater", None)
    if not callable(getattr(updater, "update_weights_from_disk", None)):
        message = f"{refused}; this SGLang has no update_weights_from_disk to fall back to"
        raise UnsupportedEngine(message) from refused
    log.warning("rose: weights are loaded from patched checkpoints: %s", refused)


def session(
    scheduler: Any,  # noqa: ANN401
    folder: Path,
    version: str,
    set_label: Callable[[str], int],
    wake: Callable[[], None],
) -> ReloadSession:
    """The weight session of such an engine."""
    model = Path(scheduler.server_args.model_path)
    copies = folder / "reload"
    return ReloadSession(
        model,
        copies,
        lambda path: load(scheduler, path),
        version=version,
        set_label=set_label,
        wake=wake,
        stager=OwnProcess,
    )


def load(scheduler: Any, path: Path) -> str | None:  # noqa: ANN401
    """In the engine thread, between two iterations; why it failed, None = loaded.

    The prefix cache stays: requests get keys of the new version (``plugin``).
    """
    from sglang.srt.managers.io_struct import (  # noqa: PLC0415  # only inside engines
        UpdateWeightFromDiskReqInput,
    )

    order = UpdateWeightFromDiskReqInput(
        model_path=str(path), load_format="safetensors", flush_cache=False
    )
    try:
        answer = scheduler.weight_updater.update_weights_from_disk(order)
    except Exception as error:  # whatever the loader raises, the version before must come back
        log.exception("rose: %s was not loaded", path)
        return f"SGLang did not load {path}: {type(error).__name__}: {error}"
    return None if answer.success else f"SGLang did not load {path}: {answer.message}"
