"""Keeps results over the gateway's own death, so that a trajectory has one result.

SQLite, written ahead and synchronous. A result is on the disk before anybody is told it. Each has a
checksum: a torn one is as if it had never been, and is computed when it is asked for again. At most
``most`` are kept, the newest. Next step: ``gateway`` begins with them.
"""

from __future__ import annotations

import fcntl
import logging
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rose_core.rewards.results import Masked, Scored
from rose_rewards.errors import TornJournal
from rose_wire.durable import open_database

LOG = logging.getLogger(__name__)
_SCHEMA = """
CREATE TABLE IF NOT EXISTS results (
  number INTEGER PRIMARY KEY, team TEXT, trajectory TEXT, digest BLOB, said BLOB, checksum INTEGER,
  UNIQUE (team, trajectory)
)
"""


@dataclass(frozen=True)
class KnownResult:
    """A result that is the same for good.

    Attributes:
        key: team and trajectory.
        digest: of what was asked.
    """

    key: tuple[str, str]
    digest: bytes
    result: Scored | Masked


class ResultJournal:
    """The results of one gateway.

    Args:
        folder: made if it is not there; one process has it at a time.
        most: results that are kept.

    Raises:
        TornJournal: it cannot be trusted as it is, or another process has it.
        OSError: the folder cannot be used.
    """

    def __init__(self, folder: Path, most: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # results of all teams
        self._most = most
        self._lock = (folder / "lock").open("w")
        path = folder / "results.db"
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._db = open_database(path, _SCHEMA)
        except BlockingIOError as error:
            self._lock.close()
            message = f"--folder {folder} is in use by another rose rewards; give each its own"
            raise TornJournal(message) from error
        except sqlite3.DatabaseError as error:
            self._lock.close()
            message = (
                f"{path}: {error}; no result of it can be trusted. Remove it, and trajectories "
                "that are asked for again are computed again"
            )
            raise TornJournal(message) from error

    def results(self) -> Iterator[KnownResult]:
        """Every result, the oldest first."""
        rows = self._db.execute(
            "SELECT team, trajectory, digest, said, checksum FROM results ORDER BY number"
        )
        for team, trajectory, digest, encoded, checksum in rows:
            if _sum(team, trajectory, digest, encoded) != checksum:
                LOG.warning("the result of %s is torn; it is computed anew", trajectory)
                continue
            result = msgspec.json.decode(encoded, type=Scored | Masked)
            yield KnownResult((team, trajectory), digest, result)

    def record(self, results: Iterable[KnownResult]) -> None:
        """Write results down for good, all in one transaction; the oldest beyond ``most`` go.

        Raises:
            sqlite3.Error: the disk is full, or fails.
        """
        rows = []
        for one in results:
            encoded = msgspec.json.encode(one.result)
            rows.append((*one.key, one.digest, encoded, _sum(*one.key, one.digest, encoded)))
        with self._db:
            self._db.executemany(
                "INSERT OR REPLACE INTO results (team, trajectory, digest, said, checksum) "
                "VALUES (?, ?, ?, ?, ?)",
                rows,
            )
            self._db.execute(
                "DELETE FROM results WHERE number <= (SELECT max(number) FROM results) - ?",
                (self._most,),
            )

    def close(self) -> None:
        """Let another process have it."""
        self._db.close()
        self._lock.close()


def _sum(team: str, trajectory: str, digest: bytes, encoded: bytes) -> int:
    return zlib.crc32(msgspec.msgpack.encode((team, trajectory, digest, encoded)))
