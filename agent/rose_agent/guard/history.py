"""What happened to one slot, as metrics and as entries of the flight recorder.

Nothing is decided here. Next step: ``recorder`` has the table of entries.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from rose_agent.guard import metrics
from rose_agent.guard.hold import ConfirmedHold
from rose_agent.guard.recorder import Recorder
from rose_core.guard.gate import GateVerdict
from rose_core.guard.ladder import Action, Rung
from rose_core.guard.reasons import PACED, GateReason
from rose_core.wire.host import EngineState, EngineStatus


class History:
    """One slot's.

    Args:
        recorder: the flight recorder.
        name: the slot's name for people; it becomes known with the first grant.
    """

    def __init__(self, recorder: Recorder, name: Callable[[], str]) -> None:
        self._recorder, self._name = recorder, name
        self._state: EngineState | None = None

    def note_gate(self, before: GateVerdict, verdict: GateVerdict, now_ns: int) -> None:
        """Note the gate's verdict where its position or reason has changed."""
        if before.reason is verdict.reason and before.open == verdict.open:
            return
        paced = before.reason is verdict.reason and verdict.reason in PACED
        if not paced:
            metrics.GATE_CHANGES.labels(verdict.reason.value).inc()
        metrics.GATE_OPEN.labels(self._name()).set(verdict.open)
        # A paced permit ends by itself, before anybody looks.
        ended_ns = before.until_ns if before.open and not verdict.open else 0
        slack = verdict.slack
        measured = {"prefill": slack.prefill_s, "decode": slack.decode_s} if slack else {}
        self._recorder.note(
            min(now_ns, ended_ns or now_ns),
            self._name(),
            "gate",
            open=verdict.open,
            reason=verdict.reason,
            duty=verdict.duty,
            **measured,
        )

    def note_closing(self, arrival_ns: int, reason: GateReason, now_ns: int) -> None:
        """Note that a request has just closed the permit."""
        after_ns = time.monotonic_ns() - arrival_ns
        metrics.CLOSE_SECONDS.observe(after_ns / 1e9)
        self._recorder.note(
            now_ns, self._name(), "closed", arrival=arrival_ns, after_ns=after_ns, reason=reason
        )

    def note_stop(self, stopped: ConfirmedHold) -> None:
        """Note a hold that a request caused and the host has confirmed."""
        metrics.STOP_SECONDS.observe(stopped.after_ns / 1e9)
        self._recorder.note(
            stopped.confirmed_ns,
            self._name(),
            "stopped",
            arrival=stopped.arrival_ns,
            after_ns=stopped.after_ns,
            paused_us=stopped.paused_us,
        )

    def note_order(self, action: Action, now_ns: int) -> None:
        """Note an order other than extending or closing the permit."""
        order = action.order.name
        metrics.ORDERS.labels(order.title()).inc()
        self._recorder.note(now_ns, self._name(), "order", order=order, reason=action.reason)

    def note_rung(self, rung: Rung, reason: GateReason, now_ns: int) -> None:
        """Note how far the engine has been taken back."""
        self._recorder.note(now_ns, self._name(), "rung", rung=rung.name, reason=reason)

    def note_engine(self, status: EngineStatus | None, now_ns: int) -> None:
        """Note the engine's state as the host tells it: a failure is found there, not ordered."""
        if status is not None and status.state is not self._state:
            self._state = status.state
            self._recorder.note(
                now_ns, self._name(), "engine", state=status.state, reason=status.reason
            )

    def forget(self) -> None:
        """The slot is gone: its gauge with it."""
        with contextlib.suppress(KeyError):
            metrics.GATE_OPEN.remove(self._name())
