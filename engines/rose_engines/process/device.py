"""What an engine sees of its GPU: the proof that a share or a memory limit was given to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """An engine's GPU as the engine sees it; None = it runs on none.

    Attributes:
        multiprocessors: under MPS only those of its share.
        memory_bytes: in all; under a driver limit no more than that.
    """

    multiprocessors: int | None = None
    memory_bytes: int | None = None


def torch_device(kind: str) -> Device:
    """Ask the CUDA runtime of this process; ``kind`` is the engine's device."""
    if kind != "cuda":
        return Device()
    import torch  # noqa: PLC0415  # only inside engines

    count = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return Device(int(count), int(torch.cuda.mem_get_info()[1]))
