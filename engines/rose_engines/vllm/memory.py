"""How a running vLLM lets go of its KV cache and weights, and takes them back.

On CPU the kernel takes the pages and the addresses stay, as with SGLang: vLLM's own sleep mode
answers well there and frees nothing. Requests are ended first, and the prefix cache is forgotten.
On GPUs it is not built: such an engine cannot become dormant. Weights come back from the model
folder, and with zeros for padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose_engines.tensors.canonical import Live
from rose_engines.weights.memory import drop_all, reload_weights, storages, tensors_in

if TYPE_CHECKING:
    import torch


class CoreMemory:
    """The memory of one engine core with its worker in the same process; use ``of``.

    Args:
        core: vLLM's ``EngineCoreProc``.
        runner: its model runner.
    """

    def __init__(self, core: Any, runner: Any) -> None:  # noqa: ANN401
        self._core = core
        self._runner = runner

    @classmethod
    def of(cls, core: Any, runner: Any) -> CoreMemory | None:  # noqa: ANN401
        """The engine's memory; None when this engine cannot let go of it."""
        return cls(core, runner) if runner.device.type == "cpu" else None

    def release(self) -> int:
        """End everything, then let go of cache and weights."""
        from vllm.v1.request import RequestStatus  # noqa: PLC0415  # only inside engines

        core = self._core
        ended = core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        core._send_abort_outputs(ended)  # noqa: SLF001
        if not core.scheduler.reset_prefix_cache():
            raise RuntimeError("the cache cannot be flushed: requests are still under way")
        return drop_all(storages(self._cache()) | storages(self._weights()))

    def restore(self, live: Live) -> None:
        """Take both back; weights are written anew, padding is zero."""
        # Taken now, as on a GPU: a lack of memory shows here and not inside a turn.
        for buffer in self._cache():
            buffer.zero_()
        reload_weights(self._weights(), live, Path(self._core.vllm_config.model_config.model))

    def _weights(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self._runner.get_model().parameters()]

    def _cache(self) -> Iterator[torch.Tensor]:
        return tensors_in(self._runner.kv_caches)
