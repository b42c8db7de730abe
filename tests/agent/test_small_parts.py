"""Parts of the guard that need no process: accounting, saved state, verbs that look in."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose_agent.guard import loop
from rose_agent.guard.main import main
from rose_agent.guard.slots.slot import Totals
from rose_core.devices.memory import MemorySum
from rose_core.guard.ladder import Rung
from rose_core.identity import SlotKey, SlotUid
from rose_core.wire.host import EngineState, EngineStatus
from rose_core.wire.sync import PoolPolicy

S = 1_000_000_000


def status(tokens: int) -> EngineStatus:
    return EngineStatus(SlotKey(SlotUid("s"), 1), EngineState.SERVING, generated_tokens=tokens)


def test_time_and_tokens_add_up_over_engine_restarts() -> None:
    totals = Totals(last_ns=0)
    totals.account(S, granted=True, until_ns=0, status=None)
    totals.account(3 * S, granted=True, until_ns=3 * S, status=status(100))
    totals.account(4 * S, granted=False, until_ns=0, status=status(150))
    totals.account(5 * S, granted=True, until_ns=5 * S, status=status(20))
    assert (totals.lent_ns, totals.open_ns, totals.tokens) == (4 * S, 3 * S, 170)
    totals.account(2 * S, granted=True, until_ns=2 * S, status=None)
    assert totals.lent_ns == 4 * S, "time never runs backwards"
    for rung in (Rung.STOP, Rung.STOP, Rung.TERMINATE):
        totals.count_reclaim(rung)
    assert totals.reclaims == {"Stop": 2, "Terminate": 1}


def test_memory_kept_back_counts_by_its_share_while_a_slot_is_granted() -> None:
    totals = Totals(last_ns=0)
    card = MemorySum(total=80, serving=50, headroom=10, settled=3, dormant=4)
    assert card.kept_back == 20, "16 may be lent, and 4 are lent already"
    totals.account(4 * S, granted=True, until_ns=0, status=None, gpus=2, reserve=card)
    assert totals.reserved_ns == 2 * S, "a quarter of the memory of two GPUs for four seconds"
    totals.account(5 * S, granted=False, until_ns=0, status=None, reserve=card)
    totals.account(6 * S, granted=True, until_ns=0, status=None)
    assert totals.reserved_ns == 2 * S, "without a grant or without a reserve none is"
    full = MemorySum(total=80, serving=79, headroom=10, settled=3, dormant=4)
    assert full.kept_back == 1, "not more than serving leaves"


REMEMBERED = loop.GuardFile(7, (PoolPolicy("a/b", "Lend", {"x": "y"}, 1),))


def test_a_restarted_guard_knows_its_term_and_its_pools(tmp_path: Path) -> None:
    path = tmp_path / "guard.json"
    assert loop.save_guard_file(path, REMEMBERED) == ""
    assert loop.load_guard_file(path) == REMEMBERED


@pytest.mark.parametrize("content", [None, "{"])
def test_a_missing_or_damaged_memory_is_an_empty_one(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "guard.json"
    if content is not None:
        path.write_text(content)
    assert loop.load_guard_file(path) == loop.GuardFile()


def test_a_memory_that_cannot_be_written_says_where_and_why(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "guard.json"
    assert str(path) in loop.save_guard_file(path, REMEMBERED)


def test_stop_presses_the_nodes_button_and_resume_releases_it_again_and_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stop", "--rundir", str(tmp_path)]) == 0
    assert "rose agent resume" in capsys.readouterr().out
    assert (tmp_path / "stop").exists()
    assert main(["resume", "--rundir", str(tmp_path)]) == 0
    assert main(["resume", "--rundir", str(tmp_path)]) == 0
    assert not (tmp_path / "stop").exists()


def test_a_list_without_a_dump_is_no_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "--rundir", str(tmp_path), "--list"]) == 0
    assert "no breach has left one" in capsys.readouterr().err


def test_a_trace_without_a_guard_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "--rundir", str(tmp_path)]) == 1
    assert "no guard answers" in capsys.readouterr().err


def test_a_report_without_a_guard_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--rundir", str(tmp_path)]) == 1
    assert f"no guard runs in {tmp_path}" in capsys.readouterr().err


def test_missing_files_are_named(short_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    replicas = short_dir / "replicas.yaml"
    flags = ["--node", "n", "--rundir", str(short_dir / "run"), "--devices", "static"]
    assert main([*flags, "--static-replicas", str(replicas)]) == 1
    assert "replicas.yaml" in caplog.text


def test_a_run_directory_that_is_too_long_is_refused(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags = ["--node", "n", "--rundir", str(short_dir / ("x" * 80)), "--devices", "static"]
    assert main(flags) == 1
    assert "--rundir" in caplog.text
