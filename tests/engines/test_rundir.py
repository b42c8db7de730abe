"""Paths and files of the run directory."""

from pathlib import Path

import pytest

from rose_engines.node.rundir import EngineFile, RunDir, WeightsFile, read_json, write_json


def test_a_slot_has_its_place_and_only_its_owner_may_look_inside(short_dir: Path) -> None:
    run = RunDir(short_dir).create()
    slot = run.slot("0f1e").create()
    assert slot.uid == "0f1e"
    assert slot.permit == short_dir / "slots" / "0f1e" / "permit"
    assert slot.bundles.is_dir()
    assert slot.folder.stat().st_mode & 0o077 == 0
    assert run.all_slots() == (slot,)
    (run.slots / ".half-made").mkdir()
    assert run.all_slots() == (slot,)


def test_no_run_directory_is_no_slots(tmp_path: Path) -> None:
    assert RunDir(tmp_path / "absent").all_slots() == ()


@pytest.mark.parametrize("uid", ["", "..", "../x", "a/b", ".x", "x" * 200])
def test_uid_cannot_leave_the_folder(tmp_path: Path, uid: str) -> None:
    with pytest.raises(ValueError, match="uid"):
        RunDir(tmp_path).slot(uid)


def test_a_run_directory_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too long"):
        RunDir(tmp_path / ("x" * 90)).create()


def test_a_file_comes_back_as_it_was_written_and_leaves_no_draft(tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    engine = EngineFile("uid", 3, (10, 11), url="http://127.0.0.1:1", port=1, started_ns=5)
    write_json(file, engine)
    assert read_json(file, EngineFile) == engine
    write_json(file, WeightsFile(version="r@1.0", lag=2))
    assert [entry.name for entry in tmp_path.iterdir()] == ["engine.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 5}', b"\xff\xfe"])
def test_a_file_that_cannot_be_read_counts_as_absent(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "weights.json"
    assert read_json(file, WeightsFile) is None
    file.write_bytes(content)
    assert read_json(file, WeightsFile) is None


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    write_json(file, WeightsFile(version="r@1.0"))
    with pytest.raises(TypeError):
        write_json(file, object())
    assert read_json(file, WeightsFile) == WeightsFile(version="r@1.0")
    assert len(list(tmp_path.iterdir())) == 1
