"""``python -m bench.operator.clients`` on a few leases of a real API server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench import record
from bench.operator import clients

pytestmark = pytest.mark.cluster


def test_every_client_that_is_installed_lists_the_leases_and_takes_each_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    assert clients.main(["--objects", "12", "--rounds", "1"]) == 0
    written = (tmp_path / record.FOLDER / "operator-clients.json").read_bytes()
    report = msgspec.json.decode(written, type=record.Report)
    found = {one.name: one.value for one in report.figures}
    for name in ("kubernetes.aio", "kopf"):
        assert found[f"{name}: list_s"] > 0
        assert found[f"{name}: watch_s"] > 0
