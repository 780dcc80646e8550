"""Prompts from files: JSON lines in the shapes people have, or plain text, one prompt a line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import invalid, suggestion
from autotune.paths import user_path
from autotune.strict import read_text
from autotune.traffic.profile import PromptSource

MAX_PROMPT_FILE_BYTES = 256 * 1024 * 1024
BUILTIN_ROOT = Path(__file__).parent.parent

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """One prompt, as chat messages; `prompt_id` names its content."""

    prompt_id: str
    messages: tuple[tuple[str, str], ...]
    """(role, content) pairs, the last one by the user."""

    @property
    def text(self) -> str:
        """The prompt without roles, for the completions endpoint."""
        return "\n\n".join(content for _, content in self.messages)

    @property
    def num_chars(self) -> int:
        return sum(len(content) for _, content in self.messages)

    def as_chat(self) -> list[Message]:
        return [{"role": role, "content": content} for role, content in self.messages]


def load_prompts(source: PromptSource, folder: Path) -> list[Prompt]:
    """Read the distinct prompts of one source, in file order.

    Args:
        source: which file or built-in set.
        folder: where a relative file path starts.

    Raises:
        InputError: the file is missing, empty, not UTF-8, or has a row without a prompt.
    """
    path = _path_of(source, folder)
    text = read_text(path, "prompt file", MAX_PROMPT_FILE_BYTES)
    is_jsonl = source.format == "jsonl" or (
        source.format == "auto" and path.suffix in {".jsonl", ".json", ".ndjson"}
    )
    # Not splitlines(): it also breaks at U+2028 and others, which may stand inside a JSON string.
    rows = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    parse = _parse_json_row if is_jsonl else _parse_text_row
    prompts = {p.prompt_id: p for p in (parse(path, number, line) for number, line in rows)}
    if not prompts:
        raise invalid(
            "the prompt file must hold at least one prompt, but is empty",
            where=path,
            next_step='Write one JSON object a line, such as {"prompt": "..."}.',
        )
    return list(prompts.values())


def builtin_sets() -> list[str]:
    """Name the prompt sets that ship with Autotune."""
    return sorted(
        f"demo/{path.stem}" for path in (BUILTIN_ROOT / "demo" / "prompts").glob("*.jsonl")
    )


def _path_of(source: PromptSource, folder: Path) -> Path:
    if source.builtin is None:
        assert source.file is not None  # the model's validator demands exactly one of the two
        return folder / user_path(source.file, "prompts.file")
    if source.builtin not in builtin_sets():
        raise invalid(
            "no built-in prompt set has this name",
            where="prompts.builtin",
            got=source.builtin,
            next_step=suggestion(source.builtin, builtin_sets()),
        )
    group, name = source.builtin.split("/")
    return BUILTIN_ROOT / group / "prompts" / f"{name}.jsonl"


def _parse_text_row(path: Path, number: int, line: str) -> Prompt:
    return _prompt([("user", line.strip())])


def _parse_json_row(path: Path, number: int, line: str) -> Prompt:
    where = f"{path}:{number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as err:  # ValueError: also numbers of thousands of digits
        raise invalid(f"each line must be one JSON object ({err})", where=where) from err
    if not isinstance(row, dict):
        raise invalid("each line must be one JSON object", where=where, got=row)
    messages = _messages_of(row)
    if messages is None:
        raise invalid(
            'each row must have "prompt", "messages", "turns" or "question"',
            where=where,
            got=sorted(map(str, row))[:8],
        )
    if not messages or not messages[-1][1].strip():
        raise invalid("the prompt must not be empty", where=where)
    return _prompt(messages)


def _messages_of(row: dict[str, Any]) -> list[tuple[str, str]] | None:
    messages = row.get("messages")
    if isinstance(messages, list):
        pairs = [
            (m.get("role"), m.get("content")) if isinstance(m, dict) else (None, None)
            for m in messages
        ]
        if all(isinstance(role, str) and isinstance(content, str) for role, content in pairs):
            return _up_to_last_user([(str(role), str(content)) for role, content in pairs])
        return None
    turns = row.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return [("user", turns[0])]
    for key in ("prompt", "question"):
        if isinstance(row.get(key), str):
            return [("user", row[key])]
    return None


def _up_to_last_user(messages: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Cut a recorded conversation where the model is to answer."""
    last = max((i for i, (role, _) in enumerate(messages) if role == "user"), default=-1)
    return messages[: last + 1]


def _prompt(messages: list[tuple[str, str]]) -> Prompt:
    content = json.dumps(messages, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return Prompt(hashlib.sha256(content).hexdigest()[:16], tuple(messages))
