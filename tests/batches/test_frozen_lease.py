"""A batch file on a lease of frozen weights, all of its pieces real, its engine killed once.

Serving under bursts is beside it. What serving pays is ``make bench-batches``'s to say; here the
same command runs short, and what it says of the lines counts.
"""

from __future__ import annotations

import os
import sys
from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import msgspec
import pytest

from bench.record import Report
from rose_dev.engine_environment import is_ready

pytestmark = [pytest.mark.asyncio, pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

CHECKOUT = Path(__file__).parents[2]


async def test_each_line_has_one_answer_beside_a_serving_engine(tmp_path: Path) -> None:
    if not is_ready():
        pytest.fail("no engine environment; run `make engine`")
    short = ("--rounds", "1", "--seconds", "2", "--lines", "300")
    process = await create_subprocess_exec(
        *(sys.executable, "-m", "bench.batches", *short),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        stdout=PIPE,
        stderr=STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    report = msgspec.json.decode((tmp_path / "out/bench/batches.json").read_bytes(), type=Report)
    found = {one.name: one.value for one in report.figures}
    assert found["lines: asked"] == 300
    wrong = ("lines: lost", "lines: doubled", "lines: of another length")
    assert [found[one] for one in wrong] == [0, 0, 0]
    assert found["lines: lent engine killed"] == 1
    assert found["serving: failed requests"] == 0
