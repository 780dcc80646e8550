"""Readers of logs, traces and data sets: any of them becomes rows, in constant memory."""

from __future__ import annotations

from autotune.traffic.formats.columns import COLUMN_NAMES
from autotune.traffic.formats.reader import RowReader, detect, read_rows
from autotune.traffic.formats.registry import FORMATS, describe_formats

__all__ = ["COLUMN_NAMES", "FORMATS", "RowReader", "describe_formats", "detect", "read_rows"]
