"""Writing the profile: whole or not at all, and never over something by accident."""

from __future__ import annotations

import os
from pathlib import Path

from autotune.errors import invalid
from autotune.paths import user_path


def check_target(out: Path, log: Path, *, is_forced: bool) -> Path:
    """Return the path to write to, before any work is done for it.

    Raises:
        InputError: it exists and overwriting was not asked for, is the log itself, is a folder, or
            its folder does not exist.
    """
    path = user_path(out, "--out")
    if path.is_dir():
        raise invalid("must be a file, not a folder", where="--out", got=str(out))
    if not path.parent.is_dir():
        raise invalid(
            "the folder must exist",
            where="--out",
            got=str(path.parent),
            next_step="Make it first.",
        )
    if path.exists():
        source = user_path(log, "the log")
        if source.exists() and path.samefile(source):
            raise invalid("must not be the log itself", where="--out", got=str(out))
        if not is_forced:
            raise invalid(
                "the file exists already",
                where="--out",
                got=str(out),
                next_step="Give another name, or --force to overwrite it.",
            )
    return path


def write_text(path: Path, text: str) -> None:
    """Write a file through a temporary one beside it, so that half of it is never seen.

    Raises:
        InputError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as err:
        temporary.unlink(missing_ok=True)
        raise invalid(f"cannot be written ({err.strerror})", where=path) from err
