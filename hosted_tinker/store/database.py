"""The SQLite database: connection, pragmas, migrations.

Only metadata is kept here, and only the API process's event loop writes: statements take well
under a millisecond, so they are not moved to a thread.
"""

from __future__ import annotations

import sqlite3
from importlib import resources
from pathlib import Path

from hosted_tinker.errors import SettingsError


def open_database(path: Path) -> sqlite3.Connection:
    """Opens or creates the file and brings its schema up to date.

    Raises:
        SettingsError: the file can't be opened, or a newer release wrote it.
    """
    try:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA busy_timeout = 5000")
        migrate(connection, path)
    except sqlite3.Error as error:
        raise SettingsError(f"database {path} cannot be opened: {error}") from error
    return connection


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Applies the scripts that the file has not seen, each in a transaction of its own."""
    scripts = sorted(
        (
            script
            for script in resources.files("hosted_tinker.store.migrations").iterdir()
            if script.name.endswith(".sql")
        ),
        key=lambda script: script.name,
    )
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(scripts):
        raise SettingsError(
            f"database {path} has schema {version}, which a newer release wrote; this one knows "
            f"schemas up to {len(scripts)}"
        )
    for number, script in enumerate(scripts[version:], start=version + 1):
        connection.executescript(
            f"BEGIN; {script.read_text()} PRAGMA user_version = {number}; COMMIT;"
        )
