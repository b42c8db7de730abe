"""Inode numbers of files that processes hold open come back; whoever remembers them goes on."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from rose_sandbox.runtimes.held import HELD, OpenFile, held_by, read_held, write_held
from rose_sandbox.runtimes.runc import RuncRuntime
from rose_sandbox.runtimes.runtime import Kind, SandboxSpec


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
