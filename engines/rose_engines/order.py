"""Work that the control thread of a session hands to the engine thread, and waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from rose_engines.sglang.calls import Answer


@dataclass
class Order:
    """Work for the engine thread, and whether it is meant for a boundary or for a rest."""

    work: Callable[[], Answer]
    at_rest: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    answer: Answer | None = None

    def wait(self, seconds: float) -> bool:
        """Whether the engine has carried it out within this time."""
        return self.done.wait(seconds)

    def result(self) -> Answer | None:
        """The engine's answer, if there is one."""
        return self.answer
