"""Exceptions of the verbs for people.

CommandError
├── NoCluster     no kubeconfig, or the API server cannot be reached
├── NotInstalled  the cluster does not know ROSE's kinds
├── NotAllowed    the person's rights do not suffice
├── NotFound      there is no such object
└── NoAnswer      something was asked for and did not happen in time
"""

from __future__ import annotations


class CommandError(Exception):
    """Base of everything these verbs raise; the text says what to do."""


class NoCluster(CommandError):
    """No kubeconfig, or the API server cannot be reached."""


class NotInstalled(CommandError):
    """The cluster does not know ROSE's kinds."""


class NotAllowed(CommandError):
    """The person's rights do not suffice."""


class NotFound(CommandError):
    """There is no such object."""


class NoAnswer(CommandError):
    """Something was asked for and did not happen in time."""
