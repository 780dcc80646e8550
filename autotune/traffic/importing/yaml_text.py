"""YAML with comments, written line by line: libraries that write YAML cannot write comments."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

Value = str | float | Mapping[str, "Value"]

_COMMENT_COLUMN = 48
_INDENT = "  "


class YamlText:
    """Lines of a YAML file, each with an optional comment beside it."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def comment(self, text: str, depth: int = 0) -> None:
        """Add a line that is a comment."""
        self._lines.append(f"{_INDENT * depth}# {_printable(text)}")

    def line(self, text: str, comment: str = "", depth: int = 0) -> None:
        """Add a line of YAML."""
        text = _INDENT * depth + text
        beside = f"{text:<{_COMMENT_COLUMN}} # {_printable(comment)}" if comment else text
        self._lines.append(beside)

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"


def scalar(value: str | float) -> str:
    """Write a value on one line so that YAML reads the same one back, inside a flow mapping too."""
    # Only double quotes have escapes for line breaks and for what is not printed.
    is_plain = not isinstance(value, str) or value.isprintable()
    written = yaml.safe_dump(
        [value],
        default_flow_style=True,
        default_style=None if is_plain else '"',
        allow_unicode=is_plain,
        width=float("inf"),
    )
    return written.strip().removeprefix("[").removesuffix("]")


def flow(pairs: Mapping[str, Value]) -> str:
    """Write a mapping on one line."""
    written = (
        f"{scalar(key)}: {flow(value) if isinstance(value, Mapping) else scalar(value)}"
        for key, value in pairs.items()
    )
    return f"{{{', '.join(written)}}}"


def _printable(text: str) -> str:
    """Keep a comment on its line, whatever a file calls its classes."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
