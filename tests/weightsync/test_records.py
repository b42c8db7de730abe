"""The record of commits: bounded, readable after a torn line, and shown to people."""

from pathlib import Path

import msgspec
import pytest

from rose_agent.weightsync.records import FILE, CommitRecord, append, main, read

RECORD = CommitRecord(
    at=1.0,
    version="run@1.3",
    base="run@1.1",
    elements=1000,
    changed=12,
    block_bytes=40,
    pull_seconds=0.5,
    stage_seconds=0.25,
    pause_seconds=0.002,
    confirm_seconds=0.1,
    fenced_requests=3,
    merged=2,
    lag=0,
    failures=("Corrupt", "Busy"),
    encode_seconds=1.75,
)


def test_only_the_newest_lines_are_kept(tmp_path: Path) -> None:
    path = tmp_path / FILE
    for number in range(5):
        append(path, msgspec.structs.replace(RECORD, version=f"run@1.{number}"), kept=3)
    assert [one.version for one in read(path)] == ["run@1.2", "run@1.3", "run@1.4"]
    assert [child.name for child in tmp_path.iterdir()] == [FILE]


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / FILE
    append(path, RECORD)
    path.write_bytes(path.read_bytes() + b'{"at": 1')
    append(path, RECORD)
    assert read(path) == [RECORD, RECORD]
    assert read(tmp_path / "missing") == []


def test_a_full_folder_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / FILE
    append(path, RECORD)

    def full(*_: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        append(path, RECORD)
    assert [child.name for child in tmp_path.iterdir()] == [FILE]


def test_commits_are_shown_to_people_and_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slot = tmp_path / "slots" / "slot-1"
    slot.mkdir(parents=True)
    assert main(["--rundir", str(tmp_path)]) == 1
    append(slot / FILE, RECORD)
    assert main(["--rundir", str(tmp_path), "--slot", "slot-1"]) == 0
    line = capsys.readouterr().out
    for part in ("slot-1", "run@1.3", "1.200%", "encode 1.75 s", "pause 2.0 ms"):
        assert part in line
    assert "2 publishes merged  after Corrupt, Busy" in line
    assert main(["--rundir", str(tmp_path), "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=CommitRecord) == RECORD
    assert main(["--rundir", str(tmp_path), "--slot", "other"]) == 1
