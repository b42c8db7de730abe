"""The gate of one replica: what every regime shares, and the two that decide nothing.

A regime hears of every arrival, first token and end of a serving request (after its own delay) and
moves ``SharedGpus.allow``/``forbid``.

| regime | knows a request | decides |
|---|---|---|
| ``ours`` | ``tap_s`` after its arrival | ``rose_core.guard`` (``guarded.py``) |
| ``ours-ladder`` | as ``ours`` | the same; turns are placed in the paper's order |
| ``polled`` | at a poll after its first token | the same, fed by ``/v1/loads`` alone |
| ``rose-paper`` | at once, being inside the engine | ``paper.py`` |
| ``unguarded`` | never | always open |
| ``clairvoyant`` | at once, stops without a trace | the device yields by itself |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rose_core.wire.host import EngineState
from rose_simulate.model.clock import Event, VirtualClock
from rose_simulate.model.gpus.batch import BatchEngine, Sequence
from rose_simulate.model.gpus.device import SharedGpus


@dataclass(eq=False, slots=True)
class ServingRequest:
    """One live request of a service.

    Attributes:
        session: whose keys its prompt begins with; empty = its own alone.
    """

    number: int
    arrived_ns: int
    prompt: int
    output: int
    session: str = ""
    replica: int = -1
    first_ns: int = 0
    ended_ns: int = 0
    sequence: Sequence | None = None

    @property
    def ttft_s(self) -> float:
        """Arrival to first token."""
        return (self.first_ns - self.arrived_ns) / 1e9

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 for a single token."""
        return (self.ended_ns - self.first_ns) / 1e9 / max(1, self.output - 1)


@dataclass(frozen=True)
class Timings:
    """Delays of the control path, seconds.

    Attributes:
        tap_s: first segment on the wire to the guard.
        close_s: guard's decision to a permit that the engine's next look finds closed.
        freeze_s: to an engine whose every thread stands.
        open_s: decision to an engine that computes again.
        poll_s: period of a polled source.
        start_s: an engine's start until it serves.
        tick_s: the guard's tick.
    """

    tap_s: float = 0.001
    close_s: float = 0.0002
    freeze_s: float = 0.005
    open_s: float = 0.010
    poll_s: float = 0.050
    start_s: float = 45.0
    tick_s: float = 0.020


class SimulatedHost:
    """The engine host of one replica: starts, ends and loses its rollout engine.

    Args:
        make: builds the engine; called when it begins to serve.
        lost: told of an engine that has gone, with what was in it.

    Attributes:
        broken: no engine ever starts here again; ``off``: none does for now.
    """

    def __init__(
        self,
        clock: VirtualClock,
        device: SharedGpus,
        start_s: float,
        make: Callable[[], BatchEngine],
        lost: Callable[[list[Sequence]], None],
    ) -> None:
        self._clock, self._device, self._start_s = clock, device, start_s
        self._make, self._lost = make, lost
        self._event: Event | None = None
        self.state: EngineState | None = None
        self.broken = self.off = False
        self.on_serving: Callable[[], None] = lambda: None

    def ensure(self) -> None:
        """Run an engine; idempotent."""
        if self.state is None and not self.broken and not self.off:
            self.state = EngineState.STARTING
            self._event = self._clock.after(self._start_s, self._serve)

    def _serve(self) -> None:
        self.state = EngineState.SERVING
        self._device.attach(self._make())
        self.on_serving()

    def stop(self) -> None:
        """End it, for whatever reason; idempotent."""
        if self._event is not None:
            self._event.cancel()
        engine, self.state = self._device.rollout, None
        if engine is not None:
            self._device.attach(None)
            self._lost(engine.clear())


class ReplicaGate:
    """What every regime shares; by itself it is always open while there is an engine.

    Args:
        changed: told whenever ``is_open`` has moved.
    """

    def __init__(
        self,
        clock: VirtualClock,
        device: SharedGpus,
        host: SimulatedHost,
        changed: Callable[[bool], None],
    ) -> None:
        self.clock, self.device, self.host, self._changed = clock, device, host, changed
        self.is_open = False
        self.granted = False
        host.on_serving = self.on_engine_ready

    @property
    def slowdown(self) -> float:
        """Of serving beside rollouts, as measured; 0 = nobody measures it."""
        return 0.0

    def set_open(self, is_open: bool) -> None:
        """Tell the router."""
        if is_open != self.is_open:
            self.is_open = is_open
            self._changed(is_open)

    def on_arrival(self, request: ServingRequest) -> None:
        """Hear of a request that has reached the replica."""

    def on_first_token(self, request: ServingRequest) -> None:
        """Hear of its first token."""

    def on_end(self, request: ServingRequest) -> None:
        """Hear of its last token."""

    def lend(self, granted: bool) -> None:
        """A slot was granted, or taken back."""
        self.granted = granted
        if granted:
            self.host.ensure()
        else:
            self.shut()
            self.host.stop()

    def on_engine_ready(self) -> None:
        """The rollout engine serves now."""
        self.device.allow()
        self.set_open(True)

    def shut(self) -> None:
        """Close at once."""
        self.device.forbid()
        self.set_open(False)

    def crash(self) -> None:
        """The rollout engine has died; it is started anew."""
        self.shut()
        self.host.stop()
        if self.granted:
            self.host.ensure()

    def on_guard_death(self, seconds: float) -> None:
        """The process that decides is gone for so long; here nobody decides."""

    def on_node_death(self) -> None:
        """The whole machine is off, and what was known of its requests with it."""
        self.host.off = True
        self.shut()
        self.host.stop()

    def on_node_return(self) -> None:
        """The machine is on again; a slot that still stands gets a cold engine."""
        self.host.off = False
        if self.granted:
            self.host.ensure()
