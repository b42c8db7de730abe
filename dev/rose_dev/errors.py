"""Exceptions of the development cluster.

DevelopmentError
├── CommandFailed     an external command ended badly or ran out of time
├── BuildFailed       a part of Kubernetes could not be built or found
├── NotSupported      this machine cannot run the node (not Linux, not root, no compiler)
├── ReleaseFailed     something must not be released as it is
└── StartFailed       a component did not come up in time; the message carries the end of its log
"""


class DevelopmentError(Exception):
    """Base of everything ``rose_dev`` raises."""


class CommandFailed(DevelopmentError):
    """An external command ended badly or ran out of time."""


class BuildFailed(DevelopmentError):
    """A part of Kubernetes could not be built or found."""


class NotSupported(DevelopmentError):
    """This machine cannot run the node."""


class StartFailed(DevelopmentError):
    """A component did not come up in time."""


class ReleaseFailed(DevelopmentError):
    """Something must not be released as it is."""
