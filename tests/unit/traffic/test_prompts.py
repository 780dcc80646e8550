"""Prompt files in the shapes people have, and what is said about those that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.errors import InputError
from autotune.strict import validate
from autotune.traffic.builtin import builtin_sets
from autotune.traffic.classes import PromptSource
from autotune.traffic.prompts import Prompt, load_prompts


def load(folder: Path, name: str, content: str | bytes, **options: str) -> list[Prompt]:
    """Write a prompt file and read it."""
    data = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(data)
    source = PromptSource.model_validate({"file": name, **options})
    return load_prompts(source, folder)


def refusal(folder: Path, name: str, content: str | bytes, **options: str) -> str:
    with pytest.raises(InputError) as caught:
        load(folder, name, content, **options)
    return str(caught.value)


# --- shapes ---


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"prompt": "hi"}, [("user", "hi")]),
        ({"question": "why?", "answer": "so"}, [("user", "why?")]),
        ({"question_id": 81, "turns": ["first", "second"]}, [("user", "first")]),
        (
            {
                "messages": [
                    {"role": "system", "content": "be kind"},
                    {"role": "user", "content": "hi"},
                ]
            },
            [("system", "be kind"), ("user", "hi")],
        ),
        (  # a recorded answer goes, since the model is to give its own
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    {"role": "user", "content": "c"},
                    {"role": "assistant", "content": "d"},
                ]
            },
            [("user", "a"), ("assistant", "b"), ("user", "c")],
        ),
    ],
)
def test_rows_people_have(
    tmp_path: Path, row: dict[str, object], messages: list[tuple[str, str]]
) -> None:
    (prompt,) = load(tmp_path, "p.jsonl", json.dumps(row) + "\n")
    assert list(prompt.messages) == messages
    assert prompt.as_chat() == [{"role": role, "content": text} for role, text in messages]


def test_text_files_hold_a_prompt_a_line(tmp_path: Path) -> None:
    prompts = load(tmp_path, "p.txt", "  one \n\ntwo\n   \n")
    assert [prompt.text for prompt in prompts] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "options", "texts"),
    [
        ("p.jsonl", {}, ["hi"]),
        ("p.ndjson", {}, ["hi"]),
        ("p.txt", {}, ['{"prompt": "hi"}']),
        ("p.txt", {"format": "jsonl"}, ["hi"]),
        ("p.jsonl", {"format": "text"}, ['{"prompt": "hi"}']),
    ],
)
def test_the_format_follows_the_name_unless_given(
    tmp_path: Path, name: str, options: dict[str, str], texts: list[str]
) -> None:
    prompts = load(tmp_path, name, '{"prompt": "hi"}\n', **options)
    assert [prompt.text for prompt in prompts] == texts


def test_a_prompt_that_stands_twice_counts_once(tmp_path: Path) -> None:
    rows = '{"prompt": "b"}\n{"prompt": "a"}\n{"question": "b"}\n'
    assert [prompt.text for prompt in load(tmp_path, "p.jsonl", rows)] == ["b", "a"]


def test_a_prompts_id_names_its_content(tmp_path: Path) -> None:
    first = load(tmp_path, "a.jsonl", '{"prompt": "x"}\n{"prompt": "y"}\n')
    again = load(tmp_path, "b.txt", "y\nx\n")
    assert first[0].prompt_id == again[1].prompt_id
    assert first[0].prompt_id != first[1].prompt_id


def test_without_roles_the_messages_are_joined() -> None:
    prompt = Prompt("id", (("system", "be kind"), ("user", "hi")))
    assert prompt.text == "be kind\n\nhi"
    assert prompt.num_chars == 9  # 7 + 2


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    # U+2028 and U+0085 may stand in a JSON string as they are, and do in scraped text.
    text = "one\u2028two\u0085three"
    rows = json.dumps({"prompt": text}, ensure_ascii=False) + "\n"
    assert [prompt.text for prompt in load(tmp_path, "p.jsonl", rows)] == [text]


def test_lines_may_end_as_on_windows(tmp_path: Path) -> None:
    assert [
        p.text for p in load(tmp_path, "p.jsonl", '{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    ] == [
        "a",
        "b",
    ]


def test_an_absolute_path_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("hi\n", encoding="utf-8")
    source = PromptSource(file=tmp_path / "p.txt")
    assert [prompt.text for prompt in load_prompts(source, Path("/nowhere"))] == ["hi"]


# --- built-in sets ---


def test_the_built_in_sets_are_known() -> None:
    assert builtin_sets() == ["demo/chat", "demo/code", "demo/maths", "demo/summarise"]


@pytest.mark.parametrize("name", builtin_sets())
def test_built_in_sets_load(name: str) -> None:
    prompts = load_prompts(PromptSource(builtin=name), Path("/nowhere"))
    assert len(prompts) >= 20  # enough for a warm-up part and a measured part
    assert all(prompt.text.strip() for prompt in prompts)


def test_an_unknown_built_in_set_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        validate(PromptSource, {"builtin": "demo/math"}, "traffic.yaml")
    assert str(caught.value) == (
        "traffic.yaml: builtin: must be a built-in prompt set (did you mean 'demo/maths'?), "
        "but got 'demo/math'."
    )


@pytest.mark.parametrize("name", ["../demo/chat", "demo/../../etc/passwd", "/etc/passwd", "demo"])
def test_a_built_in_name_is_no_path(name: str) -> None:
    with pytest.raises(InputError, match="must be a built-in prompt set"):
        validate(PromptSource, {"builtin": name}, "traffic.yaml")


# --- what is refused ---


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    message = refusal(tmp_path, "p.jsonl", content)
    assert message.startswith(f"{tmp_path / 'p.jsonl'}: ")
    assert "the prompt file must hold at least one record, but is empty" in message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        load_prompts(PromptSource(file=Path("nope.jsonl")), tmp_path)
    path = tmp_path / "nope.jsonl"
    assert str(caught.value) == f"{path}: the prompt file must exist. Check the path."


def test_another_encoding_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, "p.txt", b"caf\xe9\n")
    assert message.startswith(f"{tmp_path / 'p.txt'}:1: is not UTF-8 text")
    assert "iconv" in message


def test_a_broken_row_is_refused_with_its_line(tmp_path: Path) -> None:
    # Blank lines count, as they do in an editor.
    message = refusal(tmp_path, "p.jsonl", '{"prompt": "a"}\n\n{"prompt": "b"\n')
    assert message.startswith(f"{tmp_path / 'p.jsonl'}:3: ")
    assert "each line must be one JSON object" in message


@pytest.mark.parametrize("row", ["[1, 2]", '"text"', "3", "null"])
def test_a_row_that_is_no_object_is_refused(tmp_path: Path, row: str) -> None:
    message = refusal(tmp_path, "p.jsonl", f"{row}\n")
    assert message.startswith(f"{tmp_path / 'p.jsonl'}:1: each line must be one JSON object")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"id": 3, "size": 4}, '"prompt", "messages", "turns" or "question", but got'),
        ({}, '"prompt", "messages", "turns" or "question"'),
        ({"prompt": 3}, "`prompt` must be text"),
        ({"messages": "hi"}, "`messages` must be a list"),
        ({"messages": [{"role": "user"}]}, "each of `messages` must have `content`"),
        ({"messages": ["hi"]}, "each of `messages` must be an object"),
        ({"turns": []}, "the prompt must not be empty"),
        ({"turns": [3]}, "`turns` must be a list of texts"),
    ],
)
def test_a_row_without_a_prompt_is_refused(
    tmp_path: Path, row: dict[str, object], told: str
) -> None:
    message = refusal(tmp_path, "p.jsonl", f'{{"prompt": "a"}}\n{json.dumps(row)}\n')
    assert message.startswith(f"{tmp_path / 'p.jsonl'}:2: ")
    assert told in message


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "  "},
        {"messages": []},
        {"messages": [{"role": "system", "content": "be kind"}]},
        {"messages": [{"role": "user", "content": ""}]},
        {"turns": [""]},
    ],
)
def test_an_empty_prompt_is_refused(tmp_path: Path, row: dict[str, object]) -> None:
    message = refusal(tmp_path, "p.jsonl", json.dumps(row) + "\n")
    assert message == f"{tmp_path / 'p.jsonl'}:1: the prompt must not be empty."


def test_nesting_without_end_is_refused(tmp_path: Path) -> None:
    assert "each line must be one JSON object" in refusal(
        tmp_path, "p.jsonl", "[" * 100_000 + "\n"
    )
