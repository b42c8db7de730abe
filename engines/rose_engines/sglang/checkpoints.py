"""Where an engine that starts stops for its permit, and how it says what it is doing.

A start is minutes of work in the driver: allocations, copies, kernels that load, graphs that are
captured. It is not frozen there (``rose_core.guard.freezing``). Instead each rank looks at its
permit between two pieces of that work and waits there while it is closed:

| checkpoint | between |
|---|---|
| ``DefaultModelLoader._get_all_weights`` | two tensors of the checkpoint |
| ``capture_one_shape``, ``capture_one_batch_size`` | two graphs |
| ``Scheduler.init_memory_pools``, ``init_all_cuda_graphs`` | loading, pools, graphs |

Active only where the starter asked for it by ``ROSE_ACTIVITY``, which it does on GPUs. A build of
SGLang without one of these functions has fewer checkpoints; a start that comes by none in time is
ended by its host. Next step: ``plugin`` places the hooks, ``gate`` waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rose_engines.node import activity
from rose_engines.node.gate import PermitGate
from rose_engines.process.launch import PERMIT_VARIABLE

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_RUNNERS = "sglang.srt.model_executor"
# The first step of a scheduler that touches the driver.
BEGINNING = f"{_SCHEDULER}.init_model_config"
WEIGHTS = "sglang.srt.model_loader.loader.DefaultModelLoader._get_all_weights"
PIECES = (
    f"{_SCHEDULER}.init_memory_pools",
    f"{_SCHEDULER}.init_all_cuda_graphs",
    f"{_RUNNERS}.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture_one_shape",
    f"{_RUNNERS}.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.capture_one_shape",
    f"{_RUNNERS}.cpu_graph_runner.CPUGraphRunner.capture_one_batch_size",
)


class Checkpoints:
    """What one process reports about itself; nothing where its starter did not ask for it.

    Args:
        path: the activity file; None = nobody reads it, and nothing is written.
        permit: the permit's file; None = it computes always.
    """

    def __init__(self, path: Path | None, permit: Path | None) -> None:
        self._path = path
        self._permit = permit
        self._board: activity.ActivityBoard | None = None
        self._gate: PermitGate | None = None

    @classmethod
    def from_environment(cls) -> Checkpoints:
        """What the starter asked for by environment variables."""
        path, permit = os.environ.get(activity.VARIABLE), os.environ.get(PERMIT_VARIABLE)
        return cls(Path(path) if path else None, Path(permit) if permit else None)

    @property
    def enabled(self) -> bool:
        """Whether anybody reads it."""
        return self._path is not None

    def begin(self, *_: object, **__: object) -> None:
        """Hook: from here on this process works in the driver.

        Raises:
            OSError, BadPermit: it cannot say so, and must not start.
        """
        if self._path is not None and self._board is None:
            self._board = activity.ActivityBoard(self._path)
            self._gate = PermitGate(self._permit) if self._permit is not None else None
        self.pass_by()

    def pass_by(self, *_: object, **__: object) -> None:
        """Hook: between two pieces of a start; waits for the permit."""
        if self._gate is not None and not self._gate.is_open():
            self.mark_resting()
            self._gate.wait()
            self.write(activity.STARTING)

    def around_weights(
        self, original: Callable[..., Iterator[Any]], *args: object, **kwargs: object
    ) -> Iterator[Any]:
        """Hook: a checkpoint after each tensor."""
        for item in original(*args, **kwargs):
            yield item
            self.pass_by()

    def mark_resting(self) -> None:
        """Report that nothing of this process is in the driver until further notice."""
        self.write(activity.RESTING)

    def mark_iterating(self) -> None:
        """Report that an iteration, or work between two of them, is under way."""
        self.write(activity.ITERATING)

    def write(self, state: int) -> None:
        """Write a state, where anybody reads it."""
        if self._board is not None:
            self._board.write(state)
