"""Exceptions of the trainer library.

TrainerLibraryError
├── BadState           tensors that cannot be published (type, shape, sharding)
├── PublishFailed      a version could not be published; the publisher has stopped
└── NotPublished       ``wait`` ran out of time; the version may still become durable
"""


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
