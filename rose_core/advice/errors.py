"""What can be wrong with recorded telemetry.

```
AdviceError
├── TelemetryError   the file is no telemetry: where, what, and what would be
└── TooLittle        it is telemetry, but nothing honest follows from so little
```
"""

from __future__ import annotations


class AdviceError(Exception):
    """Base of everything raised here."""


class TelemetryError(AdviceError):
    """A file or one place in it cannot be used."""


class TooLittle(AdviceError):
    """Too few samples or too short a time."""
