"""The database's schema: made, kept up to date, and refused where it is not ours."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import signal
import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from autotune.errors import InputError, StorageError
from autotune.report.study import load_study
from autotune.serving.failures import FailureKind
from autotune.store import schema
from autotune.store.models import Base
from autotune.store.records import LaunchState, Phase
from autotune.store.repository import Store
from autotune.store.schema import VERSION_TABLE, open_database, storage_url

FORK = multiprocessing.get_context("fork")
DATA = Path(__file__).parents[2] / "data"
MIGRATIONS = Path(schema.__file__).parent / "migrations"
OUR_TABLES = {
    "autotune_studies",
    "autotune_launches",
    "autotune_measurements",
    "autotune_decisions",
    "autotune_quality",
    VERSION_TABLE,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "autotune.db"


@contextlib.contextmanager
def opened(path: Path | str, *, create: bool = False) -> Iterator[sqlalchemy.Engine]:
    engine = open_database(str(path), create=create)
    try:
        yield engine
    finally:
        engine.dispose()


def ask(path: Path, sql: str) -> list[tuple[Any, ...]]:
    """Read the file without any code of ours."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def run(path: Path, sql: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(sql)


def tables(path: Path) -> set[str]:
    return {name for (name,) in ask(path, "SELECT name FROM sqlite_master WHERE type = 'table'")}


def head() -> str:
    found = ScriptDirectory(str(MIGRATIONS)).get_current_head()
    assert found is not None  # there is at least one revision
    return found


# --- making it and keeping it up to date ---


def test_a_fresh_database_gets_the_newest_schema(path: Path) -> None:
    with opened(path, create=True):
        pass

    assert tables(path) == OUR_TABLES
    assert ask(path, f"SELECT version_num FROM {VERSION_TABLE}") == [(head(),)]


def test_opening_again_changes_nothing(path: Path) -> None:
    with opened(path, create=True):
        pass
    before = ask(path, "SELECT name, sql FROM sqlite_master ORDER BY name")

    for _ in range(2):
        with opened(path):
            pass

    assert ask(path, "SELECT name, sql FROM sqlite_master ORDER BY name") == before
    assert ask(path, f"SELECT version_num FROM {VERSION_TABLE}") == [(head(),)]


def test_an_empty_file_is_a_new_database(path: Path) -> None:
    path.touch()

    with opened(path):
        pass

    assert tables(path) == OUR_TABLES


def test_the_models_are_what_the_migrations_make(path: Path) -> None:
    def is_ours(name: str | None, kind: str, parents: object) -> bool:
        return kind != "table" or (str(name).startswith("autotune_") and name != VERSION_TABLE)

    with opened(path, create=True) as engine, engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"include_name": is_ours, "compare_type": True}
        )
        assert compare_metadata(context, Base.metadata) == []


def test_a_difference_between_models_and_migrations_would_be_seen(path: Path) -> None:
    """Proves that the test above can fail."""
    with opened(path, create=True) as engine, engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE autotune_studies DROP COLUMN holder_json")
        context = MigrationContext.configure(connection)

        changes = [c[0] for c in compare_metadata(context, Base.metadata) if isinstance(c, tuple)]

    assert "add_column" in changes


def test_all_tables_are_ours_by_name() -> None:
    assert {name.split("_")[0] for name in Base.metadata.tables} == {"autotune"}


def test_revisions_form_one_line() -> None:
    scripts = ScriptDirectory(str(MIGRATIONS))

    revisions = [script.revision for script in scripts.walk_revisions()]

    assert len(scripts.get_heads()) == 1
    assert revisions[-1] == "0001"
    assert sorted(revisions, reverse=True) == revisions


def test_readers_and_the_writer_work_side_by_side(path: Path) -> None:
    with opened(path, create=True):
        pass

    assert ask(path, "PRAGMA journal_mode") == [("wal",)]


def test_it_lives_beside_optunas_tables(path: Path) -> None:
    """A file that only Optuna has written to yet is taken, and Optuna's tables are left alone."""
    storage = f"sqlite:///{path}"
    theirs = optuna.create_study(storage=storage, study_name="theirs")
    theirs.tell(theirs.ask(), 1.5)
    of_optuna = tables(path)

    with opened(path):
        pass

    assert tables(path) == OUR_TABLES | of_optuna
    theirs = optuna.load_study(storage=storage, study_name="theirs")
    assert [t.value for t in theirs.get_trials()] == [1.5]


def test_making_it_survives_kill_9_at_any_statement(tmp_path: Path) -> None:
    """The first run of a search may be killed as well as any later one."""
    outcomes = []
    for limit in range(1, 100):
        path = tmp_path / f"{limit}.db"
        process = FORK.Process(target=make_and_die, args=(path, limit))
        process.start()
        process.join()
        if process.exitcode == 0:
            break  # there are not so many statements
        try:
            with opened(path, create=True):
                outcomes.append((limit, "opened"))
        except StorageError as err:
            outcomes.append((limit, str(err)))

    assert len(outcomes) > 5
    assert {told for _, told in outcomes} == {"opened"}, outcomes


def make_and_die(path: Path, limit: int) -> None:
    """Make a database, and be killed before the n-th statement."""
    count = 0

    def on_statement(*args: object) -> None:
        nonlocal count
        count += 1
        if count == limit:
            os.kill(os.getpid(), signal.SIGKILL)

    sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", on_statement)
    open_database(str(path), create=True)


# --- older databases ---


def test_a_database_of_schema_0001_opens_with_all_that_is_in_it(path: Path) -> None:
    """Made by `tests/data/make_schema_0001.py` with the code of that time."""
    run(path, (DATA / "schema_0001.sql").read_text(encoding="utf-8"))

    store = Store(str(path))
    try:
        view = load_study(store, None)
        launches = store.launches(store.get_study("study"))
    finally:
        store.close()

    assert ask(path, f"SELECT version_num FROM {VERSION_TABLE}") == [(head(),)]
    # K = 0, 3 and 5 once each, where K = 3 does not fit into memory, then 0 and 5 twice again.
    assert [(x.phase, x.config.num_speculative_tokens, x.state) for x in launches] == [
        (Phase.SEARCH, 0, LaunchState.MEASURED),
        (Phase.SEARCH, 5, LaunchState.MEASURED),
        (Phase.SEARCH, 3, LaunchState.FAILED),
        (Phase.CONFIRM, 0, LaunchState.MEASURED),
        (Phase.CONFIRM, 5, LaunchState.MEASURED),
        (Phase.CONFIRM, 5, LaunchState.MEASURED),
        (Phase.CONFIRM, 0, LaunchState.MEASURED),
    ]
    assert launches[2].failure is not None
    assert launches[2].failure.kind is FailureKind.INSUFFICIENT_MEMORY
    assert all(len(x.measurements) == (x.failure is None) for x in launches)
    assert all(len(m.records) == 3 for x in launches for m in x.measurements)
    # Digests name configs in the database: they must still be those of the configs.
    sql = "SELECT config_digest FROM autotune_launches ORDER BY launch_id"
    digests = [row[0] for row in ask(path, sql)]
    assert digests == [x.config.digest for x in launches]
    assert view.decision is not None
    assert view.decision.winner_label == "K=5"
    assert [row.label for row in view.rows] == ["K=5", "K=0", "K=3"]
    assert view.record.timings_s.keys() == {"launch", "traffic", "total"}


# --- what is refused ---


def test_a_database_of_a_newer_autotune_is_refused(path: Path) -> None:
    with opened(path, create=True):
        pass
    run(path, f"UPDATE {VERSION_TABLE} SET version_num = '9999'")

    with pytest.raises(StorageError) as caught, opened(path):
        pass

    text = str(caught.value)
    assert str(path) in text
    assert f"newer Autotune (schema 9999; this one knows up to {head()})" in text
    assert "Update Autotune" in text
    assert ask(path, f"SELECT version_num FROM {VERSION_TABLE}") == [("9999",)]


def test_a_database_of_another_program_is_refused_and_left_alone(path: Path) -> None:
    run(path, "CREATE TABLE bookmarks (url TEXT); CREATE TABLE history (url TEXT);")

    with pytest.raises(InputError, match=r"not one of Autotune's .*bookmarks, history"):
        open_database(str(path), create=True)

    assert tables(path) == {"bookmarks", "history"}


@pytest.mark.parametrize("content", [b"PK\x03\x04 a zip file, not a database", b"x", b"\0" * 5000])
def test_a_file_that_is_no_database_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)

    with pytest.raises(InputError, match=f"^{path}: is not a SQLite database"):
        open_database(str(path), create=True)

    assert path.read_bytes() == content


def test_a_broken_database_is_told(path: Path) -> None:
    with opened(path, create=True):
        pass
    content = bytearray(path.read_bytes())
    content[100:4096] = b"\xff" * 3996
    path.write_bytes(bytes(content))

    with pytest.raises(InputError, match="is not a usable SQLite database"):
        open_database(str(path), create=False)


def test_a_cut_off_database_is_told(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0" + b"\xff" * 50)

    with pytest.raises(InputError, match="is not a usable SQLite database"):
        open_database(str(path), create=False)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be a file, not a folder"):
        open_database(str(tmp_path), create=True)


def test_a_database_is_only_made_where_one_is_wanted(path: Path) -> None:
    with pytest.raises(InputError, match=r"no study database is there. Run `autotune search`"):
        open_database(str(path), create=False)

    assert not path.exists()


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the folder of the database must exist"):
        open_database(str(tmp_path / "nowhere" / "autotune.db"), create=True)


def open_read_only(path: Path, *args: Any, **kwargs: Any) -> sqlalchemy.Engine:
    """What a file without write permission is to SQLite; root could write to such a file."""
    connect = partial(sqlite3.connect, f"file:{path}?mode=ro", uri=True, check_same_thread=False)
    return sqlalchemy.create_engine("sqlite://", creator=connect)


def test_a_file_that_cannot_be_written_to_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.touch()
    monkeypatch.setattr(schema, "create_engine", partial(open_read_only, path))

    with pytest.raises(StorageError) as caught:
        open_database(str(path), create=True)

    text = str(caught.value)
    assert text.startswith(f"{path}: the study database cannot be used")
    assert "Make the file and its folder writable, or give another path with --storage." in text


def test_a_file_that_cannot_be_opened_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening the file itself for a look fails before SQLite does."""
    path.write_bytes(b"SQLite format 3\0")
    path_open = Path.open

    def denied(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return path_open(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", denied)

    with pytest.raises((StorageError, InputError), match=f"{path}: .*Permission denied"):
        open_database(str(path), create=False)


@pytest.mark.parametrize(
    ("problem", "advice"),
    [
        ("attempt to write a readonly database", "Make the file and its folder writable"),
        ("unable to open database file", "Check that the folder exists and is writable"),
        ("database is locked", "Another process holds it: wait for it, or stop it"),
        ("database or disk is full", "Free some space: nothing that was already stored is lost"),
    ],
)
def test_a_problem_in_the_middle_of_the_work_is_told(
    path: Path, problem: str, advice: str
) -> None:
    store = Store(str(path), create=True)
    try:

        @sqlalchemy.event.listens_for(store._engine, "before_cursor_execute")
        def _fail(*args: object) -> None:
            raise sqlite3.OperationalError(problem)

        with pytest.raises(StorageError) as caught:
            store.study_names()
    finally:
        store.close()
    assert str(caught.value).startswith(f"{path}: the study database cannot be used ({problem})")
    assert advice in str(caught.value)


# --- how it is named ---


@pytest.mark.parametrize(
    ("storage", "told"),
    [
        ("mysql://user:secret@host/db", r"must be SQLite or PostgreSQL, but got 'mysql://user:\*\*\*@host/db'"),
        ("no such://thing", "must be a path or a database URL"),
    ],
)  # fmt: skip
def test_other_databases_are_refused(storage: str, told: str) -> None:
    with pytest.raises(InputError, match=told) as caught:
        storage_url(storage)
    assert "secret" not in str(caught.value)


def test_a_path_becomes_a_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")

    assert storage_url("autotune.db") == f"sqlite:///{tmp_path}/autotune.db"
    assert storage_url("/data/x.db") == "sqlite:////data/x.db"
    assert storage_url("~/x.db") == "sqlite:////home/somebody/x.db"
    assert storage_url("postgresql://u@h/db") == "postgresql://u@h/db"


@pytest.mark.parametrize("name", ["a b.db", "50%.db", "a#b.db", "ü☃.db", "a:b.db"])
def test_a_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name

    store = Store(str(path), create=True)
    store.add_study("demo", {}, {}, 0.0, is_simulated=False)
    store.close()

    assert [found.name for found in tmp_path.iterdir()] == [name]
    store = Store(str(path))
    assert store.study_names() == ["demo"]
    store.close()


def test_a_question_mark_does_not_cut_a_name_off(tmp_path: Path) -> None:
    """In a URL it begins the options: the file that is written must not have another name."""
    with contextlib.suppress(InputError):
        Store(str(tmp_path / "what?.db"), create=True).close()

    assert {found.name for found in tmp_path.iterdir()} <= {"what?.db"}
