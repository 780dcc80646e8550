"""Verdicts of the quality gate."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create the table of verdicts."""
    op.create_table(
        "autotune_quality",
        sa.Column("verdict_id", sa.Integer, primary_key=True),
        sa.Column(
            "study_id",
            sa.Integer,
            sa.ForeignKey("autotune_studies.study_id"),
            nullable=False,
            index=True,
        ),
        sa.Column("config_digest", sa.String(16), nullable=False),
        sa.Column("judged_at_s", sa.Double, nullable=False),
        sa.Column("verdict_json", sa.Text, nullable=False),
    )
