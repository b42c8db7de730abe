"""Same seed, same bytes: every study, short, in two processes whose hashes differ."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rose_simulate.verbs.studies import SCENARIOS, STUDIES

BINS = {"fleet", "fleet-capacity", "fortnight", "shared"}  # ``test_fleet`` repeats those
NAMES = sorted(set(STUDIES) - BINS)


def shortened(path: Path) -> dict[str, Any]:
    """A scenario of seconds with the traces where they are."""
    text = path.read_text().replace("traces/", f"{SCENARIOS}/traces/")
    reported: dict[str, Any] = yaml.safe_load(text)
    delays = {"start_s": 1}
    return reported | {"seeds": [1], "seconds": 12, "warmup_s": 0, "failures": [], "delays": delays}


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenarios")
    for name in sorted({one for study in NAMES for one in STUDIES[study].scenarios}):
        reported = shortened(SCENARIOS / f"{name}.yaml")
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(reported))
    return folder


def made(scenarios: Path, out: Path, hashes: int) -> dict[str, bytes]:
    """Files of the studies, made by a process of its own."""
    folders = ["--scenarios", str(scenarios), "--out", str(out), "--pages", str(out)]
    command = [sys.executable, "-m", "rose_simulate.main", "study", *NAMES, "--derate", "0.5"]
    # Of the three costs of co-running one: they are factors, and add no order that could differ.
    command += ["--slower", "2", "2", *folders]
    environment = os.environ | {"PYTHONHASHSEED": str(hashes)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_equal_seeds_give_equal_bytes_of_every_study(tmp_path: Path, scenarios: Path) -> None:
    one, other = (made(scenarios, tmp_path / str(number), number) for number in (1, 2))
    assert one == other
    assert {f"study-{name}.json" for name in NAMES} < set(one)
    assert {f"{name}.md" for name in NAMES} < set(one)
