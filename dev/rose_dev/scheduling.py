"""A scheduler of xdist that does not run a test again that has ended its worker.

That of xdist gives all that a dead worker had left to the next one, the deadly test first, until so
many workers have died that the run gives up.

Next: ``rose_dev.watchdog`` chooses it.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class _Once(LoadFileScheduling):
    def remove_node(self, node: WorkerController) -> str | None:
        """Count the test that ran as done before the rest is given to others."""
        units = self.assigned_work[node]
        left = [(unit, test) for unit in units.values() for test, done in unit.items() if not done]
        if not left:
            return super().remove_node(node)
        unit, deadly = left[0]
        unit[deadly] = True
        self.assigned_work[node] = {
            scope: unit for scope, unit in units.items() if not all(unit.values())
        }
        super().remove_node(node)
        return deadly


def scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """The scheduler for ``--dist loadfile``; None leaves it to xdist."""
    return _Once(config, log) if config.getoption("dist") == "loadfile" else None
