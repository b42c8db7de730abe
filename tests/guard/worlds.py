"""Short ways to say what the guard sees."""

from __future__ import annotations

from rose_core.guard.gate import GateVerdict, ReplicaFacts
from rose_core.guard.reasons import GateReason
from rose_core.guard.slot import EngineSeen, SlotSeen
from rose_core.telemetry.book import LiveRequest
from rose_core.telemetry.signal import Doubt, ServingSignal
from rose_core.wire.host import EngineState
from rose_core.wire.sync import SignalSource

MS = 1_000_000
S = 1_000_000_000
NOW = 1000 * S


def idle(for_ms: int = 1000) -> ServingSignal:
    return ServingSignal(SignalSource.WIRE_TAP, 0, (), NOW - for_ms * MS)


def busy(*requests: LiveRequest) -> ServingSignal:
    found = requests or (LiveRequest(1, NOW - 10 * MS, size=400),)
    return ServingSignal(SignalSource.WIRE_TAP, len(found), found)


def doubtful(doubt: Doubt) -> ServingSignal:
    return ServingSignal(None, None, doubt=doubt)


def facts(signal: ServingSignal | None = None, **changes: object) -> ReplicaFacts:
    return ReplicaFacts(signal=signal or idle(), **changes)  # type: ignore[arg-type]


OPEN = GateVerdict(open=True, reason=GateReason.IDLE, duty=1.0)


def shut(reason: GateReason = GateReason.SERVING_BUSY) -> GateVerdict:
    return GateVerdict(open=False, reason=reason)


def engine(
    state: EngineState = EngineState.SERVING,
    *,
    held: bool = False,
    frozen: bool = False,
    generation: int = 1,
) -> EngineSeen:
    return EngineSeen(state, generation, held=held, frozen=frozen)


def seen(
    verdict: GateVerdict = OPEN,
    found: EngineSeen | None = None,
    *,
    granted: bool | None = True,
    host_alive: bool = True,
    heartbeat_ms: int | None = 1,
    processes: bool = False,
    can_dormant: bool = False,
    generation: int = 1,
) -> SlotSeen:
    return SlotSeen(
        granted=granted,
        generation=generation,
        verdict=verdict,
        engine=found,
        host_alive=host_alive,
        heartbeat_ns=None if heartbeat_ms is None else heartbeat_ms * MS,
        processes=processes,
        can_dormant=can_dormant,
    )
