"""Named steps of the weight protocol at which a test may make a process fail.

Product code calls ``at(STEP)`` where the protocol has a step; nothing happens unless a process was
started to fail there (``rose_wire.faults`` reads ``ROSE_FAULT``). The table is the list that
``make torture`` walks through, so a step that is not in it is refused here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

STEPS: Mapping[str, str] = MappingProxyType(
    {
        "publisher.snapshot": "a snapshot of the model was taken",
        "publisher.encoded": "a version was compared and encoded, nothing was sent",
        "publisher.staged": "all blocks are at the store, no commit was asked for",
        "publisher.committed": "the store has moved the head, the publisher has not noted it",
        "store.opened": "the fence of an incarnation was written, nobody was told",
        "store.block": "a block was staged, its publisher was not told",
        "store.commit.blocks": "the blocks of a commit are durable, its manifest is not",
        "store.commit.manifest": "the manifest is durable, the head has not moved",
        "store.commit.head": "the head has moved, nobody was told",
        "store.plan": "a plan was made, the receiver was not told",
        "store.piece": "a piece of a fetch is about to be sent",
        "store.fold.manifest": "a folded version was written, the list names what it replaces",
        "store.fold.list": "the list was replaced, nothing was swept",
        "relay.plan": "a plan came from the store, the receiver was not told",
        "relay.block": "a block arrived from the store, it is not kept yet",
        "relay.merged": "versions were merged at the relay, the receiver was not told",
        "relay.piece": "a piece of a fetch is about to be sent",
        "sync.planned": "a plan arrived, no block was asked for",
        "sync.block": "a block was written into the bundle",
        "sync.fetched": "all blocks are in the bundle, its manifest is not",
        "sync.bundle": "the bundle is complete, nothing is staged",
        "sync.staged": "the engine has staged the bundle, no commit was asked for",
        "sync.committed": "the engine has committed, weights.json does not say so",
        "sync.attested": "the live digest was recomputed, weights.json does not say so",
        "engine.stage.tile": "some blocks were read, no weight was touched",
        "engine.commit.begin": "a commit was ordered, no weight was touched",
        "engine.commit.scatter": "some tiles hold the new weights, others the old ones",
        "engine.commit.checked": "all weights are new and checked, the label is old",
    }
)

_hook: Callable[[str], None] | None = None


def at(step: str) -> None:
    """Pass a step of the protocol; costs one comparison."""
    if _hook is not None:
        _hook(step)


def install(hook: Callable[[str], None] | None) -> None:
    """Call ``hook`` at every step from now on; None makes the steps inert again."""
    global _hook  # noqa: PLW0603  # one process fails as a whole
    _hook = hook


@dataclass
class Fault:
    """Acts once, at one passage of one step.

    Attributes:
        step: a key of ``STEPS``.
        left: passages until it acts; 1 = the next one.
        action: what it does.
    """

    step: str
    left: int
    action: Callable[[], None]

    def __call__(self, step: str) -> None:
        """Pass a step."""
        if step == self.step:
            self.left -= 1
            if self.left == 0:
                self.action()


def parse(text: str, actions: Mapping[str, Callable[[], None]]) -> Fault:
    """Read ``STEP``, ``STEP#N`` or ``STEP#N=ACTION``; the first passage and ``kill`` by default.

    Raises:
        ValueError: no such step or action.
    """
    place, _, action = text.partition("=")
    step, _, number = place.partition("#")
    if step not in STEPS or (action or "kill") not in actions:
        message = (
            f"{text!r} names no fault; steps: {', '.join(STEPS)}; actions: {', '.join(actions)}"
        )
        raise ValueError(message)
    return Fault(step, int(number or 1), actions[action or "kill"])
