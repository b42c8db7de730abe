"""Exceptions of the reward functions.

RewardsError
├── BadFunctions    the platform's list of functions is wrong; says where
├── BadReward       a caller asks for what cannot be computed
├── Busy            as many rewards wait as may
├── TornJournal     results that are kept cannot be trusted, or another process has them
└── WorkerEnded     a worker died or was stopped before it had answered
    ├── WorkerKilled    by SIGKILL, or with its pod
    ├── SandboxHostAway a sandbox host does not answer, or is another process than before
    └── SandboxBroke    a sandbox does no more what its host asks, and its program had begun
"""


class RewardsError(Exception):
    """Base of everything ``rose_rewards`` raises."""


class BadFunctions(RewardsError):
    """The list of functions cannot be used; says which line, and what is expected."""


class BadReward(RewardsError):
    """A request that is wrong whoever asks it; says what is."""


class Busy(RewardsError):
    """The queue is full; ask again later."""


class TornJournal(RewardsError):
    """The folder of results cannot be used as it is; says what to do."""


class WorkerEnded(RewardsError):
    """A worker is gone, and the answer that it owed with it."""


class WorkerKilled(WorkerEnded):
    """Somebody killed it, or its pod is lost: most likely no fault of what it verified."""


class SandboxHostAway(WorkerEnded):
    """Nothing was heard from a sandbox host, or it knows nothing of what it was asked before."""


class SandboxBroke(WorkerEnded):
    """A program that had begun may have ended its own sandbox, or its host has failed."""
