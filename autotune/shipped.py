"""The YAML files that ship with Autotune, in a checkout or in an installed package."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent
_ROOTS = (_PACKAGE / "_data", _PACKAGE.parent)


def shipped_files(folder: str) -> dict[str, Path]:
    """Return the shipped YAML files of ``search_spaces`` or ``profiles`` by name."""
    return {path.stem: path for root in _ROOTS for path in sorted((root / folder).glob("*.yaml"))}
