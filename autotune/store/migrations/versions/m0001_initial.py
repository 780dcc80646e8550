"""Studies, launches, measurements, decisions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the first four tables."""
    op.create_table(
        "autotune_studies",
        sa.Column("study_id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String(128), nullable=False, unique=True),
        sa.Column("definition_json", sa.Text, nullable=False),
        sa.Column("environment_json", sa.Text, nullable=False),
        sa.Column("is_simulated", sa.Boolean, nullable=False),
        sa.Column("created_at_s", sa.Double, nullable=False),
        sa.Column("holder_json", sa.Text),
        sa.Column("timings_json", sa.Text, nullable=False),
    )
    op.create_table(
        "autotune_launches",
        sa.Column("launch_id", sa.Integer, primary_key=True),
        sa.Column(
            "study_id",
            sa.Integer,
            sa.ForeignKey("autotune_studies.study_id"),
            nullable=False,
            index=True,
        ),
        sa.Column("trial_number", sa.Integer),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("repeat", sa.Integer, nullable=False),
        sa.Column("config_digest", sa.String(16), nullable=False, index=True),
        sa.Column("config_json", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("started_at_s", sa.Double, nullable=False),
        sa.Column("ended_at_s", sa.Double),
        sa.Column("report_json", sa.Text),
        sa.Column("failure_kind", sa.String(32)),
        sa.Column("failure_detail", sa.Text),
        sa.Column("log_path", sa.Text),
    )
    op.create_table(
        "autotune_measurements",
        sa.Column("measurement_id", sa.Integer, primary_key=True),
        sa.Column(
            "launch_id",
            sa.Integer,
            sa.ForeignKey("autotune_launches.launch_id"),
            nullable=False,
            index=True,
        ),
        sa.Column("schedule_digest", sa.String(16), nullable=False),
        sa.Column("summary_json", sa.Text, nullable=False),
        sa.Column("raw", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "autotune_decisions",
        sa.Column("decision_id", sa.Integer, primary_key=True),
        sa.Column(
            "study_id",
            sa.Integer,
            sa.ForeignKey("autotune_studies.study_id"),
            nullable=False,
            index=True,
        ),
        sa.Column("decided_at_s", sa.Double, nullable=False),
        sa.Column("decision_json", sa.Text, nullable=False),
        sa.UniqueConstraint("study_id", "decided_at_s"),
    )
