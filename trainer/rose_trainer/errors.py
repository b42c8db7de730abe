"""Exceptions of the trainer library.

TrainerLibraryError
├── BadState           tensors that cannot be published (type, shape, sharding)
├── PublishFailed      a version could not be published; the publisher has stopped
├── NotPublished       ``wait`` ran out of time; the version may still become durable
├── NotReached         the version is durable, but too few engines serve it
├── TurnRefused        the router would not run a turn
├── RewardRefused      the rewards' URL says that the request is wrong
├── NoReward           the rewards' URL gave no result in time
└── Unsupported        a trainer's adapter is asked for what engines that come and go cannot do
"""

__all__ = [
    "BadState",
    "NoReward",
    "NotPublished",
    "NotReached",
    "PublishFailed",
    "RewardRefused",
    "TrainerLibraryError",
    "TurnRefused",
    "Unsupported",
]


class TrainerLibraryError(Exception):
    """Base of everything ``rose_trainer`` raises."""


class BadState(TrainerLibraryError):
    """Tensors that cannot be published; says which and why. Nothing was sent."""


class PublishFailed(TrainerLibraryError):
    """A version could not be published and the publisher has stopped.

    The cause is chained: ``rose_weights.errors.Fenced`` means that another publisher has taken the
    run over, so this trainer must end.
    """


class NotPublished(TrainerLibraryError):
    """``wait`` ran out of time; the version may still become durable."""


class NotReached(TrainerLibraryError):
    """The version is durable, but too few engines attested it in time; says which are behind."""


class TurnRefused(TrainerLibraryError):
    """The router would not run a turn; says why, and patience is over if it could have later."""


class RewardRefused(TrainerLibraryError):
    """The rewards' URL answered that the request is wrong; it stays wrong, and says what is."""


class NoReward(TrainerLibraryError):
    """There was no result in time; the same request may still get it."""


class Unsupported(TrainerLibraryError):
    """A trainer's adapter is asked for what engines that come and go cannot do; says what to do."""
