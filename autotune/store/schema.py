"""Open a study database: check that it is one of ours, and bring its schema up to date."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, inspect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, OperationalError

from autotune.errors import InputError, StorageError, invalid

VERSION_TABLE = "autotune_schema_version"
BUSY_TIMEOUT_S = 60.0
_OPTUNA_MARK = "studies"
DEFAULT_STORAGE = "autotune.db"


def storage_url(storage: str) -> str:
    """Turn what the user gave as `--storage`, a path or a database URL, into a URL.

    Raises:
        InputError: it is neither, or a database that is not supported.
    """
    if "://" not in storage:
        return f"sqlite:///{Path(storage).expanduser().absolute()}"
    try:
        url = make_url(storage)
    except ArgumentError as err:
        raise invalid("must be a path or a database URL", where="--storage", got=storage) from err
    if url.get_backend_name() not in {"sqlite", "postgresql"}:
        raise invalid(
            "must be SQLite or PostgreSQL",
            where="--storage",
            got=url.render_as_string(hide_password=True),
            next_step="Give a path for SQLite, or postgresql://...",
        )
    return storage


def open_database(storage: str, *, create: bool) -> Engine:
    """Return a connected SQLAlchemy engine whose schema is current.

    Args:
        storage: a path or a database URL.
        create: make the database where there is none; otherwise that is an error.

    Raises:
        InputError: there is no such database, or it is not one of ours.
        StorageError: it cannot be opened, read or written, or is from a newer Autotune.
    """
    url = storage_url(storage)
    _check_file(url, create=create)
    engine = create_engine(url, connect_args=_connect_args(url))
    _set_pragmas(engine)
    try:
        with engine.begin() as connection:
            _check_is_ours(connection, storage)
            _migrate(connection, storage)
    except (OperationalError, DatabaseError) as err:
        engine.dispose()
        raise _explain(err, storage) from err
    except BaseException:
        engine.dispose()
        raise
    return engine


def _connect_args(url: str) -> dict[str, float]:
    return {"timeout": BUSY_TIMEOUT_S} if url.startswith("sqlite") else {}


def _set_pragmas(engine: Engine) -> None:
    """Let readers (a dashboard) and the one writer work side by side, and survive a kill."""
    if engine.dialect.name != "sqlite":
        return

    @event.listens_for(engine, "connect")
    def _on_connect(connection: object, _: object) -> None:
        cursor = connection.cursor()  # type: ignore[attr-defined]  # a DB-API connection
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()


def _check_file(url: str, *, create: bool) -> None:
    path = make_url(url).database
    if not url.startswith("sqlite") or path in (None, "", ":memory:"):
        return
    file = Path(str(path))
    if file.is_dir():
        raise invalid("must be a file, not a folder", where="--storage", got=str(file))
    if file.exists():
        with file.open("rb") as handle:
            head = handle.read(16)
        if head and head != b"SQLite format 3\x00":
            raise invalid(
                "is not a SQLite database",
                where=file,
                next_step="Give another path with --storage.",
            )
    elif not create:
        raise invalid(
            "no study database is there",
            where=file,
            next_step="Run `autotune search` first, or give its path with --storage.",
        )
    elif not file.parent.is_dir():
        raise invalid("the folder of the database must exist", where=file)


def _check_is_ours(connection: Connection, storage: str) -> None:
    """Refuse a database of some other program: Optuna would add its tables to anything."""
    tables = set(inspect(connection).get_table_names())
    if tables and VERSION_TABLE not in tables and _OPTUNA_MARK not in tables:
        raise invalid(
            "is a database, but not one of Autotune's or Optuna's",
            where=storage,
            got=f"tables {', '.join(sorted(tables)[:5])}",
            next_step="Give another path with --storage.",
        )


def _migrate(connection: Connection, storage: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    scripts = ScriptDirectory.from_config(config)
    options = {"version_table": VERSION_TABLE}
    current = MigrationContext.configure(connection, opts=options).get_current_revision()
    known = {script.revision for script in scripts.walk_revisions()}
    if current is not None and current not in known:
        raise StorageError(
            f"{storage}: was written by a newer Autotune (schema {current}; this one knows up to "
            f"{scripts.get_current_head()}). Update Autotune, or give another path with --storage."
        )
    if current != scripts.get_current_head():
        command.upgrade(config, "head")


def _explain(err: DatabaseError, storage: str) -> InputError | StorageError:
    text = str(err.orig)
    if "not a database" in text or "malformed" in text:
        return invalid(f"is not a usable SQLite database ({text})", where=storage)
    hints = {
        "readonly": "Make the file and its folder writable, or give another path with --storage.",
        "unable to open": "Check that the folder exists and is writable.",
        "locked": "Another process holds it: wait for it, or stop it.",
        "full": "Free some space: nothing that was already stored is lost.",
    }
    hint = next((advice for mark, advice in hints.items() if mark in text), "")
    return StorageError(f"{storage}: the study database cannot be used ({text}). {hint}".strip())
