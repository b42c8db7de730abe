"""What the router of a simulation keeps: engines, turns, legs, counts. Next step: ``router``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from rose_core.rollouts.engines.estimates import Hazard, Speed
from rose_core.rollouts.placement.selection import TurnView
from rose_core.wire.routing import EngineKind
from rose_simulate.model.clock import Event
from rose_simulate.model.gpus.batch import BatchEngine, Sequence
from rose_simulate.model.gpus.recomputed import Cause


@dataclass(eq=False)
class AttachedEngine:
    """An engine attached to the router.

    Attributes:
        version: publishes it has; None before its first weights are attested.
        gate_ns: when the gate last moved.
        ready_s: when everything that was sent to it so far is applied.
        slowdown: of serving beside it, as its guard has measured; 0 = nobody has.
    """

    name: str
    kind: EngineKind
    batch: BatchEngine | None
    version: int | None
    gate_open: bool
    cap: int
    gate_ns: int = 0
    legs: list[RoutedLeg] = field(default_factory=list)
    speed: Speed | None = None
    hazard: Hazard = field(default_factory=Hazard)
    look: Event | None = None
    reclaims: int = 0
    full_cap: int = 0
    ready_s: float = 0.0
    slowdown: float = 0.0

    def __post_init__(self) -> None:
        """A cap that was cut may come back."""
        self.full_cap = self.cap


_NOTHING = TurnView(0, 0)


@dataclass(eq=False, slots=True)
class RoutedTurn:
    """One turn of a trajectory; ``held`` of its ``output`` tokens cannot be lost any more.

    Attributes:
        born: number of its trajectory, counted as they began.
        withdrawn: nobody wants it any more.
        warmed: where its prefix was warmed before it came; empty = nowhere.
        new: tokens of its context that were in no earlier turn; 0 once they are counted.
        view, since: how placement saw it when it began to wait, and when that was (seconds).
    """

    session: str
    context: int
    output: int
    number: int
    done: Callable[[], None]
    group: str = ""
    born: int = 0
    held: int = 0
    home: str = ""
    cached: int = 0
    home_version: int = 0
    avoid: str = ""
    losses: int = 0
    versions: list[int] = field(default_factory=list)
    view: TurnView = _NOTHING
    since: float = 0.0
    withdrawn: bool = False
    warmed: str = ""
    new: int = 0


@dataclass(eq=False, slots=True)
class RoutedLeg:
    """A turn on an engine."""

    turn: RoutedTurn
    engine: AttachedEngine
    sequence: Sequence
    began_ns: int
    first_ns: int = 0


@dataclass(frozen=True, slots=True)
class PausedLeg:
    """A turn that waits while it stands on an engine whose gate is closed.

    Attributes:
        key: its ``admission.rank``.
        view: it as placement sees it, were it cut now.
        since: when the gate closed, in seconds.
        leg: where it stands.
    """

    key: tuple[bool, int, int]
    view: TurnView
    since: float
    leg: RoutedLeg


@dataclass
class Counts:
    """What the router counts.

    Attributes:
        new_tokens: of prompts, that were in no earlier turn of their trajectory; counted with what
            was computed, when a turn's first leg ends.
        fetched_tokens: whose keys came from the job's tier.
        causes: why those of prompts were computed, warmed ones among them.
    """

    turns: int = 0
    new_tokens: int = 0
    fetched_tokens: int = 0
    moves: int = 0
    redone_tokens: int = 0
    again_prefilled: int = 0
    borrowed_prefilled: int = 0
    borrowed_tokens: int = 0
    tokens: int = 0
    causes: Counter[Cause] = field(default_factory=Counter)
    queue_s: float = 0.0
