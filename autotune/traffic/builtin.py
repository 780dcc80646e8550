"""Prompt sets that ship with Autotune: real text to begin with, but nobody's own."""

from __future__ import annotations

from pathlib import Path

_SETS = {
    f"demo/{path.stem}": path
    for path in sorted((Path(__file__).parent.parent / "demo" / "prompts").glob("*.jsonl"))
}


def builtin_sets() -> list[str]:
    """Name the prompt sets."""
    return list(_SETS)


def builtin_path(name: str) -> Path:
    """Return the file of a prompt set.

    Raises:
        KeyError: there is none of this name.
    """
    return _SETS[name]
