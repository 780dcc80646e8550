"""The engine that the documents show runs a whole search on its own truth and its own clock."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.store.records import LaunchRecord

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Launches = Callable[..., list[LaunchRecord]]

DOCS = Path(__file__).parents[2] / "docs"
DEPTHS = (0, 2, 3, 4, 8)
SPACE = """\
version: 1
name: small
parameters:
  num_speculative_tokens: {choices: [0, 2, 3, 4, 8]}
"""


def tokens_per_second(k: int) -> float:
    """What the document states: 10 ms a step, 1 ms a draft, 70 % survive each position."""
    return (1 - 0.7 ** (k + 1)) / (1 - 0.7) / (0.010 + 0.001 * k)


@pytest.fixture
def example(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put the engine as the document shows it where Python finds it, and return its name."""
    page = (DOCS / "engines.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?class FormulaEngine.*?)```", page, re.DOTALL)
    (folder / "shown_engine.py").write_text(code, encoding="utf-8")
    (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    return "shown_engine:FormulaEngine"


def test_it_finds_what_its_own_formula_says_is_best(
    cli: Run, example: str, launches: Launches
) -> None:
    began_s = time.monotonic()
    outcome = cli(
        "search", "--profile", "traffic.yaml", "--space", "space.yaml", "--engine", example,
        "--sampler", "grid", "--trials", "5", "--finalists", "1", "--repeats", "2",
    )  # fmt: skip

    assert outcome.returncode == 0, outcome.stderr
    best = max(DEPTHS, key=tokens_per_second)
    assert f"Recommended (simulated): K={best}" in outcome.stdout
    # At least five launches of a minute each passed on its clock, and none on the wall's.
    assert len(launches()) >= 5
    assert time.monotonic() - began_s < 60


def test_the_document_shows_the_file_that_is_in_its_folder() -> None:
    code = (DOCS / "examples" / "formula_engine.py").read_text(encoding="utf-8")

    assert f"```python\n{code}```" in (DOCS / "engines.md").read_text(encoding="utf-8")
