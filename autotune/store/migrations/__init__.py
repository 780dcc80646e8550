"""Schema migrations, applied by Alembic in order and never edited once released."""
