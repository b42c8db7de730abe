"""Events within their budget: what flaps is told seldom, and nobody else pays for it."""

from datetime import UTC, datetime

from rose_core.api import Condition, RolloutLease
from rose_operator.errors import ApiRefused
from rose_operator.kube.api import ObjectKind
from rose_operator.kube.object_cache import Raw
from rose_operator.metrics import REGISTRY
from rose_operator.status.event_limits import BURST, REFILL_SECONDS, EventLimiter
from rose_operator.status.events import MOST_MESSAGE, condition_event
from tests.api.objects import LEASE, changed
from tests.operator.fake_api import FakeApi

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def event(name: str = "grpo", message: str = "why") -> Raw:
    """A transition of a lease's readiness."""
    lease = RolloutLease.model_validate(changed(LEASE, {"metadata.name": name}))
    ready = Condition(
        type="Ready", status="False", reason="RouterNotReady", message=message,
        last_transition_time="2026-01-01T00:00:00Z",
    )  # fmt: skip
    return condition_event(ObjectKind.LEASE, lease, ready, NOW)


class Desk:
    """A teller with a clock that the test turns."""

    def __init__(self) -> None:
        self.api, self.now = FakeApi(), 0.0
        self.teller = EventLimiter(self.api, lambda: self.now)

    async def flap(self, times: int, seconds: float = 1.0) -> int:
        """How many of so many Events of one object were written."""
        reported = 0
        for _ in range(times):
            reported += await self.teller.emit(event())
            self.now += seconds
        return reported


def left_out() -> float:
    return REGISTRY.get_sample_value("rose_operator_events_left_out_total") or 0.0


async def test_an_object_that_flaps_is_told_of_a_bounded_number_of_times() -> None:
    desk, before = Desk(), left_out()
    assert await desk.flap(100) == BURST
    assert left_out() - before == 100 - BURST
    assert await desk.teller.emit(event("another"))


async def test_later_one_is_written_again_and_says_how_many_were_left_out() -> None:
    desk = Desk()
    await desk.flap(BURST + 7)
    desk.now += REFILL_SECONDS
    assert await desk.teller.emit(event(message="x" * MOST_MESSAGE))
    message = desk.api.events[-1]["message"]
    assert message.endswith("(7 Events before it were left out)")
    assert len(message) == MOST_MESSAGE
    assert await desk.flap(2) == 0


async def test_rare_events_are_all_written() -> None:
    assert await Desk().flap(100, REFILL_SECONDS) == 100


async def test_an_object_that_is_gone_is_forgotten() -> None:
    desk = Desk()
    await desk.flap(BURST + 1)
    desk.teller.keep({"RolloutLease default/another"})
    assert await desk.teller.emit(event())


async def test_an_event_that_is_refused_harms_nobody() -> None:
    class Refusing(FakeApi):
        async def create(self, kind: ObjectKind, manifest: Raw) -> Raw:
            raise ApiRefused(403, f"no {kind.value} {manifest['metadata']['name']}")

    assert not await EventLimiter(Refusing(), lambda: 0.0).emit(event())
