"""On/off harvesting of idle GPUs, as a baseline: what polled utilisation and patience can do.

Such systems look at a GPU's activity once a second and lend it when it was idle for a while. Both
figures are ours, of the order that such systems use; nothing here is production's.
"""

from __future__ import annotations

from collections.abc import Callable

from rose_simulate.model.clock import SECOND, Clock
from rose_simulate.model.device import Device
from rose_simulate.model.gates import Gate, Host

# Period of utilisation exporters.
LOOK_S = 1.0
# Idle for so long before it is lent; windows of slack last 2 to 8 s at the median.
QUIET_S = 5.0


class OnOffGate(Gate):
    """Open after ``QUIET_S`` of idleness, closed at the first look that sees work."""

    def __init__(
        self, clock: Clock, device: Device, host: Host, changed: Callable[[bool], None]
    ) -> None:
        super().__init__(clock, device, host, changed)
        self._busy_ns = 0
        self._seen_ns = 0
        clock.after(LOOK_S, self._look)

    def on_engine_ready(self) -> None:
        """Opens at a look, never by itself."""

    def _look(self) -> None:
        serving, now = self.device.serving, self.clock.now_ns
        if serving is not None:
            serving.settle()
            if serving.live or serving.busy_ns > self._seen_ns:
                self._busy_ns = now
            self._seen_ns = serving.busy_ns
        if now - self._busy_ns < QUIET_S * SECOND:
            self.shut()
        elif self.device.rollout is not None and self.granted:
            self.device.allow()
            self.set_open(True)
        self.clock.after(LOOK_S, self._look)
