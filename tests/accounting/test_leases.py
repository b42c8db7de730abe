"""A lease's ledger holds what was counted, and says of the rest that it is unknown."""

from rose_core.accounting.leases import OutsideLeases, ledger_of
from rose_core.accounting.ledger import Ledger, Trajectories


def test_a_lease_does_not_know_how_many_trajectories_were_started() -> None:
    found = ledger_of(1000, 500, 40, OutsideLeases(accepted=7, correct=3)).trajectories
    assert (found.accepted, found.correct) == (7, 3)
    assert found.started is None, "seven were accepted; nobody counted how many began"
    assert found.finished is None


def test_what_is_unknown_stays_unknown_in_a_sum() -> None:
    whole = Ledger(trajectories=Trajectories(10, 9, 8, 7)) + ledger_of(
        0, 0, 0, OutsideLeases(accepted=1)
    )
    assert whole.trajectories == Trajectories(None, None, 9, 7)
