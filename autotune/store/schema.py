"""Open a study database: check that it is one of ours, and bring its schema up to date."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, inspect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from autotune.errors import InputError, PrerequisiteError, StorageError, invalid
from autotune.paths import user_path

VERSION_TABLE = "autotune_schema_version"
BUSY_TIMEOUT_S = 60.0
_OPTUNA_TABLES = frozenset({"studies", "trials", "version_info"})
_PASSWORD = re.compile(r"(://[^:/@\s]*:)[^@/\s]+@")


def storage_url(storage: str) -> str:
    """Turn what the user gave as `--storage`, a path or a database URL, into a URL.

    Raises:
        InputError: it is neither, or a database that is not supported.
    """
    if "://" not in storage:
        if "?" in storage:
            raise invalid("a database's path must not contain '?'", where="--storage", got=storage)
        return f"sqlite:///{user_path(storage, '--storage').absolute()}"
    try:
        url = make_url(storage)
    except (ArgumentError, ValueError) as err:
        raise invalid(
            "must be a path or a database URL", where="--storage", got=without_password(storage)
        ) from err
    if url.get_backend_name() not in {"sqlite", "postgresql"}:
        raise invalid(
            "must be SQLite or PostgreSQL",
            where="--storage",
            got=without_password(storage),
            next_step="Give a path for SQLite, or postgresql://...",
        )
    return storage


def without_password(storage: str) -> str:
    """Hide the password of a database URL; any other text stays as it is."""
    return _PASSWORD.sub(r"\1***@", storage)


def connect_args(url: str) -> dict[str, Any]:
    """Return what the database driver is told: how long to wait for a lock."""
    return {"timeout": BUSY_TIMEOUT_S} if url.startswith("sqlite") else {}


def open_database(storage: str, *, create: bool) -> Engine:
    """Return a connected SQLAlchemy engine whose schema is current.

    Args:
        storage: a path or a database URL.
        create: make the database where there is none; otherwise that is an error.

    Raises:
        InputError: there is no such database, or it is not one of ours.
        PrerequisiteError: the database's driver is not installed.
        StorageError: it cannot be opened, read or written, or is from a newer Autotune.
    """
    url = storage_url(storage)
    _check_file(url, create=create)
    engine = _engine(url, storage)
    try:
        with database_errors(storage):
            with engine.connect() as connection:
                is_current = _check(connection, storage)
            if not is_current:
                _migrate(engine, storage)
    except BaseException:
        engine.dispose()
        raise
    return engine


def _engine(url: str, storage: str) -> Engine:
    try:
        engine = create_engine(url, connect_args=connect_args(url))
    except NoSuchModuleError as err:
        raise invalid(
            "must name a database driver that exists",
            where="--storage",
            got=without_password(storage),
            next_step="For PostgreSQL write postgresql+psycopg://...",
        ) from err
    except ImportError as err:
        raise PrerequisiteError(
            f"--storage: the driver for {without_password(storage)} is not installed ({err}). "
            'For PostgreSQL: pip install "autotune[postgresql]", and write postgresql+psycopg://...'
        ) from err
    if engine.dialect.name == "sqlite":
        _take_over_transactions(engine)
    return engine


def _take_over_transactions(engine: Engine) -> None:
    """Let SQLAlchemy begin SQLite's transactions, so that schema changes are part of them.

    Python's driver begins none before DDL, so a migration that is cut off would leave half of its
    tables (SQLAlchemy's documentation, "Serializable isolation / Savepoints / Transactional DDL").
    """

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _: object) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA foreign_keys=ON")

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        is_writer = connection.get_execution_options().get("is_migration", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writer else "BEGIN")


def _check_file(url: str, *, create: bool) -> None:
    path = make_url(url).database
    if not url.startswith("sqlite") or path in (None, "", ":memory:"):
        return
    file = user_path(str(path), "--storage")
    if file.is_dir():
        raise invalid("must be a file, not a folder", where="--storage", got=str(file))
    if file.exists():
        _check_head(file)
    elif not create:
        raise invalid(
            "no study database is there",
            where=file,
            next_step="Run `autotune search` first, or give its path with --storage.",
        )
    elif not file.parent.is_dir():
        raise invalid("the folder of the database must exist", where=file)


def _check_head(file: Path) -> None:
    try:
        with file.open("rb") as handle:
            head = handle.read(16)
    except OSError as err:
        raise StorageError(f"{file}: cannot be read ({err.strerror}).") from err
    if head and head != b"SQLite format 3\x00":
        raise invalid(
            "is not a SQLite database",
            where=file,
            next_step="Give another path with --storage.",
        )


def _check(connection: Connection, storage: str) -> bool:
    """Whether the schema is current; changes nothing.

    Raises:
        InputError: it is a database of some other program. Optuna would add its tables to anything.
        StorageError: it is from a newer Autotune.
    """
    tables = set(inspect(connection).get_table_names())
    if tables and VERSION_TABLE not in tables and not tables >= _OPTUNA_TABLES:
        raise invalid(
            "is a database, but not one of Autotune's or Optuna's",
            where=without_password(storage),
            got=f"tables {', '.join(sorted(tables)[:5])}",
            next_step="Give another path with --storage.",
        )
    scripts = ScriptDirectory.from_config(_alembic())
    options = {"version_table": VERSION_TABLE}
    current = MigrationContext.configure(connection, opts=options).get_current_revision()
    known = {script.revision for script in scripts.walk_revisions()}
    if current is not None and current not in known:
        raise StorageError(
            f"{without_password(storage)}: was written by a newer Autotune (schema {current}; this "
            f"one knows up to {scripts.get_current_head()}). Update Autotune, or give another path "
            "with --storage."
        )
    return current == scripts.get_current_head()


def _migrate(engine: Engine, storage: str) -> None:
    """Bring the schema up to date in one transaction that no other process can be in as well."""
    writer = engine.execution_options(is_migration=True)
    if engine.dialect.name == "sqlite":
        # Readers (a dashboard) and the one writer then work side by side. It is a property of the
        # file, cannot be set inside a transaction, and is set only once the file is known to be ours.
        _write_ahead(engine, storage)
    with writer.begin() as connection:
        if not _check(connection, storage):  # another process may have been quicker
            config = _alembic()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


def _write_ahead(engine: Engine, storage: str) -> None:
    """Turn write-ahead logging on; SQLite does not wait for a lock here, so this does."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    raw = engine.raw_connection()
    try:
        while True:
            try:
                raw.cursor().execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as err:
                if "locked" not in str(err) or time.monotonic() > deadline:
                    raise _explain_text(str(err), storage) from err
                time.sleep(0.05)
    finally:
        raw.close()


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    return config


@contextmanager
def database_errors(storage: str) -> Iterator[None]:
    """Turn what SQLAlchemy raises into a `StorageError`, or an `InputError` for a file of no use."""
    try:
        yield
    except DBAPIError as err:
        raise explain(err, storage) from err
    except SQLAlchemyError as err:
        raise StorageError(
            f"{without_password(storage)}: the study database cannot be used ({err})."
        ) from err


_HINTS = {
    "readonly": "Make the file and its folder writable, or give another path with --storage.",
    "unable to open": "Check that the folder exists and is writable.",
    "locked": "Another process holds it: wait for it, or stop it.",
    "full": "Free some space: nothing that was already stored is lost.",
    "disk I/O": "Check the disk and its free space: nothing that was already stored is lost.",
}


def explain(err: DBAPIError, storage: str) -> InputError | StorageError:
    """Say in words what a database's error means."""
    return _explain_text(str(err.orig), storage)


def _explain_text(text: str, storage: str) -> InputError | StorageError:
    text, where = without_password(text).strip(), without_password(storage)
    if "not a database" in text or "malformed" in text:
        return invalid(f"is not a usable SQLite database ({text})", where=where)
    hint = next((advice for mark, advice in _HINTS.items() if mark in text), "")
    return StorageError(f"{where}: the study database cannot be used ({text}). {hint}".strip())
