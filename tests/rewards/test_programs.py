"""The rule ``python``: programs of models, in real workers under limits."""

from __future__ import annotations

import os
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.rewards.test_gateway import Rewards, folder, serving

__all__ = ["folder"]

DOUBLES = [{"input": "2\n", "output": "4\n"}, {"input": "21", "output": "42"}]


@pytest.fixture
async def rewards(folder: Path) -> AsyncIterator[Rewards]:  # the fixture
    async with serving(folder, {"python": {"rule": "python", "tries": 1}}, workers=1) as found:
        yield found


async def ran(rewards: Rewards, program: str, **fields: object) -> dict[str, Any]:
    answer = textwrap.dedent(program)
    asked = {"trajectory": program, "answer": answer, "expected": DOUBLES, **fields}
    status, result = await rewards.ask("", function="python", **asked)
    assert status == 200, result
    return result


async def test_a_program_is_worth_the_share_of_cases_that_it_gets_right(rewards: Rewards) -> None:
    right = await ran(rewards, "It doubles:\n```python\nprint(int(input()) * 2, '')\n```\nDone.")
    assert (right["outcome"], right["reward"], right["correct"]) == ("scored", 1.0, True)
    half = await ran(rewards, "print(input() and 4)")
    assert (half["outcome"], half["reward"], half["correct"]) == ("scored", 0.5, False)


@pytest.mark.parametrize(
    "program",
    [
        "this is no program",
        "import os; os._exit(0)",
        "import sys; sys.exit('4')",
        "while True: pass",
        "while True: print('4' * 100000)",
        "bytearray(8 << 30); print(int(input()) * 2)",
        "import sys; sys.stdout.buffer.write(bytes([255]))",
        "import socket; socket.create_connection(('1.1.1.1', 53), 1); print(int(input()) * 2)",
    ],
)
async def test_what_ends_otherwise_or_for_ever_is_wrong_and_not_lost(
    rewards: Rewards, program: str
) -> None:
    found = await ran(rewards, program, data={"cpu_seconds": 1})
    assert (found["outcome"], found.get("reward"), found.get("correct")) == ("scored", 0.0, False)


async def test_a_program_does_not_find_what_is_expected_in_its_worker(rewards: Rewards) -> None:
    program = """
    import os
    parent = os.getppid()
    found = []
    for name in ("mem", "environ", "maps", "fd"):
        try:
            path = f"/proc/{parent}/{name}"
            os.listdir(path) if name == "fd" else open(path, "rb").read(1)
            found.append(name)
        except OSError:
            pass
    print(found or int(input()) * 2)
    """
    assert (await ran(rewards, program))["reward"] == 1.0


async def test_a_program_that_kills_its_worker_has_no_reward(rewards: Rewards) -> None:
    found = await ran(rewards, "import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    assert found["outcome"] == "lost"
    assert (await ran(rewards, "print(int(input()) * 2)"))["reward"] == 1.0, "the next one is given"


async def test_what_a_program_leaves_behind_ends_with_its_case(
    rewards: Rewards,
    folder: Path,  # the fixture
) -> None:
    program = f"""
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open({str(folder / "out")!r} + f"/{{os.getpid()}}", "w"):
                pass
            os.close(1)
            time.sleep(600)
        os._exit(0)
    time.sleep(0.5)
    print(int(input()) * 2)
    """
    assert (await ran(rewards, program))["reward"] == 1.0
    left = [int(name) for name in os.listdir(folder / "out")]  # noqa: PTH208  # names alone
    assert len(left) == len(DOUBLES)
    assert not [pid for pid in left if psutil.pid_exists(pid)]


async def test_without_cases_there_is_no_verdict_and_with_wrong_ones_none_either(
    rewards: Rewards,
) -> None:
    assert (await ran(rewards, "print(1)", expected=None))["outcome"] == "masked"
    found = await ran(rewards, "print(2)", expected=[{"input": "1"}])
    assert (found["outcome"], "output" in found["reason"]) == ("lost", True)
