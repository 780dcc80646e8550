"""`autotune profile import`: what it prints, what it writes, and what it leaves alone."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.cli import main
from autotune.cli.profile import COMMANDS
from autotune.traffic.importing import writing
from autotune.traffic.profile import load_profile

Run = Callable[..., "subprocess.CompletedProcess[str]"]

INPUT = 2
SECRET = "hunter2"
LOG = "prod.jsonl"


def request(number: int) -> dict[str, object]:
    return {
        "model": "m", "messages": [{"role": "user", "content": f"{SECRET} {number}"}],
        "temperature": 0.7, "created": number,
    }  # fmt: skip


@pytest.fixture
def import_log(cli: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Give a function that runs the command in a folder that has a log and no profile."""
    monkeypatch.setitem(main.COMMANDS, "profile", "Make, look at and check traffic profiles.")
    (folder / "traffic.yaml").unlink()
    lines = [json.dumps(request(number)) + "\n" for number in range(100)]
    lines[3] = f'{{"messages": "{SECRET}"}}\n'
    lines[7] = f'{{"{SECRET}\n'
    (folder / LOG).write_text("".join(lines), encoding="utf-8")
    return lambda *arguments: cli("profile", "import", *arguments)


def refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == INPUT, done
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


def test_it_says_what_it_found_and_writes_a_profile(import_log: Run, folder: Path) -> None:
    done = import_log(
        LOG, "-o", "traffic.yaml", "--model", "owner/target", "--drafter", "owner/head"
    )

    assert (done.returncode, done.stderr) == (0, "")
    for part in (
        f"{LOG}: openai (requests to an OpenAI-style server",
        "rows              98, 98 of them with text",
        "arrivals          ",
        "temperature       0.7 in 100% of 98 rows",
        "broken rows       2, left out; the first:\n",
        "    line 4: `messages` must be a list\n",
        "    line 8: each line must be one JSON object (",
        "traffic.yaml written",
    ):
        assert part in done.stdout
    profile = load_profile(folder / "traffic.yaml")
    assert (profile.name, profile.model, profile.drafter) == ("prod", "owner/target", "owner/head")


def test_it_shows_no_text_of_the_log(import_log: Run, folder: Path) -> None:
    done = import_log(LOG, "-o", "traffic.yaml")
    assert SECRET not in done.stdout + done.stderr
    assert SECRET not in (folder / "traffic.yaml").read_text(encoding="utf-8")


def test_fields_format_and_name_can_be_given(import_log: Run, folder: Path) -> None:
    (folder / "odd.log").write_text('{"q": "hi", "at": 1500}\n', encoding="utf-8")
    refused(
        import_log("odd.log", "-o", "t.yaml"), "the format is not known", "--column NAME=FIELD"
    )
    done = import_log(
        "odd.log", "-o", "t.yaml", "--column", "prompt=q", "--column", "timestamp=at[ms]",
        "--format", "jsonl", "--name", "odd-one",
    )  # fmt: skip
    assert done.returncode == 0
    profile = load_profile(folder / "t.yaml")
    assert profile.name == "odd-one"
    prompts = profile.classes[0].prompts
    assert prompts is not None
    assert dict(prompts.columns) == {"prompt": "q", "timestamp": "at[ms]"}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("nope.jsonl", "-o", "t.yaml"), ("nope.jsonl: the log must exist",)),
        ((".", "-o", "t.yaml"), ("the log must be a file",)),
        ((LOG, "-o", "t.yaml", "--format", "openay"), ("Did you mean 'openai'?",)),
        (
            (LOG, "-o", "t.yaml", "--format", "azure"),
            ("no row of the log can be used", "--format"),
        ),
        ((LOG, "-o", "t.yaml", "--column", "prompt"), ("--column", "NAME=FIELD")),
        ((LOG, "-o", "t.yaml", "--column", "promt=q"), ("Did you mean 'prompt'?",)),
        ((LOG, "-o", "t.yaml", "--name", "a b"), ("--name: must be at most 64 letters",)),
        ((LOG, "-o", "nowhere/t.yaml"), ("--out: the folder must exist", "'nowhere'")),
        ((LOG, "-o", "."), ("--out: must be a file, not a folder",)),
        ((LOG, "-o", LOG, "--force"), ("--out: must not be the log itself",)),
        ((LOG, "-o", "~nobody-has-this-name/t.yaml"), ("--out: is no usable path",)),
        ((LOG,), ("Missing option '-o'",)),
    ],
)
def test_what_cannot_be_used_is_refused(
    import_log: Run, folder: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    before = sorted(folder.iterdir())
    refused(import_log(*arguments), *parts)
    assert sorted(folder.iterdir()) == before


def test_an_existing_profile_stays_unless_forced(import_log: Run, folder: Path) -> None:
    out = folder / "t.yaml"
    out.write_text("mine", encoding="utf-8")
    refused(import_log(LOG, "-o", "t.yaml"), "--out: the file exists already", "--force")
    assert out.read_text(encoding="utf-8") == "mine"

    assert import_log(LOG, "-o", "t.yaml", "--force").returncode == 0
    assert load_profile(out).name == "prod"


def test_nothing_half_written_stays_behind(
    import_log: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when half of the profile is written."""
    out = folder / "t.yaml"
    out.write_text("mine", encoding="utf-8")
    before = sorted(folder.iterdir())

    def half(path: Path, text: str, encoding: str) -> int:
        path.write_bytes(text[: len(text) // 2].encode(encoding))
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_text", half)
    refused(import_log(LOG, "-o", "t.yaml", "--force"), "t.yaml: cannot be written (No space left")
    assert out.read_bytes() == b"mine"
    assert sorted(folder.iterdir()) == before


def test_a_profile_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    """A temporary file's are narrower, and others must be able to read the profile."""
    writing.write_text(tmp_path / "t.yaml", "text")
    (tmp_path / "other").touch()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def test_the_commands_of_the_group_are_listed_without_being_loaded(
    cli: Run, import_log: Run
) -> None:
    shown = cli("profile", "--help")
    assert shown.returncode == 0
    for name, purpose in COMMANDS.items():
        assert f"  {name} " in shown.stdout
        assert purpose in shown.stdout
    refused(cli("profile", "imprt"), "no such command 'imprt'. Did you mean 'import'?")


def test_help_says_what_every_option_does(import_log: Run) -> None:
    shown = import_log("--help")
    assert shown.returncode == 0
    for option in ("--out", "--format", "--column", "--name", "--model", "--drafter", "--force"):
        assert option in shown.stdout
