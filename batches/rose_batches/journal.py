"""Keeps files and batches so that each line has one answer, whatever is killed when.

A folder holds ``batches.db`` (SQLite, written ahead, synchronous) and ``files/ID``. A line's answer
and its batch's counts are one transaction, and only a line that waits takes an answer: a second one
changes nothing.

| killed | what a start finds |
|---|---|
| while a file is written | a file without a row: removed |
| before an answer is committed | a line that waits: asked again |
| while output files are written | files without a row, and a batch that is finalizing: done anew |

Every answer has a checksum of its own, every file one of all its bytes. A torn answer waits again;
a torn input file fails its batch; a torn database stops the process. All calls block: ``Journal``
runs them on a thread of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sqlite3
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from rose_batches.errors import BadBatch, Damaged
from rose_batches.objects import LIVE, StoredBatch, StoredFile, output_line
from rose_core.batches.lines import LineSpan
from rose_wire.durable import open_database

_WAITS, _ANSWERED, _FAILED = 0, 1, 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (id TEXT PRIMARY KEY, tenant TEXT, created INTEGER, said BLOB);
CREATE TABLE IF NOT EXISTS batches (
  id TEXT PRIMARY KEY, tenant TEXT, created INTEGER, said BLOB, live INTEGER
);
CREATE INDEX IF NOT EXISTS live_batches ON batches (id) WHERE live;
CREATE TABLE IF NOT EXISTS lines (
  batch TEXT, number INTEGER, custom_id TEXT, offset INTEGER, length INTEGER,
  state INTEGER NOT NULL DEFAULT 0, said BLOB, checksum INTEGER, PRIMARY KEY (batch, number)
) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Answer:
    """What a line's output says.

    Attributes:
        line: the line of the output file, with its end.
        failed: it belongs into the error file.
    """

    batch: str
    number: int
    line: bytes
    failed: bool


class Journal:
    """Files, batches and lines of one folder; one process has it at a time.

    Args:
        folder: made if it is not there.

    Raises:
        Damaged: the database is torn, or another process has the folder.
        OSError: the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._files = folder / "files"
        self._files.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            message = f"{folder} is in use by another rose batches; give each lease its own"
            raise Damaged(message) from error
        path = folder / "batches.db"
        try:
            self._db = open_database(path, _SCHEMA)
        except sqlite3.DatabaseError as error:
            self._lock.close()
            message = (
                f"{path}: {error}; no answer of it can be trusted. Move the folder away, start "
                "anew and send the batches again"
            )
            raise Damaged(message) from error
        self.used: Counter[str] = Counter()
        """Bytes by tenant, answers included."""
        self._sweep()

    def close(self) -> None:
        """Let another process have the folder."""
        self._db.close()
        self._lock.close()

    # Files ------------------------------------------------------------------------------------

    def path(self, file: str) -> Path:
        """Where a file's bytes are."""
        return self._files / file

    def begin(self) -> IO[bytes]:
        """A file to be written, without a row; ``add`` makes it one of a tenant's."""
        return (self._files / f"new-{os.urandom(8).hex()}").open("xb")

    def add(self, file: StoredFile, written: Path) -> None:
        """Keep a file whose bytes are written and on the disk."""
        written.rename(self.path(file.id))
        _sync_folder(self._files)
        with self._db:
            self._insert(file)
        self.used[file.tenant] += file.bytes

    def _insert(self, file: StoredFile) -> None:
        row = (file.id, file.tenant, file.created, msgspec.json.encode(file))
        self._db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", row)

    def file(self, name: str, tenant: str) -> StoredFile:
        """A tenant's file.

        Raises:
            BadBatch: it has none of that id.
        """
        row = self._db.execute(
            "SELECT said FROM files WHERE id = ? AND tenant = ?", (name, tenant)
        ).fetchone()
        if row is None:
            message = f"you have no file {name!r:.100}; GET /v1/files lists yours"
            raise BadBatch(message, "no_such_file", status=404, param="file_id")
        return msgspec.json.decode(row[0], type=StoredFile)

    def files(self, tenant: str) -> list[StoredFile]:
        """A tenant's files, the newest first."""
        rows = self._db.execute(
            "SELECT said FROM files WHERE tenant = ? ORDER BY created DESC, rowid DESC", (tenant,)
        )
        return [msgspec.json.decode(row[0], type=StoredFile) for row in rows]

    def remove(self, file: StoredFile) -> None:
        """Forget a file.

        Raises:
            BadBatch: a batch that has not ended reads it.
        """
        readers = [one.id for one in self.live() if one.input_file == file.id]
        if readers:
            message = f"batch {readers[0]} still reads {file.id}; cancel it, or wait for its end"
            raise BadBatch(message, "file_in_use", param="file_id")
        with self._db:
            self._db.execute("DELETE FROM files WHERE id = ?", (file.id,))
        self.path(file.id).unlink(missing_ok=True)
        self.used[file.tenant] -= file.bytes

    def expire(self, now: float, keep_seconds: int) -> int:
        """Forget files and ended batches that were kept for long enough; says how many.

        A file has its own moment, a batch is kept for ``keep_seconds`` after its end.
        """
        live = {one.input_file for one in self.live()}
        rows = self._db.execute("SELECT said FROM files").fetchall()
        old = [
            file
            for row in rows
            if (file := msgspec.json.decode(row[0], type=StoredFile)).expires <= now
            and file.id not in live
        ]
        for file in old:
            self.remove(file)
        last = now - keep_seconds
        batches = self._db.execute(
            "SELECT said FROM batches WHERE NOT live AND created <= ?", (last,)
        )
        decoded = (msgspec.json.decode(row[0], type=StoredBatch) for row in batches)
        ended = [one.id for one in decoded if max(one.moments.values(), default=0) <= last]
        with self._db:
            self._db.executemany("DELETE FROM batches WHERE id = ?", [(one,) for one in ended])
        return len(old) + len(ended)

    def is_whole(self, file: StoredFile) -> bool:
        """Whether the file's bytes are those that came."""
        try:
            with self.path(file.id).open("rb") as opened:
                return hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256
        except OSError:
            return False

    # Batches ----------------------------------------------------------------------------------

    def batch(self, name: str, tenant: str) -> StoredBatch:
        """A tenant's batch.

        Raises:
            BadBatch: it has none of that id.
        """
        row = self._db.execute(
            "SELECT said FROM batches WHERE id = ? AND tenant = ?", (name, tenant)
        ).fetchone()
        if row is None:
            message = f"you have no batch {name!r:.100}; GET /v1/batches lists yours"
            raise BadBatch(message, "no_such_batch", status=404, param="batch_id")
        return msgspec.json.decode(row[0], type=StoredBatch)

    def batches(self, tenant: str) -> list[StoredBatch]:
        """A tenant's batches, the newest first."""
        rows = self._db.execute(
            "SELECT said FROM batches WHERE tenant = ? ORDER BY created DESC, rowid DESC", (tenant,)
        )
        return [msgspec.json.decode(row[0], type=StoredBatch) for row in rows]

    def live(self) -> list[StoredBatch]:
        """Batches that have not ended, everybody's."""
        rows = self._db.execute("SELECT said FROM batches WHERE live").fetchall()
        return [msgspec.json.decode(row[0], type=StoredBatch) for row in rows]

    def save(self, batch: StoredBatch) -> None:
        """Write a batch down, new or changed."""
        with self._db:
            self._save(batch)

    def _save(self, batch: StoredBatch) -> None:
        self._db.execute(
            "INSERT INTO batches VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET said = excluded.said, live = excluded.live",
            (
                *(batch.id, batch.tenant, batch.created, msgspec.json.encode(batch)),
                batch.status in LIVE,
            ),
        )

    def forget(self, tenant: str, most: int) -> None:
        """Forget a tenant's oldest batches that have ended, so that it has at most so many."""
        ended = [one for one in self.batches(tenant)[most:] if one.status not in LIVE]
        with self._db:
            self._db.executemany("DELETE FROM batches WHERE id = ?", [(one.id,) for one in ended])

    def start(self, batch: StoredBatch, places: Iterable[LineSpan]) -> None:
        """A batch's lines are known and wait."""
        with self._db:
            self._db.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))
            self._db.executemany(
                "INSERT INTO lines (batch, number, custom_id, offset, length) "
                "VALUES (?, ?, ?, ?, ?)",
                ((batch.id, p.number, p.custom_id, p.offset, p.length) for p in places),
            )
            self._save(batch)

    def waiting(self, batch: str) -> list[int]:
        """Numbers of the batch's lines that have no answer, in the file's order."""
        rows = self._db.execute(
            "SELECT number FROM lines WHERE batch = ? AND state = ? ORDER BY number",
            (batch, _WAITS),
        )
        return [row[0] for row in rows]

    def line(self, batch: StoredBatch, number: int) -> bytes:
        """A line's text.

        Raises:
            OSError: the file is gone, or shorter than it was.
        """
        offset, length = self._db.execute(
            "SELECT offset, length FROM lines WHERE batch = ? AND number = ?", (batch.id, number)
        ).fetchone()
        with self.path(batch.input_file).open("rb") as file:
            found = os.pread(file.fileno(), length, offset)
        if len(found) != length:
            message = f"{batch.input_file}: line {number} ends too early"
            raise OSError(message)
        return found

    def record(self, answers: Iterable[Answer]) -> dict[str, StoredBatch]:
        """Write answers down for good, all in one transaction; the batches that they changed.

        A line that has an answer keeps it.
        """
        changed: dict[str, StoredBatch] = {}
        with self._db:
            for one in answers:
                state = _FAILED if one.failed else _ANSWERED
                taken = self._db.execute(
                    "UPDATE lines SET state = ?, said = ?, checksum = ? "
                    "WHERE batch = ? AND number = ? AND state = ?",
                    (state, one.line, zlib.crc32(one.line), one.batch, one.number, _WAITS),
                ).rowcount
                if not taken:
                    continue
                batch = changed.get(one.batch) or self._batch(one.batch)
                self.used[batch.tenant] += len(one.line)
                changed[one.batch] = msgspec.structs.replace(
                    batch,
                    answered=batch.answered + (not one.failed),
                    failed=batch.failed + one.failed,
                )
            for batch in changed.values():
                self._save(batch)
        return changed

    def _batch(self, name: str) -> StoredBatch:
        row = self._db.execute("SELECT said FROM batches WHERE id = ?", (name,)).fetchone()
        return msgspec.json.decode(row[0], type=StoredBatch)

    def reopen_torn(self, batch: str) -> list[int]:
        """Let lines wait again whose answer is not what was written; their numbers."""
        rows = self._db.execute(
            "SELECT number, said, checksum, state FROM lines WHERE batch = ? AND state != ?",
            (batch, _WAITS),
        )
        torn = [(row[0], row[3]) for row in rows if zlib.crc32(row[1] or b"") != row[2]]
        if torn:
            failed = sum(state == _FAILED for _, state in torn)
            now = self._batch(batch)
            with self._db:
                self._db.executemany(
                    "UPDATE lines SET state = ?, said = NULL WHERE batch = ? AND number = ?",
                    [(_WAITS, batch, number) for number, _ in torn],
                )
                self._save(
                    msgspec.structs.replace(
                        now,
                        failed=now.failed - failed,
                        answered=now.answered - (len(torn) - failed),
                    )
                )
        return [number for number, _ in torn]

    def move(
        self, name: str, status: str, now: float, *, only: Container[str] = LIVE
    ) -> StoredBatch:
        """Bring a batch to another status; one that has none of ``only`` (any more) stays as it is.

        Its counts stay those that are written down.
        """
        found = self._batch(name)
        if found.status not in only:
            return found
        moved = found.with_status(status, now)
        self.save(moved)
        return moved

    def finish(self, name: str, status: str, now: int, keep_seconds: int) -> int | None:
        """End a batch: its answers become files, its lines are forgotten.

        What it counts is what was written down until now, whatever the caller knew of it. A batch
        that has ended stays as it is.

        Args:
            name: of the batch.
            status: that it ends with.
            now: Unix seconds.
            keep_seconds: how long its files are kept.

        Returns:
            Lines without an answer; None = it had ended.
        """
        found = self._batch(name)
        if found.status not in LIVE:
            return None
        batch = found.with_status(status, now)
        waiting = len(self.waiting(batch.id))
        held = self._held(batch.id)
        made, files = batch, []
        for kind, state in (("output_file", _ANSWERED), ("error_file", _FAILED)):
            written = self._write(batch, state)
            if written is None:
                continue
            path, digest, size = written
            file = StoredFile(
                id=f"file-{batch.id.removeprefix('batch_')}-{kind[:-5]}",
                tenant=batch.tenant,
                filename=f"{batch.id}_{kind[:-5]}.jsonl",
                purpose="batch_output",
                bytes=size,
                created=now,
                expires=now + keep_seconds,
                sha256=digest,
            )
            path.rename(self.path(file.id))
            made = msgspec.structs.replace(made, **{kind: file.id})
            files.append(file)
        _sync_folder(self._files)
        made = msgspec.structs.replace(made, failed=made.failed + waiting)
        with self._db:
            for file in files:
                self._insert(file)
            self._save(made)
            self._db.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))
        self._db.execute("PRAGMA incremental_vacuum")
        self.used[batch.tenant] += sum(file.bytes for file in files) - held
        return waiting

    def _held(self, batch: str) -> int:
        row = self._db.execute(
            "SELECT sum(length(said)) FROM lines WHERE batch = ?", (batch,)
        ).fetchone()
        return row[0] or 0

    def _write(self, batch: StoredBatch, state: int) -> tuple[Path, str, int] | None:
        """One file of a batch that ends, in the order of its lines; None without a line."""
        digest, size = hashlib.sha256(), 0
        with self.begin() as file:
            for line in self._lines(batch, state):
                file.write(line)
                digest.update(line)
                size += len(line)
            file.flush()
            os.fsync(file.fileno())
        if not size:
            Path(file.name).unlink()
            return None
        return Path(file.name), digest.hexdigest(), size

    def _lines(self, batch: StoredBatch, state: int) -> Iterator[bytes]:
        states = (_FAILED, _WAITS) if state == _FAILED else (state, state)
        code = f"batch_{batch.status}"
        text = f"the batch was {batch.status} before this line had an answer"
        # Row by row: an answer may be as long as a line may be, and a batch has many.
        rows = self._db.execute(
            "SELECT number, said, state, custom_id FROM lines "
            "WHERE batch = ? AND state IN (?, ?) ORDER BY number",
            (batch.id, *states),
        )
        for number, line, found, custom_id in rows:
            if found == _WAITS:
                yield output_line(f"{batch.id}-{number}", custom_id, error=(code, text))
            else:
                yield line

    def _sweep(self) -> None:
        """Remove what a kill left, and count what is there."""
        rows = self._db.execute("SELECT said FROM files").fetchall()
        files = [msgspec.json.decode(row[0], type=StoredFile) for row in rows]
        known = {file.id for file in files}
        for path in self._files.iterdir():
            if path.name not in known:
                path.unlink()
        for file in files:
            self.used[file.tenant] += file.bytes
        live = {one.id: one.tenant for one in self.live()}
        for batch, tenant in live.items():
            self.used[tenant] += self._held(batch)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
