"""Paths that people type, made safe to look up."""

from __future__ import annotations

from pathlib import Path

from autotune.errors import invalid


def user_path(text: str | Path, where: object) -> Path:
    """Expand `~` and prove that the path can be looked up at all, whether or not it exists.

    Args:
        text: what the user gave.
        where: the file or option it stands in, for messages.

    Raises:
        InputError: it names an unknown user, is too long, or holds a null character.
    """
    try:
        path = Path(text).expanduser()
        path.exists()
    except (RuntimeError, OSError, ValueError) as err:
        reason = getattr(err, "strerror", None) or str(err)
        raise invalid(
            f"is no usable path ({reason})",
            where=where,
            got=str(text),
            next_step="Check the path.",
        ) from err
    return path
