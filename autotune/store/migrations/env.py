"""Alembic's entry point: run the migrations over the connection it is handed."""

from __future__ import annotations

from alembic import context

from autotune.store.schema import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    version_table=VERSION_TABLE,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
