"""Inode numbers of files that processes hold open come back; whoever remembers them goes on."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from rose_sandbox.runtimes import open_files
from rose_sandbox.runtimes.open_files import (
    HELD,
    MOST_BURNT,
    OpenFile,
    give_numbers,
    held_by,
    read_held,
    write_held,
)
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_sandbox.runtimes.runtime import CheckpointParts, Kind, SandboxSpec


def test_files_that_a_process_has_open_are_found_by_number(tmp_path: Path) -> None:
    """Of the sandbox's own ones; what has several names is left to the archive."""
    for name in ("open", "shut", "twice"):
        (tmp_path / name).write_text(name)
    (tmp_path / "again").hardlink_to(tmp_path / "twice")
    with (tmp_path / "open").open(), (tmp_path / "twice").open():
        found = held_by([os.getpid(), 1 << 30], Path("/"))
    own = [one for one in found if one.path.startswith(str(tmp_path))]
    assert own == [OpenFile((tmp_path / "open").stat().st_ino, str(tmp_path / "open"))]


def test_the_list_is_the_archives_first_member_and_older_archives_have_none(
    tmp_path: Path,
) -> None:
    held = (OpenFile(7, "/home/a"), OpenFile(9, "/home/b"))
    write_held(tmp_path, held)
    (tmp_path / "upper").mkdir()
    for names, expected in (((HELD, "upper"), held), (("upper",), ())):
        with tarfile.open(tmp_path / "made.tar", "w") as made:
            for name in names:
                made.add(tmp_path / name, name)
        assert read_held(tmp_path / "made.tar") == expected
    (tmp_path / "torn.tar").write_bytes(b"torn")
    assert read_held(tmp_path / "torn.tar") == ()


class Numbers:
    """Inode numbers in order and never again, as a fresh subvolume gives them."""

    def __init__(self, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.next, self.made = first, 0
        self.of: dict[Path, int] = {}
        touch, status = Path.touch, Path.lstat

        def make(path: Path, mode: int = 0o666, exist_ok: bool = True) -> None:
            touch(path, mode, exist_ok)
            self.of[path] = self.next
            self.next, self.made = self.next + 1, self.made + 1

        def look(path: Path) -> object:
            return SimpleNamespace(st_ino=self.of[path]) if path in self.of else status(path)

        monkeypatch.setattr(Path, "touch", make)
        monkeypatch.setattr(Path, "lstat", look)


def archive_of(folder: Path, held: list[OpenFile]) -> Path:
    folder.mkdir()
    write_held(folder, held)
    with tarfile.open(folder / "made.tar", "w") as made:
        made.add(folder / HELD, HELD)
    return folder / "made.tar"


def test_held_files_get_their_numbers_back_and_what_is_too_far_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = OpenFile(300, "/home/near"), OpenFile(300 + MOST_BURNT, "/home/far")
    archive = archive_of(tmp_path / "archive", [OpenFile(9, "/home/gone"), near, far])
    numbers = Numbers(260, monkeypatch)
    give_numbers(tmp_path, archive)
    home = tmp_path / "upper/home"
    assert [one.name for one in home.iterdir()] == ["near"]
    assert numbers.of[home / "near"] == 300
    assert numbers.made == 1 + 40 + 1, "one for each that is not to be had, 39 on the way"


def test_several_held_files_use_up_what_one_could(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "MOST_BURNT", 10)
    wanted = [OpenFile(number, f"/{number}") for number in (8, 14, 40)]
    numbers = Numbers(1, monkeypatch)
    give_numbers(tmp_path, archive_of(tmp_path / "archive", wanted))
    assert sorted(one.name for one in (tmp_path / "upper").iterdir()) == ["8"]
    assert numbers.made == 8 + 1 + 1


@pytest.mark.sandbox
async def test_a_database_that_is_open_over_a_restore_takes_what_is_written(
    runc: RuncRuntime, tmp_path: Path
) -> None:
    """It was another file to SQLite, which then only reads."""
    box = await runc.create(SandboxSpec("box"))
    fill = "for n in $(seq 40); do echo > /home/x$n; done; rm /home/x*; mkfifo /home/sql"
    held = "sleep 9000 > /home/sql & sqlite3 /home/d < /home/sql > /home/said 2>&1 &"
    await runc.exec(box, f"{fill}; sqlite3 /home/d 'create table t(a)'; {held}", 60)

    async def written(count: int) -> str:
        write = "echo 'insert into t values (1);' > /home/sql; "
        has = f"test $(sqlite3 /home/d .dump | grep -c INSERT) = {count}"
        made = await runc.exec(
            box,
            f"{write} for n in $(seq 50); do {has} && break; sleep 0.2; done; "
            "stat -c %i /home/d; cat /home/said; test $n -lt 50",
            60,
        )
        assert made.exit_code == 0, made
        return made.stdout.decode()

    before = await written(1)
    parts = await runc.checkpoint(box, Kind.FULL, tmp_path)
    await runc.end(box)
    box = await runc.restore(parts, parts.spec)
    assert await written(2) == before


@pytest.mark.sandbox
async def test_a_file_that_is_opened_after_the_files_were_saved_gets_its_number_back(
    runc: RuncRuntime, tmp_path: Path
) -> None:
    """Whoever opens a file changes none, so processes are saved by themselves."""
    box = await runc.create(SandboxSpec("box"))
    fill = "for n in $(seq 40); do echo > /home/x$n; done"
    await runc.exec(box, f"{fill}; echo 1 > /home/d; rm /home/x*; stat -c %i /home/d", 60)
    (before := tmp_path / "before").mkdir()
    (after := tmp_path / "after").mkdir()
    files = (await runc.checkpoint(box, Kind.FILES, before)).files
    asked = "stat -L -c %i /home/d /proc/$(pgrep -fx 'sleep 9000')/fd/7"
    begun = "until pgrep -fx 'sleep 9000' > /dev/null; do sleep 0.05; done"
    made = await runc.exec(box, f"sleep 9000 7< /home/d & {begun}; {asked}", 60)
    parts = await runc.checkpoint(box, Kind.PROCESSES, after)
    await runc.end(box)
    box = await runc.restore(CheckpointParts(parts.spec, files, parts.processes), parts.spec)
    again = await runc.exec(box, asked, 60)
    assert (again.exit_code, again.stdout) == (0, made.stdout)
    assert len(set(made.stdout.split())) == 1
