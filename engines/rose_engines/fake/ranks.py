"""The fake engine over several ranks: processes with slices of the weights, in step.

The leader's request broadcast is a byte down each member's pipe; a member passes a boundary and
waits for the next byte, as a rank of SGLang does. Board, sessions and slices are the product's.
``python -m rose_engines.fake.ranks`` is a member; the leader starts it.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from rose_core.delta.safetensors import StoredTensor
from rose_core.delta.tiles import as_matrix
from rose_engines.tensors.canonical import HostTensor, LiveTensor
from rose_engines.tensors.safetensors import read_checkpoint
from rose_engines.tensors.slices import Box, SlicedTensor
from rose_engines.weights.control import ControlServer
from rose_engines.weights.multi_rank import MemberSession
from rose_engines.weights.parts import Ranks, check_parts, parts_of, socket_of
from rose_engines.weights.rank_board import RankBoard
from rose_wire import faults

# Members read the weights of their start from the model folder; nothing else comes by the pipe.
_GO = b"g"


def read_slices(model: Path, rank: int, ranks: int) -> dict[str, LiveTensor]:
    """A rank's private copy of its slices: columns of output projections, rows of the rest.

    Raises:
        UnsupportedEngine: the folder holds no readable safetensors.
    """
    return {
        name: _slice(name, stored, rank, ranks) for name, stored in read_checkpoint(model).items()
    }


def _slice(name: str, stored: StoredTensor, rank: int, ranks: int) -> LiveTensor:
    dtype, shape, bits = stored
    rows, columns = as_matrix(shape)
    across = name.endswith(("o_proj.weight", "down_proj.weight"))
    if len(shape) < 2 or (columns if across else rows) % ranks:
        return HostTensor(name, dtype, shape, np.array(bits))
    if across:
        share = columns // ranks
        box = Box("", rank * share, rows, share, columns, 0, share)
    else:
        share = rows // ranks * columns
        box = Box("", rank * share, 1, share, share, 0, share)
    flat = HostTensor(name, dtype, (box.elements,), np.zeros(box.elements, bits.dtype))
    made = SlicedTensor(name, dtype, shape, (box,), flat)
    places, kept = made.own(slice(0, bits.size))
    made.put(places, bits[kept])
    return made


def _join(
    model: Path, rank: int, ranks: int, control: Path, board: Path
) -> tuple[Ranks, dict[str, LiveTensor]]:
    """What SGLang's ranks tell each other follows from the model folder here."""
    lives = [read_slices(model, number, ranks) for number in range(ranks)]
    parts = tuple(parts_of(live) for live in lives)
    check_parts(parts, {name: math.prod(one.shape) for name, one in lives[0].items()})
    if rank == 0:
        RankBoard.create(board, ranks, len(lives[0]))
    sockets = tuple(socket_of(control, number) for number in range(ranks))
    opened = RankBoard(board, ranks, list(lives[0]))
    return Ranks(rank, opened, parts, sockets, lambda: None), lives[rank]


@dataclass
class Members:
    """The other ranks, as the leader sees them.

    Attributes:
        board: its file, gone once everybody has mapped it.
    """

    children: list[subprocess.Popen[bytes]]
    board: Path

    def wait_for_members(self) -> None:
        """Every member has come as far as this."""
        for child in self.children:
            _pipe(child.stdout).read(1)
        self.board.unlink()
        self.broadcast()

    def broadcast(self) -> None:
        """Take every member past one boundary; an engine without its ranks ends, as SGLang does."""
        for child in self.children:
            try:
                _pipe(child.stdin).write(_GO)
                _pipe(child.stdin).flush()
            except BrokenPipeError:
                os._exit(1)  # nothing of this engine may go on


def lead(
    model: Path, ranks: int, control: Path, fault: str = ""
) -> tuple[Ranks, dict[str, LiveTensor], Members]:
    """Start the members and meet them.

    Args:
        model: folder of the weights.
        ranks: all of them, the leader included.
        control: the leader's control socket.
        fault: at which step the members fail, for tests.
    """
    board = control.with_name(f"board.{os.getpid()}")
    joined, live = _join(model, 0, ranks, control, board)
    environment = {key: value for key, value in os.environ.items() if key != faults.VARIABLE}
    members = Members(
        [
            _start(
                [str(model), str(rank), str(ranks), str(control), str(board)],
                {**environment, faults.VARIABLE: fault} if fault else environment,
            )
            for rank in range(1, ranks)
        ],
        board,
    )
    return (
        Ranks(0, joined.board, joined.parts, joined.sockets, members.wait_for_members),
        live,
        members,
    )


def _start(place: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "rose_engines.fake.ranks", *place],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(environment),
    )


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    if end is None:  # both are asked for above
        raise BrokenPipeError
    return end


def _follow(model: Path, rank: int, ranks: int, control: Path, board: Path) -> None:
    joined, live = _join(model, rank, ranks, control, board)

    def meet() -> None:
        sys.stdout.buffer.write(_GO)
        sys.stdout.buffer.flush()
        sys.stdin.buffer.read(1)

    met = Ranks(rank, joined.board, joined.parts, joined.sockets, meet)
    session = MemberSession(live, "base", met)
    ControlServer(joined.sockets[rank], session.handle).start()
    while not session.broken:
        session.on_boundary()
        if not sys.stdin.buffer.read(1):
            return  # the leader is gone


def main(argv: list[str] | None = None) -> int:
    """Run one member until the leader ends."""
    flags = argparse.ArgumentParser(prog="rose_engines.fake.ranks", description=__doc__)
    flags.add_argument("model", type=Path)
    flags.add_argument("rank", type=int)
    flags.add_argument("ranks", type=int)
    flags.add_argument("control", type=Path)
    flags.add_argument("board", type=Path)
    faults.arm()
    given = flags.parse_args(argv)
    _follow(given.model, given.rank, given.ranks, given.control, given.board)
    return 0


if __name__ == "__main__":
    sys.exit(main())
