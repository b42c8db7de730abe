"""What a lease says of its rollouts, and everything that a router decides with because of it.

``policies_of`` is the only place where a lease's terms become policies: production's router calls
it with what its flags say, the simulator with what a scenario says. A default that differed between
the two would be measured and not shipped.

| of the lease | decides |
|---|---|
| ``weights.maxStalenessVersions`` | which engines are fresh enough; the deadline, if unsaid |
| ``router.maxAgeVersions`` | the deadline of trajectories whose caller names none |
| ``router.policy`` | the rule that places turns |

Next: ``placement`` reads the policy, ``prospects`` the deadline, ``watch`` the patience.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rose_core.rollouts.placement.views import Policy, PolicyName
from rose_core.rollouts.placement.watch import LegPatience
from rose_core.rollouts.trajectories.prospects import Deadline, Prospects


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """The part of a lease that placement depends on.

    Attributes:
        max_staleness: publishes an engine may lag behind the newest version known.
        max_age: publishes after which a trajectory is too old to train on; ``None`` = as many as
            an engine may lag: a trainer that takes turns of engines so old takes trajectories so
            old. Without a deadline nothing is kept from being begun where it could not end in time.
        placement: the rule.
    """

    max_staleness: int = 1
    max_age: int | None = None
    placement: PolicyName = PolicyName.JOINT


@dataclass(frozen=True, slots=True)
class Policies:
    """What a router decides with.

    Attributes:
        placement: which engine a turn gets.
        deadline: of trajectories whose caller names none.
        patience: how long a turn may stand still.
    """

    placement: Policy = field(default_factory=Policy)
    deadline: Deadline = field(default_factory=Deadline)
    patience: LegPatience = field(default_factory=LegPatience)

    def memory(self) -> Prospects:
        """An empty memory of trajectories under these policies."""
        # Only this rule keeps to an arm; under another, groups would be assigned to nothing.
        control = self.placement.control if self.placement.name is PolicyName.JOINT else 0.0
        return Prospects(self.deadline, control=control)


def policies_of(
    terms: LeaseTerms, tuning: Policy | None = None, patience: LegPatience | None = None
) -> Policies:
    """The policies that the terms ask for.

    Args:
        terms: of the lease.
        tuning: the platform's knobs; rule and staleness in it are the lease's to say.
        patience: the platform's.
    """
    max_age = terms.max_staleness if terms.max_age is None else terms.max_age
    return Policies(
        replace(tuning or Policy(), max_staleness=terms.max_staleness, name=terms.placement),
        Deadline(publishes=max_age),
        patience or LegPatience(),
    )
