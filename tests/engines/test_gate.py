"""The engine's wait for its permit."""

from pathlib import Path

import pytest

from rose_engines.node.gate import POLL_SECONDS, PermitGate
from rose_engines.node.permit import BadPermit, Permit


class World:
    """A clock that only sleeping moves; ``at`` runs something at a time."""

    def __init__(self) -> None:
        self.now = 1_000_000_000
        self.plans: list[tuple[int, object]] = []

    def clock(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)
        if self.now > 100_000_000_000:
            pytest.fail("the gate never opened")
        for plan in [plan for plan in self.plans if plan[0] <= self.now]:
            self.plans.remove(plan)
            plan[1]()  # type: ignore[operator]


@pytest.fixture
def world() -> World:
    return World()


def test_open_does_not_wait(tmp_path: Path, world: World) -> None:
    permit = Permit.create(tmp_path / "permit")
    permit.extend(world.now + 1)
    gate = PermitGate(tmp_path / "permit", world.clock, world.sleep)
    assert gate.wait() == 0.0
    assert gate.is_open()


def test_a_pass_waits_until_the_permit_is_extended(tmp_path: Path, world: World) -> None:
    permit = Permit.create(tmp_path / "permit")
    gate = PermitGate(tmp_path / "permit", world.clock, world.sleep)
    opens = world.now + 3_000_000_000
    world.plans.append((opens, lambda: permit.extend(world.now + 100_000_000)))
    waited = gate.wait()
    assert 3.0 <= waited <= 3.0 + 2 * POLL_SECONDS


def test_follows_a_replaced_permit(tmp_path: Path, world: World) -> None:
    """The engine host was restarted while the engine stood still."""
    Permit.create(tmp_path / "permit")
    gate = PermitGate(tmp_path / "permit", world.clock, world.sleep)

    def replace() -> None:
        Permit.create(tmp_path / "permit").extend(world.now + 5_000_000_000)

    world.plans.append((world.now + 1_000_000_000, replace))
    assert 1.0 <= gate.wait() < 2.0


@pytest.mark.parametrize("content", [None, b"garbage"])
def test_lost_permit_stays_closed_until_there_is_one(
    tmp_path: Path, world: World, content: bytes | None
) -> None:
    path = tmp_path / "permit"
    Permit.create(path)
    gate = PermitGate(path, world.clock, world.sleep)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    opens = world.now + 2_000_000_000
    world.plans.append((opens, lambda: Permit.create(path).extend(world.now + 5_000_000_000)))
    assert gate.wait() >= 2.0


def test_no_permit_no_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="permit"):
        PermitGate(tmp_path / "permit")
    (tmp_path / "permit").write_bytes(b"x")
    with pytest.raises(BadPermit):
        PermitGate(tmp_path / "permit")
