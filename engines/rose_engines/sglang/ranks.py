"""The weights of one SGLang scheduler process, and how it finds the other ranks of its engine.

``read_live`` is this rank's part of the model in canonical coordinates; ``join`` meets the other
ranks once, over SGLang's own process group, tells them which part lies here and opens the board on
which all later commits are made. Next step: ``layout``, ``rose_engines.weights.multi_rank``.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from rose_engines.tensors.canonical import Live, LiveTensor
from rose_engines.tensors.safetensors import read_checkpoint
from rose_engines.weights.parts import Part, Ranks, check_parts, parts_of, socket_of
from rose_engines.weights.rank_board import RankBoard

CUDA_ONLY = "sglang.srt.distributed.device_communicators.pynccl.PyNcclCommunicator"


class NoCommunicator:
    """Stands in for SGLang's NCCL communicator where there is no CUDA device.

    SGLang makes one for every group of ranks, also for its CPU engine, which does not use it.
    """

    disabled = True
    available = False

    def __init__(self, *_: object, **__: object) -> None: ...


def rank_of(scheduler: Any) -> int:  # noqa: ANN401
    """Which rank this process is."""
    if int(scheduler.tp_size) == 1:
        return 0
    import torch.distributed  # noqa: PLC0415

    return int(torch.distributed.get_rank(group=scheduler.tp_cpu_group))


def read_live(scheduler: Any, folder: Path) -> dict[str, LiveTensor]:  # noqa: ANN401
    """This rank's weights.

    Args:
        scheduler: SGLang's scheduler.
        folder: where the layout is kept for the next start.

    Raises:
        UnsupportedEngine: names the tensor whose layout is no permutation.
    """
    from rose_engines.tensors import layout  # noqa: PLC0415  # torch takes its time

    size, rank = int(scheduler.tp_size), rank_of(scheduler)
    runner = scheduler.tp_worker.model_runner
    model = runner.model
    checkpoint = read_checkpoint(Path(scheduler.server_args.model_path))
    named = dict(model.named_parameters())
    engine = f"{_engine_version()} rank {rank} of {size}"
    return layout.read_live(
        model,
        named,
        checkpoint,
        cached=folder / f"layout.{rank}",
        engine=engine,
        twin=lambda: twin_of(runner.model_config, runner.load_config),
        whole=size == 1,
    )


def twin_of(config: Any, loading: Any) -> Any:  # noqa: ANN401
    """Another instance of a model, as SGLang makes it, that takes no memory and has no values.

    Args:
        config: SGLang's ``ModelConfig``.
        loading: its ``LoadConfig``.
    """
    import torch  # noqa: PLC0415  # takes its time
    from sglang.srt.model_loader import loader  # noqa: PLC0415
    from sglang.srt.model_loader.utils import set_default_torch_dtype  # noqa: PLC0415

    quantised = loader._get_quantization_config(config, loading)  # noqa: SLF001
    with set_default_torch_dtype(config.dtype), torch.device("meta"):
        return loader._initialize_model(config, loading, quantised)  # noqa: SLF001


def join(scheduler: Any, live: Live, control: Path) -> Ranks:  # noqa: ANN401
    """Meet the other ranks; every rank calls it at its first iteration.

    Raises:
        UnsupportedEngine: the ranks together do not hold the model.
    """
    group, size, rank = scheduler.tp_cpu_group, int(scheduler.tp_size), rank_of(scheduler)
    name = _exchange(group, size, os.urandom(4).hex())[0]
    board = control.parent / f"board.{name}"
    if rank == 0:
        RankBoard.create(board, size, len(live))
    parts: list[dict[str, Part]] = _exchange(group, size, parts_of(live))
    check_parts(parts, {name: math.prod(tensor.shape) for name, tensor in live.items()})
    joined = RankBoard(board, size, list(live))
    _exchange(group, size, None)
    if rank == 0:
        board.unlink()  # mapped by all; nobody else has any business there
    sockets = tuple(socket_of(control, number) for number in range(size))
    return Ranks(rank, joined, tuple(parts), sockets, lambda: _meet(group, size))


# Whatever can be pickled, from and for processes of this engine alone.
def _exchange(group: Any, size: int, mine: Any) -> Any:  # noqa: ANN401
    import torch.distributed  # noqa: PLC0415

    found: list[Any] = [None] * size
    torch.distributed.all_gather_object(found, mine, group=group)
    return found


def _meet(group: Any, size: int) -> None:  # noqa: ANN401
    _exchange(group, size, None)


def _engine_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"
