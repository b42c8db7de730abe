"""Programs that replace what a data set's asserts compare with, in real sandboxes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from rose_core.rewards.cases import read_cases
from rose_rewards import programs
from tests.rewards.program_hosts import real_host
from tests.rewards.test_asserts import FORGED

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(300)]

RIGHT = """
class Solution:
  def f(self, x): return f(x)
def f(x): return {3: 15.588457268119894, 2: (4, 1)}.get(x)
"""
LINES = [
    "assert math.isclose(f(3), 15.588457268119894, rel_tol=0.001)",
    "assert abs(f(3) - 15.5) < 0.1",
    "assert f(2) == (4, 1)",
    "assert f(2)[0] == 4",
    "assert sorted(f(2)) == [1, 4]",
    "assert set(f(2)) == set((1, 4))",
    "assert Solution().f(2) == (4, 1)",
    "assert f(1) is None",
    "assert not f(1)",
]


async def test_each_form_is_earned_by_its_answer_and_by_nothing_else(tmp_path: Path) -> None:
    """The last one is a question: ``f`` says yes to all, and the answer is no."""
    async with real_host(tmp_path) as host, aiohttp.ClientSession() as http:
        function = host.function(caseSeconds=20, partial=True)
        now = asyncio.get_running_loop().time
        forged = FORGED + "class Solution:\n  f = f\n"
        found = await programs.verdict(function, http, RIGHT, read_cases(LINES), now)
        assert found.correct, found
        found = await programs.verdict(function, http, forged, read_cases(LINES), now)
        assert found.reward == 0, found
        assert host.host.sessions() == ()
