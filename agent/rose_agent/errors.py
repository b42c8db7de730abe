"""Exceptions of the agent's guard.

AgentError
├── AccessChanged       what the container can see of the GPUs has changed; only a new one helps
├── BadConfiguration    a flag or a file is missing or malformed
└── ApiUnreachable      the Kubernetes API server does not answer or refuses
"""


class AgentError(Exception):
    """Base of what the guard raises."""


class AccessChanged(AgentError):
    """What the container can see of the node's GPUs has changed; only a new one helps."""


class BadConfiguration(AgentError):
    """A flag or a file is missing or malformed; the message names it."""


class ApiUnreachable(AgentError):
    """The Kubernetes API server does not answer or refuses; trying again may help."""
