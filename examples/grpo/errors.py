"""Exceptions of the example trainer.

TrainerError
├── TurnRefused     the lease's URL says the request itself is wrong; trying again does not help
├── MalformedReply  an answer without the tokens, log-probs or versions a trainer needs
├── Unscored        a trajectory has no reward that may be used: its group is left out
├── OutOfTime       the time limit came before the turn was complete
├── RoundTooLarge  a short round starts more groups than may be in flight
└── ModelMismatch   the model folder does not fit the task
"""


class TrainerError(Exception):
    """Base of everything the example trainer raises."""


class TurnRefused(TrainerError):
    """The lease's URL answered 4xx: the request is wrong and stays wrong."""


class MalformedReply(TrainerError):
    """The answer lacks what a trainer needs; it must never be taken for an empty turn."""


class Unscored(TrainerError):
    """A trajectory's reward is masked, or lost at every try; the run goes on without its group."""


class OutOfTime(TrainerError):
    """The time limit came before the turn was complete."""


class RoundTooLarge(TrainerError):
    """A short round starts more groups at once than ``--concurrency`` allows."""


class ModelMismatch(TrainerError):
    """The model folder does not fit the task, for example a vocabulary that is too small."""
