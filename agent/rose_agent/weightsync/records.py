"""One JSON line per commit: what it carried, how long each part took, what went wrong before.

The file lies beside the engine's other files and keeps the newest ``KEPT`` lines, so it never
grows. ``rose weights commits`` reads it. Next step: ``follower`` writes a line when a version is
live and confirmed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rose_core.unreadable import UNREADABLE
from rose_engines.node.rundir import RunDir
from rose_wire import flags
from rose_wire.flags import VerbParser

FILE = "commits.jsonl"
KEPT = 200


class CommitRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One version that was brought to one engine.

    Attributes:
        at: wall clock, seconds since 1970.
        base: label of the version before; empty when the full state came.
        elements: weights of the model; ``changed`` of them differ from the base.
        block_bytes: size of the blocks that were pulled.
        pull_seconds: plan and fetch.
        confirm_seconds: from the order to the answer, without the pause: waiting and digests.
        merged: publishes that this one commit covers; None = unknown.
        lag: publishes to the head afterwards; None = unknown.
        failures: reasons of the attempts that failed since the last commit, oldest first.
        full: the full state was asked for after failures, or because the base was unknown.
        encode_seconds: what comparing and encoding this version took its publisher; None = unknown,
            also when a newer version was the head by then.
        retracted_requests, recomputed_tokens: requests that had to prefill again because of it.
    """

    at: float
    version: str
    base: str
    elements: int
    changed: int
    block_bytes: int
    pull_seconds: float
    stage_seconds: float
    pause_seconds: float
    confirm_seconds: float
    fenced_requests: int
    merged: int | None = None
    lag: int | None = None
    failures: tuple[str, ...] = ()
    full: bool = False
    encode_seconds: float | None = None
    retracted_requests: int = 0
    recomputed_tokens: int = 0

    @property
    def density(self) -> float:
        """Share of the weights that changed."""
        return self.changed / self.elements if self.elements else 0.0


def append(path: Path, record: CommitRecord, kept: int = KEPT) -> None:
    """Add a line and let go of the oldest; readers see the old file or the new one.

    Raises:
        OSError: the folder is missing or full; the old file is then untouched.
    """
    lines = [*_lines(path), msgspec.json.encode(record)][-kept:]
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(b"\n".join(lines) + b"\n")
        Path(name).replace(path)
    except BaseException:  # whatever it was, no half-written file stays
        Path(name).unlink(missing_ok=True)
        raise


def read(path: Path) -> list[CommitRecord]:
    """Every record that can be read, oldest first; a missing file has none."""
    return [record for line in _lines(path) for record in _record(line)]


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError:
        return []


def _record(line: bytes) -> Iterator[CommitRecord]:
    try:
        yield msgspec.json.decode(line, type=CommitRecord)
    except UNREADABLE:
        return


def parser() -> argparse.ArgumentParser:
    """The verb's arguments."""
    made = VerbParser(prog="rose weights commits", description=__doc__)
    made.add_argument(
        "--rundir", type=Path, default=Path("/run/rose"), help="run directory of the node"
    )
    made.add_argument("--slot", default="", help="one slot's uid; all by default")
    made.add_argument("--last", type=flags.count, default=20, help="newest commits of each engine")
    made.add_argument("--json", action="store_true", help="the lines as they are")
    return made


def main(argv: list[str]) -> int:
    """Entry of the verb.

    Returns:
        0 there were commits, 1 there were none.
    """
    arguments = parser().parse_args(argv)
    found = 0
    for slot in RunDir(arguments.rundir).all_slots():
        if arguments.slot not in {"", slot.uid}:
            continue
        for record in read(slot.folder / FILE)[-arguments.last :]:
            found += 1
            text = msgspec.json.encode(record).decode() if arguments.json else line_of(record)
            sys.stdout.write(f"{text}\n" if arguments.json else f"{slot.uid}  {text}\n")
    if not found:
        sys.stderr.write(f"no commits under {arguments.rundir}\n")
    return 0 if found else 1


def line_of(record: CommitRecord) -> str:
    """One commit for people."""
    parts = [
        f"{record.version:<28}",
        f"{record.density:7.3%} of {record.elements / 1e6:.1f} M",
        f"{record.block_bytes / 1e6:.2f} MB",
        *([] if record.encode_seconds is None else [f"encode {record.encode_seconds:.2f} s"]),
        f"pull {record.pull_seconds:.2f} s",
        f"stage {record.stage_seconds:.2f} s",
        f"pause {1e3 * record.pause_seconds:.1f} ms",
        f"confirm {record.confirm_seconds:.2f} s",
        f"lag {'?' if record.lag is None else record.lag}",
    ]
    if record.retracted_requests:
        parts.append(
            f"{record.retracted_requests} requests prefill {record.recomputed_tokens} tokens again"
        )
    if record.full:
        parts.append("full state")
    if record.merged is not None and record.merged > 1:
        parts.append(f"{record.merged} publishes merged")
    if record.failures:
        parts.append("after " + ", ".join(record.failures))
    return "  ".join(parts)
