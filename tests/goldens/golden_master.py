"""Records a master: its database's schema, what it answers, and what it starts an allocation with."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path


def schema(scratch: Path) -> dict[str, str]:
    """Record the schema of a fresh database as SQLite has it, and its version."""
    from dstrial.master.store.database import Database

    path = scratch / "dstrial.db"
    Database(path).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        dump = "\n".join(connection.iterdump())
    return {"schema.sql": f"-- schema version {version}\n{dump}\n"}
