"""Where tests find the public data sets that are not part of the project."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.fixture
def shared_data() -> Callable[[str], Path]:
    """Give a function that returns a public file's path, and skips the test where it is missing."""
    named = os.environ.get("AUTOTUNE_SHARED_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"

    def find(name: str) -> Path:
        if not (folder / name).is_file():
            pytest.skip(
                f"the public file {name} is not here; AUTOTUNE_SHARED_DATA names its folder"
            )
        return folder / name

    return find
