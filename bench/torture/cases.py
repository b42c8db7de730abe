"""What is tried: one case per step of the protocol, and what no single step shows.

A case arms one process to fail, makes it pass the step, and looks twice: while it is down (no
engine may serve mixed or unattested weights, the old version goes on) and after it is back (the
engine serves the head, with the head's digest and bits).
"""

from __future__ import annotations

from dataclasses import dataclass

from rose_core.delta.faults import STEPS

PROCESSES = {
    "publisher": "publisher",
    "store": "store",
    "relay": "relay",
    "sync": "weight-sync",
    "engine": "engine",
}
"""First word of a step -> process that passes it."""

# Passages before the fault acts: so that some blocks, pieces or tiles are done and some are not.
_LATER = {
    "store.block": 3,
    "relay.block": 3,
    "sync.block": 3,
    "engine.stage.tile": 3,
    "engine.commit.scatter": 5,
}
_FULL_DISK = (
    "store.opened",
    "store.block",
    "store.commit.blocks",
    "store.commit.manifest",
    "store.commit.head",
    "store.fold.manifest",
    "store.fold.list",
    "relay.block",
    "relay.merged",
    "sync.block",
    "sync.fetched",
    "sync.bundle",
)
"""Every step at which something has just been written, or is about to be."""

_STANDS_STILL = ("engine.commit.begin", "engine.commit.scatter", "engine.commit.checked")


@dataclass(frozen=True)
class Case:
    """One thing that goes wrong.

    Attributes:
        name: unique, what ``--only`` matches.
        process: the one that fails; empty when the case is a script of ``main``.
        fault: for ``ROSE_FAULT``.
        about: for people.
    """

    name: str
    process: str = ""
    fault: str = ""
    about: str = ""


def enumerated() -> list[Case]:
    """Every step as a ``kill -9``, then full disks, then processes that stand still."""
    found = [_case(step, "kill") for step in STEPS]
    found += [_case(step, "full") for step in _FULL_DISK]
    found += [_case(step, "stop") for step in (*_STANDS_STILL, "store.piece")]
    return found


SCRIPTED = (
    Case("store: flipped bits", about="every block of the head is damaged on the store's disk"),
    Case("relay: flipped bits", about="every block of the head is damaged on the relay's disk"),
    Case("relay: missing blocks", about="every block of the head is gone from the relay"),
    Case("store: flipped manifest", about="the head's manifest is damaged on the store's disk"),
    Case("store: flipped state", about="the run's list of versions is damaged at the store"),
    Case(
        "bundle: torn and reordered", about="half-written blocks and a manifest lie in the bundle"
    ),
    Case("bundle: flipped bits", about="blocks of a whole bundle are damaged before it is staged"),
    Case("engine: flipped weight", about="a bit of a live weight flips in the engine's memory"),
    Case("two publishers", about="a second one takes the run over; the first must stop"),
    Case("trainer rewound", about="the trainer starts again from an older step"),
    Case("gate closed", about="the gate closes before the commit and stays closed"),
    Case("clock jumps", about="wall clocks of store, relay and weight-sync jump by a day and back"),
    Case("second hand", about="somebody else stages and aborts on the same control socket"),
    Case("partition in mid-block", about="the link from relay to store breaks inside a block"),
    Case("rank votes late", about="one of two ranks stops in mid-swap, longer than the vote lasts"),
    Case("rank never answers", about="one of two ranks stops in mid-swap for ever"),
    Case("rank dies while staging", about="one of two ranks is killed between two tiles"),
    Case("everything at once", about="store, relay and weight-sync are killed in mid-transfer"),
)


GATES = tuple(
    Case(
        f"gate closes at {step}",
        PROCESSES[step.partition(".")[0]],
        f"{step}#{_LATER.get(step, 1)}=stop",
        f"the gate closes: {STEPS[step]}",
    )
    for step in ("sync.staged", "engine.stage.tile", *_STANDS_STILL, "sync.committed")
)
"""The gate closes while a process stands at a step of the commit, and opens later."""


def _case(step: str, action: str) -> Case:
    process = PROCESSES[step.partition(".")[0]]
    fault = f"{step}#{_LATER.get(step, 1)}={action}"
    return Case(f"{action} {step}", process, fault, STEPS[step])
