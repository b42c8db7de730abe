"""What can be wrong with a simulation.

```
SimulationError
├── ScenarioError      a field is missing, misspelt or out of range
│   └── Impossible     every field is fine, but together they cannot exist
└── TraceError         a trace is truncated or has other columns
```
"""

from __future__ import annotations


class SimulationError(Exception):
    """Base of everything raised here."""


class ScenarioError(SimulationError):
    """A scenario cannot be read; ``where`` names file, line and field."""


class Impossible(ScenarioError):
    """A scenario that contradicts itself, with the reason."""


class TraceError(SimulationError):
    """A trace cannot be used."""
