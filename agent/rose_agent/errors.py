"""Exceptions of the agent's guard.

AgentError
├── BadConfiguration    a flag or a file is missing or malformed
└── ApiUnreachable      the Kubernetes API server does not answer or refuses
"""


class AgentError(Exception):
    """Base of what the guard raises."""


class BadConfiguration(AgentError):
    """A flag or a file is missing or malformed; the message names it."""


class ApiUnreachable(AgentError):
    """The Kubernetes API server does not answer or refuses; trying again may help."""
