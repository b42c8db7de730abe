"""The weight session of an engine whose layout cannot be learnt: the engine loads a patched copy.

Where a loader computes (quantisation that repacks, transposed layouts), no index leads from a
checkpoint tensor to its live place. The platform may then have the engine load its weights anew,
through its own loader, instead of refusing it:

    Stage    check the bundle against a mirror of the checkpoint in host memory and write the
             patched checkpoint beside it, while the engine serves
    Commit   between two iterations: the mirror changes, the engine loads the patched checkpoint
    undone   the engine loads the checkpoint of the version before; if it cannot, it is Broken

The pause grows with the model. What is attested is the mirror, and that the engine said it loaded
it: ``Status.attests`` says ``Copy``, and the fixed-prompt probe is what looks at the engine itself.
Host memory: one copy of the model; in ``folder``: two more. Such an engine does not go dormant.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from rose_core.delta.digest import Digest
from rose_engines.errors import BrokenWeights, CommitRefused
from rose_engines.tensors.canonical import host_tensors
from rose_engines.tensors.safetensors import read_checkpoint, write_file
from rose_engines.weights.calls import Answer, Staged, Status
from rose_engines.weights.decoding import HeldTensor
from rose_engines.weights.live import put_back, scatter
from rose_engines.weights.session import WeightSession
from rose_engines.weights.stager import InThread, Stager
from rose_engines.weights.staging import StagedUpdate


class ReloadSession(WeightSession):
    """Weights that the engine loads from disk.

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
        mirror = {name: (kind, shape, bits.copy()) for name, (kind, shape, bits) in stored.items()}
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
