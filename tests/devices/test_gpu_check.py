"""``python -m bench.gpu`` on the stand-ins: what it computes, what it writes, what it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.__main__ import main, write
from bench.gpu.checks import spread, step_ms

ROOT = Path(__file__).parents[2]
# Nothing of these is on a machine that has torch and nvidia-ml-py alone.
ABSENT = ("msgspec", "pydantic", "yaml", "aiohttp", "grpc", "psutil", "prometheus_client", "sglang")


def test_steps_are_measured_from_end_to_end_so_that_waiting_counts() -> None:
    steps = [(1_000_000, 900_000), (3_000_000, 900_000), (4_000_000, 900_000)]
    assert step_ms(steps) == {"count": 2, "p50": 1.5, "p99": 2.0, "max": 2.0}
    assert spread([]) == {"count": 0}


def test_a_result_lies_under_its_gpu_and_date(tmp_path: Path) -> None:
    path = write({"date": "2026-01-31", "machine": {"gpu": "NVIDIA H200 (SXM)"}}, tmp_path)
    assert path == tmp_path / "nvidia-h200-sxm" / "2026-01-31.json"
    assert json.loads(path.read_text())["date"] == "2026-01-31"


def test_it_needs_nothing_that_a_bare_gpu_machine_lacks() -> None:
    code = f"import sys; sys.modules |= dict.fromkeys({ABSENT!r}); import bench.gpu.__main__, "
    code += "bench.gpu.worker, rose_agent.devices.fake_mps"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.slow
def test_without_a_gpu_every_check_runs_and_no_figure_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--rehearse", "--results", str(tmp_path), "--seconds", "0.02"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("no GPU here (")
    assert "not_run" not in said
    mps = json.loads(said.partition("\nmps: ")[2].splitlines()[0])
    shares = mps["shares_ms"]
    assert [one["multiprocessors"] for one in shares] == [28, 40, 66]
    assert all(one["listed"] and one["serving_sees"] == 132 for one in shares)
    assert [one["priority"] for one in mps["priority_ms"]] == [0, 1]
    assert [one["how"] for one in mps["kills"]] == ["terminate_client", "kill"]
    assert mps["fault"]["servers"] == ["FAULT"]
    assert mps["fault"]["new_clients_afterwards"]
    pool = json.loads(said.partition("\nelastic: ")[2].splitlines()[0])
    assert (pool["give_back_s"]["count"], pool["left_after_cycles_bytes"]) == (2, 0)
    weights = json.loads(said.partition("\nweights: ")[2].splitlines()[0])["tiny"]
    assert 0 < weights["changes"] <= weights["state_bytes"] / 2 * 0.01
    published = json.loads(said.partition("\npublishing: ")[2].splitlines()[0])["tiny"]
    for keep_on in ("host", "device"):
        assert 0 < published[keep_on]["changes"] <= published[keep_on]["state_bytes"] / 2 * 0.01
        assert 1 < published[keep_on]["bytes_per_change"] < 2
    staged = json.loads(said.partition("\nstaging: ")[2].splitlines()[0])["tiny"]
    assert 0 < staged["changes"] < staged["stream_bytes"]
    pause = json.loads(said.partition("\ncommit_pause: ")[2].splitlines()[0])["tiny"]
    assert pause["changes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_it_is_an_error_that_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--results", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "needs an NVIDIA GPU" in said
    assert "--rehearse" in said
    assert list(tmp_path.iterdir()) == []
