"""Exceptions of the demo.

DemoError
├── AlreadyRunning   another demo runs, or the cluster of an earlier one is still up
├── SetUpFailed      a part did not come up in time; says which and what it last said
└── BadTrace         a trace file without the expected columns
"""


class DemoError(Exception):
    """Base of everything the demo raises."""


class AlreadyRunning(DemoError):
    """A demo runs or a cluster is up already; the demo refuses to share or end it."""


class SetUpFailed(DemoError):
    """A part did not come up in time."""


class BadTrace(DemoError):
    """A trace file that cannot be replayed."""
