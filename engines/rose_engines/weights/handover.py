"""Work that the control thread of a session hands to the engine thread, and waits for.

At most one order waits. The engine thread carries it out between two iterations (at a boundary,
under an open permit) or while nothing is under way (at rest); until it has begun, the control
thread may withdraw it, and then it is never done. Next step: ``session`` makes the orders.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from rose_engines.weights.calls import Answer


@dataclass
class BoundaryWork:
    """Work for the engine thread, and whether it is meant for a boundary or for a rest."""

    work: Callable[[], Answer]
    at_rest: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    answer: Answer | None = None


class Handover:
    """Where the two threads meet.

    Args:
        wake: makes an idle engine pass a boundary soon.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._order: BoundaryWork | None = None

    @property
    def waiting(self) -> BoundaryWork | None:
        """What has not begun yet."""
        return self._order

    def have_done(self, order: BoundaryWork, seconds: float) -> Answer | None:
        """Hand work to the engine thread; None when it has not begun within this time."""
        self._order = order
        self._wake()
        if not order.done.wait(seconds):
            with self._lock:  # either the engine has it by now, or it never gets it
                self._order = None
        return order.answer

    def carry_out(self, *, at_rest: bool) -> None:
        """In the engine thread: what is meant for this kind of moment; cheap when nothing is."""
        order = self._order
        if order is not None and order.at_rest == at_rest:
            self.run(lambda: None)

    def run(self, withdrawn: Callable[[], None]) -> None:
        """In the engine thread: what waits, whatever it is meant for.

        Args:
            withdrawn: called instead when nothing waits any more.
        """
        with self._lock:
            order, self._order = self._order, None
            if order is None:
                withdrawn()
            else:
                order.answer = order.work()
                order.done.set()
