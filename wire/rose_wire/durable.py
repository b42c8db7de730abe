"""A SQLite file that outlives ``kill -9``: written ahead, synchronous, checked when opened."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path


def open_database(path: Path, schema: str) -> sqlite3.Connection:
    """The database, checked; its calls may come from one thread at a time, not only this one.

    Args:
        path: made if it is not there.
        schema: statements that do no harm where the tables exist.

    Raises:
        sqlite3.DatabaseError: it is damaged.
    """
    database = sqlite3.connect(path, check_same_thread=False)
    try:
        # Before the first table: later it would take a rewrite of the file.
        database.execute("PRAGMA auto_vacuum = INCREMENTAL")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        _check_whole(database)
        with database:
            database.executescript(schema)
    except sqlite3.DatabaseError:
        with contextlib.suppress(sqlite3.Error):
            database.close()
        raise
    return database


def _check_whole(database: sqlite3.Connection) -> None:
    found = database.execute("PRAGMA quick_check").fetchone()[0]
    if found != "ok":
        raise sqlite3.DatabaseError(found)
