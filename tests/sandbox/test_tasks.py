"""The tasks of the benchmark can be solved, undisturbed and with a loss after every turn."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.sandboxes.tasks import TASKS, Task
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_sandbox.runtimes.runtime import Handle, Kind, SandboxSpec

# Three of each kind in the lane; make bench-sandboxes plays all of them, killed after every turn.
HARD = ("tmux-shell", "tcp-connection-left-open", "redis-in-memory", "deleted-open-file")


@pytest.fixture(scope="module", autouse=True)
def _named() -> None:
    names = [task.name for task in TASKS]
    assert len(set(names)) == len(names) >= 30


def test_most_tasks_hold_more_than_files() -> None:
    assert sum(bool(task.holds) for task in TASKS) >= len(TASKS) / 2


async def _verify(runc: RuncRuntime, box: Handle, task: Task) -> None:
    result = await runc.exec(box, task.verify, 20)
    assert result.exit_code == 0, (task.name, result)


@pytest.mark.sandbox
@pytest.mark.parametrize("name", HARD)
async def test_a_task_is_solved_though_its_sandbox_is_lost_after_every_turn(
    runc: RuncRuntime, tmp_path: Path, name: str
) -> None:
    task = next(task for task in TASKS if task.name == name)
    box = await runc.create(SandboxSpec("box"))
    for number, turn in enumerate(task.turns):
        await runc.exec(box, turn, 30, session=task.session)
        into = tmp_path / str(number)
        os.mkdir(into)  # noqa: PTH102
        parts = await runc.checkpoint(box, Kind.FULL, into)
        await runc.end(box)
        box = await runc.restore(parts, parts.spec)
    await _verify(runc, box, task)
