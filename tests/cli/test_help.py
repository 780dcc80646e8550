"""Help is complete, and quick because it loads next to nothing."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import autotune.cli
from autotune.cli.main import COMMANDS
from autotune.cli.profile import COMMANDS as PROFILE_COMMANDS

Run = Callable[..., "subprocess.CompletedProcess[str]"]

MAX_HELP_S = 0.3
HEAVY = {"optuna", "torch", "vllm", "transformers", "pydantic", "rich", "sqlalchemy", "numpy"}
LIST_MODULES = """
import json, sys
from autotune.cli.main import run
assert run(["--help"]) == 0
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.stderr)
"""


def command(name: str) -> click.Command:
    found: click.Command = importlib.import_module(f"autotune.cli.{name}").command
    return found


def test_every_command_is_listed_with_what_it_does(process: Run) -> None:
    shown = process("--help")

    assert shown.returncode == 0
    for name, purpose in COMMANDS.items():
        assert f"  {name} " in shown.stdout
        assert purpose.split()[0] in shown.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, process: Run) -> None:
    shown = process(name, "--help")

    assert shown.returncode == 0
    assert shown.stdout.startswith(f"Usage: autotune {name} ")
    assert shown.stderr == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_the_command_says(name: str) -> None:
    assert command(name).name == name
    help_text = command(name).help or ""
    assert help_text.split()[:2] == COMMANDS[name].split()[:2]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name: str) -> None:
    options = [p for p in command(name).params if isinstance(p, click.Option)]
    assert [option.name for option in options if not option.help] == []


def test_every_module_is_a_command_or_shared_by_commands() -> None:
    modules = {path.stem for path in Path(autotune.cli.__file__).parent.glob("*.py")}
    of_profile = {f"profile_{name}" for name in PROFILE_COMMANDS}
    shared = {"__init__", "lazy", "main", "options", "running"}
    assert modules - shared == set(COMMANDS) | of_profile


@pytest.mark.parametrize("name", PROFILE_COMMANDS)
def test_commands_of_the_profile_group_are_found_and_explained(name: str, process: Run) -> None:
    shown = process("profile", name, "--help")

    assert shown.returncode == 0
    assert shown.stdout.startswith(f"Usage: autotune profile {name} ")
    found = command(f"profile_{name}")
    assert (found.help or "").split()[:2] == PROFILE_COMMANDS[name].split()[:2]
    options = [p for p in found.params if isinstance(p, click.Option)]
    assert [option.name for option in options if not option.help] == []


def test_help_is_quick() -> None:
    took_s = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "autotune.cli.main", "--help"], check=True, capture_output=True
        )
        took_s.append(time.perf_counter() - began)
    assert min(took_s) < MAX_HELP_S


def test_help_loads_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIST_MODULES], check=True, capture_output=True, text=True
    )
    loaded = set(json.loads(done.stderr))
    assert loaded & HEAVY == set()


def test_the_version_is_told(process: Run) -> None:
    shown = process("--version")
    assert shown.returncode == 0
    assert shown.stdout.startswith("autotune, version ")
