"""``python -m bench.drafts``: how many drafted tokens the example's task accepts, on a real SGLang.

The example trains (``examples.grpo.train``) over a store, a router and one dedicated engine with
drafts. Every few seconds the router's counters are read: steps that verified drafts, and tokens
beyond one a step. Writes ``out/bench/drafts.json`` and prints the acceptance as training goes on.
A small model on a CPU says how often drafts are right, and nothing of the time that they save.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from bench.record import Figure, record
from bench.rounds.parts import RunningLease, lease, trainer_command
from rose_wire import flags

_COUNT = re.compile(
    r'^rose_router_draft_(?:tokens|corpora)_total\{outcome="(\w+)"\} (\S+)$', re.MULTILINE
)
_EVERY_SECONDS = 5.0


@dataclass(frozen=True)
class Counts:
    """What the router has counted so far."""

    steps: float = 0.0
    accepted: float = 0.0
    sent: float = 0.0
    refused: float = 0.0

    @property
    def per_step(self) -> float | None:
        """Tokens a step; None before the first."""
        return 1 + self.accepted / self.steps if self.steps else None

    def since(self, before: Counts) -> Counts:
        """What came after ``before``."""
        return Counts(
            self.steps - before.steps,
            self.accepted - before.accepted,
            self.sent - before.sent,
            self.refused - before.refused,
        )


def counts_of(page: str) -> Counts:
    """Read a router's ``/metrics``."""
    return Counts(**{outcome: float(value) for outcome, value in _COUNT.findall(page)})


def parser() -> argparse.ArgumentParser:
    """The knobs."""
    made = argparse.ArgumentParser(prog="python -m bench.drafts", description=__doc__)
    add = made.add_argument
    add("--seed", type=int, default=1)
    add("--seconds", type=flags.above_zero, default=75.0, help="of training")
    return made


def train(running: RunningLease, given: argparse.Namespace, folder: Path) -> list[Counts]:
    """Train, and read the counters meanwhile.

    Raises:
        CalledProcessError: training failed.
    """
    command = trainer_command(running, folder / "run", given.seed, given.seconds)
    found = [_read(running)]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_EVERY_SECONDS):
            found.append(_read(running))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        subprocess.run(command, check=True)
    finally:
        ended.set()
        watching.join()
    return [*found, _read(running)]


def _read(running: RunningLease) -> Counts:
    with urllib.request.urlopen(f"{running.url}/metrics", timeout=30) as reply:  # noqa: S310  # loopback
        return counts_of(reply.read().decode())


def figures(found: list[Counts]) -> list[Figure]:
    """Of the whole run, and of its thirds; a part without steps says nothing."""
    cuts = [found[len(found) * part // 3] for part in range(3)] + [found[-1]]
    parts = [("all", found[-1].since(found[0]))]
    pairs = itertools.pairwise(cuts)
    parts += [
        (name, after.since(before))
        for name, (before, after) in zip(("first", "second", "last"), pairs, strict=True)
    ]
    made = [
        Figure(f"tokens a step, {name}{' third' if name != 'all' else ''}", one.per_step, "")
        for name, one in parts
        if one.per_step is not None
    ]
    whole = parts[0][1]
    made += [
        Figure("steps that verified drafts", whole.steps, ""),
        Figure("corpora that the engine took", whole.sent, ""),
        Figure("corpora that it refused", whole.refused, ""),
    ]
    return made


def main(argv: list[str] | None = None) -> int:
    """Train once."""
    given = parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="rose-drafts-") as name:
        folder = Path(name)
        with lease(folder, drafts=True) as running:
            measured = figures(train(running, given, folder))
    notes = (f"seed {given.seed}; {given.seconds:g} s; one dedicated SGLang on CPU, 16 turns",)
    record("drafts", measured, notes=notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
