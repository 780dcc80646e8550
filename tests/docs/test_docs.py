"""What is written for users is true: files load, commands and options exist, links lead somewhere."""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from autotune.cli.main import COMMANDS, cli
from autotune.errors import InputError
from autotune.search.space import load_space
from autotune.shipped import shipped_files
from autotune.traffic.drawing import build_schedule
from autotune.traffic.profile import load_profile

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = ROOT / "README.md"
CLI_PAGE = ROOT / "docs" / "cli.md"
MAP_PAGE = ROOT / "docs" / "architecture.md"

PROFILES = sorted((ROOT / "profiles").glob("*.yaml"))
SPACES = sorted((ROOT / "search_spaces").iterdir())

SHELLS = {"", "sh", "bash", "shell", "console", "text"}
FENCE = re.compile(r"^ *(`{3,}|~{3,}) *([\w-]*)[^\n]*\n(.*?)^ *\1 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s+<?(\S+?)>?\s*$", re.MULTILINE)
PLACEHOLDER = re.compile(r"[A-Z][A-Z_-]*|<.*>|\.\.\.|…|\$\w+|\[.*")
"""What stands for a value in a usage line: STUDY, <file>, $OUT, [OPTIONS]."""

DRAWN = re.compile("[\u2500-\u257f\u25b2-\u25c4]")
"""Lines and arrows of a diagram, which is no command."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class CommandLine:
    """A command in a code block of a page."""

    page: Path
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{name_of(self.page)}: {shlex.join(self.words)}"


def code_blocks(page: Path) -> Iterator[str]:
    for _, language, body in FENCE.findall(page.read_text(encoding="utf-8")):
        if language.lower() in SHELLS:
            yield body


def command_lines(page: Path, program: str = "autotune") -> list[CommandLine]:
    """Find the commands of a page that call `program`, without prompts and variables in front."""
    found = []
    for block in code_blocks(page):
        for line in block.replace("\\\n", " ").splitlines():
            if DRAWN.search(line):
                continue
            text = line.strip().removeprefix("$ ").strip()
            for words in _commands(text):
                if words and words[0] == program:
                    found.append(CommandLine(page, tuple(words)))
    return found


def _commands(text: str) -> Iterator[list[str]]:
    """Split a line at `&&`, `;` and `|`, and drop NAME=value in front of each command."""
    try:
        lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
        lexer.commenters = "#"
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:
        return  # not a shell line: a table or a message
    command: list[str] = []
    for word in [*words, ";"]:
        if set(word) <= set("();<>|&") and word:
            yield command
            command = []
        elif command or not re.fullmatch(r"[A-Za-z_]\w*=.*", word):
            command.append(word)


def problems(words: tuple[str, ...]) -> list[str]:
    """Say what of a command line `autotune` would not take."""
    rest = list(words[1:])
    group: click.Command = cli
    while rest and rest[0].startswith("-"):
        if rest[0] not in names_of(group):
            return [f"no option {rest[0]}"]
        rest.pop(0)
    if not rest or PLACEHOLDER.fullmatch(rest[0]):
        return []
    name = rest.pop(0)
    if name not in COMMANDS:
        return [f"no command {name}"]
    command: click.Command = importlib.import_module(f"autotune.cli.{name}").command
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        inner = command.get_command(click.Context(command), rest[0])
        if inner is None:
            return [f"no command {name} {rest[0]}"]
        command, rest = inner, rest[1:]
    return _problems_of(command, rest)


def _problems_of(command: click.Command, rest: list[str]) -> list[str]:
    found, num_arguments = [], 0
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    options = names_of(command)
    while rest:
        word = rest.pop(0)
        if PLACEHOLDER.fullmatch(word):
            num_arguments += word[0] not in ".…["
            continue
        if not word.startswith("-"):
            num_arguments += 1
            continue
        name, sign, value = word.partition("=")
        option = options.get(name)
        if option is None:
            found.append(f"no option {name}")
        elif not option.is_flag:
            if not sign and not rest:
                found.append(f"{name} has no value")
                continue
            value = value if sign else rest.pop(0)
            if not PLACEHOLDER.fullmatch(value) and not is_convertible(option, value):
                found.append(f"{name} does not take {value!r}")
    if num_arguments > len(arguments):
        found.append(f"takes at most {len(arguments)} arguments")
    return found


def names_of(command: click.Command) -> dict[str, click.Option]:
    """Return a command's options by every name they go by, help included."""
    context = click.Context(command, info_name="autotune", help_option_names=["-h", "--help"])
    params = [param for param in command.get_params(context) if isinstance(param, click.Option)]
    return {name: p for p in params for name in (*p.opts, *p.secondary_opts)}


def is_convertible(option: click.Option, value: str) -> bool:
    try:
        option.type.convert(value, option, None)
    except click.BadParameter:
        return False
    return True


# --- Files that users copy ---


@pytest.mark.parametrize("path", PROFILES, ids=name_of)
def test_every_profile_loads_and_says_what_it_is_for(path: Path) -> None:
    profile = load_profile(path)
    assert build_schedule(profile).requests
    assert path.read_text(encoding="utf-8").startswith("# ")
    assert shipped_files("profiles")[path.stem] == path


@pytest.mark.parametrize("path", SPACES, ids=name_of)
def test_every_search_space_loads_and_says_what_it_is_for(path: Path) -> None:
    assert path.suffix == ".yaml"
    assert load_space(str(path)) == load_space(path.stem)
    assert path.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_yaml_of_a_page_loads(page: Path, tmp_path: Path) -> None:
    """A block with a line `version:` is a whole file; its prompt files need not be there."""
    wrong = []
    for _, language, body in FENCE.findall(page.read_text(encoding="utf-8")):
        if language.lower() in {"yaml", "yml"} and re.search(r"^version: ", body, re.MULTILINE):
            path = tmp_path / "block.yaml"
            path.write_text(body, encoding="utf-8")
            is_space = re.search(r"^parameters:", body, re.MULTILINE)
            try:
                load_space(str(path)) if is_space else load_profile(path)
            except InputError as err:
                wrong.append(str(err))
    assert wrong == []


# --- Commands ---


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_of_a_page_exists(page: Path) -> None:
    wrong = [
        f"{line}: {problem}" for line in command_lines(page) for problem in problems(line.words)
    ]
    assert wrong == []


def test_the_readme_shows_a_command() -> None:
    assert command_lines(README) or command_lines(README, "python3")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_explained(name: str) -> None:
    texts = [page.read_text(encoding="utf-8") for page in (README, CLI_PAGE) if page.exists()]
    assert any(re.search(rf"\bautotune {name}\b", text) for text in texts)


def test_a_wrong_command_is_found() -> None:
    cases = {
        "autotune serch": ["no command serch"],
        "autotune show --jsn": ["no option --jsn"],
        "autotune search --profile traffic.yaml --budget 90min": [
            "--budget does not take '90min'"
        ],
        "autotune search --trials many": ["--trials does not take 'many'"],
        "autotune export a b --out DIR": ["takes at most 1 arguments"],
        "autotune export STUDY --to vllm --out DIR --trial N": [],
        "autotune search --profile traffic.yaml --fresh --engine=simulated": [],
        "autotune --help": [],
    }
    for text, expected in cases.items():
        (words,) = [words for words in _commands(text) if words]
        assert problems(tuple(words)) == expected, text


def test_commands_are_found_behind_prompts_variables_and_pipes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    lines = (
        "$ A=1 autotune show \\",
        "  --json | jq .study  # a comment",
        "cd x && autotune demo",
    )
    page.write_text("\n".join(["```bash", *lines, "```", ""]), encoding="utf-8")
    found = [line.words for line in command_lines(page)]
    assert found == [("autotune", "show", "--json"), ("autotune", "demo")]


# --- Files and links ---


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    wrong = []
    for target in [*LINK.findall(text), *REFERENCE.findall(text)]:
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue  # https:, mailto:
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        is_there = file.exists() and ROOT in [file, *file.parents]
        has_anchor = not anchor or file.suffix != ".md" or (is_there and anchor in anchors(file))
        if not is_there or not has_anchor:
            wrong.append(target)
    assert wrong == []


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#{1,6} +(.*?) *#*$", text, re.MULTILINE)
    plain = [re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


def test_the_map_names_only_what_exists() -> None:
    assert MAP_PAGE.is_file(), "docs/architecture.md explains the packages"
    text = MAP_PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w./-])(autotune(?:/[\w.]+)+/?)", text))
    assert named, "it names the packages as `autotune/...`"
    assert sorted(name for name in named if not (ROOT / name.rstrip(".")).exists()) == []


def test_the_map_names_every_package() -> None:
    text = MAP_PAGE.read_text(encoding="utf-8")
    packages = [p.name for p in (ROOT / "autotune").iterdir() if (p / "__init__.py").is_file()]
    assert [name for name in sorted(packages) if f"autotune/{name}" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_named_in_commands_exist(page: Path) -> None:
    folders = "scripts|requirements|profiles|search_spaces|benchmarks"
    shipped = re.compile(rf"(?<![\w./-])((?:{folders})/[\w./-]+)")
    named = {name.rstrip(".") for block in code_blocks(page) for name in shipped.findall(block)}
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


# --- Packaging ---


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_what_the_wheel_takes_along_exists(project: dict[str, Any]) -> None:
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    for source, destination in wheel["force-include"].items():
        assert (ROOT / source).exists(), source
        assert destination.startswith("autotune/_data/")
    for package in wheel["packages"]:
        assert (ROOT / package / "__init__.py").is_file()
    for path in project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]:
        assert (ROOT / path.lstrip("/")).exists(), path
    assert (ROOT / project["project"]["readme"]).is_file()


def test_the_shipped_files_are_found_where_the_wheel_puts_them(project: dict[str, Any]) -> None:
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {
        folder: f"autotune/_data/{folder}" for folder in ("search_spaces", "profiles")
    }


def test_entry_points_exist(project: dict[str, Any]) -> None:
    for target in project["project"]["scripts"].values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_extras_that_messages_name_exist(project: dict[str, Any]) -> None:
    extras = set(project["project"]["optional-dependencies"])
    sources = [*(ROOT / "autotune").rglob("*.py"), *PAGES]
    named = {
        extra.strip()
        for path in sources
        for group in re.findall(r"autotune\[([\w, -]+)\]", path.read_text(encoding="utf-8"))
        for extra in group.split(",")
    }
    assert named <= extras


def test_the_cpu_lock_pins_everything() -> None:
    text = (ROOT / "requirements" / "cpu.lock").read_text(encoding="utf-8")
    for named in re.findall(r"(?:requirements|scripts)/[\w.]+\w", text):
        assert (ROOT / named).exists(), named
    lines = text.splitlines()
    pins = [line.split("#")[0].strip() for line in lines if line.strip() and line[0] not in "#- "]
    assert pins
    assert [pin for pin in pins if "==" not in pin] == []
    assert not [line for line in lines if "index-url" in line or "://" in line]
