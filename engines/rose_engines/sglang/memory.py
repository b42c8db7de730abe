"""How a running SGLang lets go of its KV cache and weights, and takes them back.

| device                   | how                                                                 |
|--------------------------|---------------------------------------------------------------------|
| GPU, memory saver on     | SGLang's own release and resume: pages go, virtual addresses stay   |
| CPU                      | the same with the kernel's means: ``madvise`` on buffers and weights |
| GPU, memory saver off    | refused: SGLang would answer well and free nothing                  |

SGLang's own calls are only safe in an engine without requests (an assertion ends the server), so
running requests are first retracted and then aborted; the router holds their tokens and continues
them elsewhere. Weights come back from the model folder: the engine is then where a fresh one is,
at base weights, and weight-sync brings it to the head of its run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose_engines.tensors.canonical import Live
from rose_engines.weights.memory import drop_all, reload_weights, storages, tensors_in

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

NEEDED = (
    "sglang.srt.managers.scheduler.Scheduler.pause_generation",
    "sglang.srt.managers.scheduler.Scheduler.continue_generation",
    "sglang.srt.managers.scheduler.Scheduler.abort_request",
    "sglang.srt.managers.scheduler.Scheduler.flush_cache",
)


class SchedulerMemory:
    """The memory of one scheduler process; use ``of``.

    Args:
        scheduler: SGLang's scheduler.
        saver: SGLang's memory saver works here.
    """

    def __init__(self, scheduler: Any, *, saver: bool) -> None:  # noqa: ANN401
        self._scheduler = scheduler
        self._saver = saver

    @classmethod
    def of(cls, scheduler: Any) -> SchedulerMemory | None:  # noqa: ANN401
        """The engine's memory; None when this engine cannot let go of it."""
        updater = getattr(scheduler, "weight_updater", None)
        adapter = getattr(updater, "memory_saver_adapter", None)
        saver = bool(getattr(adapter, "enabled", False))
        if not saver and str(scheduler.server_args.device) != "cpu":
            log.warning("rose: without --enable-memory-saver this engine cannot become dormant")
            return None
        return cls(scheduler, saver=saver)

    def release(self) -> int:
        """Retract and abort everything, then let go of cache and weights."""
        self._empty()
        cache, weights = storages(self._cache()), storages(self._weights())
        if self._saver:
            from sglang.srt.managers.io_struct import (  # noqa: PLC0415  # only inside engines
                ReleaseMemoryOccupationReqInput,
            )

            self._scheduler.weight_updater.release_memory_occupation(
                ReleaseMemoryOccupationReqInput()
            )
            return sum(cache.values()) + sum(weights.values())
        if not self._scheduler.flush_cache():
            raise RuntimeError("the cache cannot be flushed: requests are still under way")
        return drop_all(cache | weights)

    def restore(self, live: Live) -> None:
        """Take both back; weights are written anew, padding is zero."""
        scheduler = self._scheduler
        if self._saver:
            from sglang.srt.managers.io_struct import (  # noqa: PLC0415  # only inside engines
                ResumeMemoryOccupationReqInput,
            )

            scheduler.weight_updater.resume_memory_occupation(ResumeMemoryOccupationReqInput())
        else:
            # Taken now, as on a GPU: a lack of memory shows here and not inside a turn.
            for buffer in self._cache():
                buffer.zero_()
        reload_weights(self._weights(), live, Path(scheduler.server_args.model_path))
        from sglang.srt.managers.io_struct import (  # noqa: PLC0415  # only inside engines
            ContinueGenerationReqInput,
        )

        scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def _empty(self) -> None:
        from sglang.srt.managers.io_struct import (  # noqa: PLC0415  # only inside engines
            AbortReq,
            PauseGenerationReqInput,
        )

        self._scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        self._scheduler.abort_request(AbortReq(abort_all=True))

    def _weights(self) -> list[torch.Tensor]:
        model = self._scheduler.tp_worker.model_runner.model
        return [parameter.detach() for parameter in model.parameters()]

    def _cache(self) -> Iterator[torch.Tensor]:
        """Every buffer of the KV pool: a tensor or a list of them, one for each layer."""
        pool = self._scheduler.token_to_kv_pool_allocator.get_kvcache()
        for name, value in vars(pool).items():
            if name.endswith("_buffer"):
                yield from tensors_in(value)
