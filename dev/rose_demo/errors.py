"""Exceptions of the demo.

DemoError
├── AlreadyRunning   a cluster of an earlier run is still up
├── SetUpFailed      a part did not come up in time; says which and what it last said
└── BadTrace         a trace file without the expected columns
"""


class DemoError(Exception):
    """Base of everything the demo raises."""


class AlreadyRunning(DemoError):
    """A cluster is up already; the demo refuses to share or end it."""


class SetUpFailed(DemoError):
    """A part did not come up in time."""


class BadTrace(DemoError):
    """A trace file that cannot be replayed."""
