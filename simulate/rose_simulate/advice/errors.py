"""What can be wrong with recorded telemetry, and with models and GPUs that are asked about.

```
AdviceError
├── TelemetryError   the file is no telemetry: where, what, and what would be
├── TooLittle        it is telemetry, but nothing honest follows from so little
└── NoRoom           the model of the rollouts fits beside serving at no setting (``memory``)
```
"""

from __future__ import annotations


class AdviceError(Exception):
    """Base of everything raised here."""


class TelemetryError(AdviceError):
    """A file or one place in it cannot be used."""


class NoRoom(AdviceError):
    """The rollouts' engine fits beside serving at no fraction; says what is short."""


class TooLittle(AdviceError):
    """Too few samples or too short a time."""
