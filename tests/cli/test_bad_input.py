"""Bad input ends in a message and an exit code: 2 for what was given, 1 for what failed.

A message names the file or option, the key in it, the value, and what to do. Whatever is given,
nobody sees a traceback, and real vLLM is not launched.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import optuna
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from autotune.errors import InputError
from autotune.search.space import load_space
from autotune.serving import vllm_install
from autotune.serving.capabilities import EngineInfo
from autotune.serving.vllm_engine import VllmEngine
from autotune.serving.vllm_install import VllmInstall
from autotune.store.records import LaunchRecord
from autotune.traffic.classes import PromptSource
from autotune.traffic.profile import load_profile
from autotune.traffic.prompts import load_prompts

Run = Callable[..., "subprocess.CompletedProcess[str]"]
WriteModel = Callable[..., Path]

INPUT, FAILED = 2, 1


def assert_refused(
    outcome: subprocess.CompletedProcess[str], code: int, *parts: str, lines: int | None = 1
) -> None:
    """Check the exit code, what stderr says, and that it is a message and not a traceback."""
    assert outcome.returncode == code, outcome.stdout + outcome.stderr
    assert "Traceback" not in outcome.stdout + outcome.stderr
    for part in parts:
        assert part in outcome.stderr
    if lines is not None:
        assert outcome.stderr.startswith("error: ")
        assert len(outcome.stderr.splitlines()) == lines, outcome.stderr


@pytest.fixture(autouse=True)
def _no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*arguments: object) -> NoReturn:
        pytest.fail("what was given is bad, but vLLM was launched with it")

    monkeypatch.setattr(VllmEngine, "launch", launch)


@pytest.fixture
def has_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that vLLM for CPU is installed."""
    info = EngineInfo(engine="vllm", version="0.32.0", device="cpu", hardware="a CPU")
    found = VllmInstall(("vllm", "serve"), True, info)
    monkeypatch.setattr("autotune.serving.vllm_engine.find_vllm", lambda *_: found)


# --- Files: what is written instead of one of them, and what is said about it ---

TRAFFIC, SPACE = "traffic.yaml", "space.yaml"


def values(text: str) -> str:
    return f"version: 1\nname: s\nparameters: {{num_speculative_tokens: {text}}}\n"


FILES: Mapping[str, tuple[str, str | bytes, tuple[str, ...]]] = {
    "malformed YAML": (TRAFFIC, "version: 1\nload: {kind: [\n", ("traffic.yaml:3:1: ", "not valid YAML")),
    "empty profile": (TRAFFIC, "", ("traffic.yaml: ", "must be a mapping of keys to values")),
    "profile in another encoding": (TRAFFIC, b"name: caf\xe9\n", ("UTF-8 text, but byte 9 is not", "iconv")),
    "malformed space": (SPACE, "version: 1\n\tname: s\n", ("space.yaml:2:1: ", "not valid YAML")),
    "K above the cap": (
        SPACE,
        values("{choices: [0, 33]}"),
        ("space.yaml: parameters: ", "num_speculative_tokens must be", "from 0 to 32, but got 33"),
    ),
    "K in a range above the cap": (SPACE, values("{range: [0, 33]}"), ("from 0 to 32, but got 33",)),
    "negative K": (SPACE, values("{choices: [-1]}"), ("space.yaml: parameters: ", "but got -1")),
    "negative K in a range": (SPACE, values("{range: [-1, 3]}"), ("from 0 to 32, but got -1",)),
    "K by halves": (SPACE, values("{choices: [1.5]}"), ("whole numbers from 0 to 32, but got 1.5",)),
    "fixed K above the cap": (
        SPACE,
        "version: 1\nname: s\nfixed: {num_speculative_tokens: 33}\nparameters: {weights: {choices: [fp8]}}\n",
        ("space.yaml: fixed: ", "from 0 to 32, but got 33"),
    ),
    "two ways to write values": (
        SPACE,
        values("{choices: [1], range: [0, 3]}"),
        ("parameters.num_speculative_tokens: ", "exactly one of `choices`, `range`"),
    ),
    "misspelt parameter": (
        SPACE,
        "version: 1\nname: s\nparameters: {num_speculative_token: {range: [0, 3]}}\n",
        ("unknown parameter 'num_speculative_token'", "Did you mean 'num_speculative_tokens'?"),
    ),
    "misspelt key of the space": (
        SPACE,
        values("{range: [0, 3]}") + "fixd: {}\n",
        ("fixd: unknown key 'fixd'", "Did you mean 'fixed'?"),
    ),
    "unknown weights": (
        SPACE,
        "version: 1\nname: s\nparameters: {weights: {choices: [fp4]}}\n",
        ("weights must be one of as_is, fp8, but got 'fp4'",),
    ),
    "option that is Autotune's own": (
        SPACE,
        "version: 1\nname: s\nparameters: {weights: {choices: [fp8]}}\nfixed: {port: 80}\n",
        ("'port' may not be set here", "a free port is chosen"),
    ),
    "empty prompt file": ("prompts.txt", "\n  \n", ("prompts.txt: ", "at least one record, but is empty")),
    "prompts in another encoding": (
        "prompts.txt",
        b"one\ntwo\xff\n",
        ("prompts.txt:2: ", "is not UTF-8 text"),
    ),
    "a single prompt": (
        "prompts.txt",
        "one\none\n",
        ("prompts.txt: ", "at least 2 distinct prompts", "but got 1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_bad_file_is_refused(case: str, folder: Path, search: Run) -> None:
    name, content, parts = FILES[case]
    data = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(data)

    assert_refused(search(), INPUT, name, *parts)
    assert not (folder / "autotune.db").exists()


PROFILES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "unknown key": ("version: 1", "version: 1\nsed: 3", ("sed: unknown key 'sed'", "Did you mean 'seed'?")),
    "unknown key below": (
        "max_tokens: 32",
        "max_token: 32",
        ("classes[0].output.max_token: unknown key", "Did you mean 'max_tokens'?"),
    ),
    "two kinds of load": (
        "concurrency: 4}",
        "concurrency: 4, rps: 3}",
        ("load: exactly one kind of load", "concurrency=4 and rps=3", "keep one of them"),
    ),
    "a list of loads": (
        "{kind: concurrency, concurrency: 4}",
        "[{kind: concurrency, concurrency: 4}, {kind: rate, rps: 3}]",
        ("load: exactly one kind of load",),
    ),
    "no users": ("concurrency: 4}", "concurrency: 0}", ("load.concurrency: ", "or equal to 1, but got 0")),
    "missing prompt file": (
        "prompts.txt",
        "nope.txt",
        ("nope.txt: the prompt file must exist", "Check the path."),
    ),
    "folder of prompts": ("prompts.txt", ".", ("the prompt file must be a file", "Check the path.")),
    "unknown built-in prompts": (
        "file: prompts.txt",
        "builtin: demo/math",
        ("prompts.builtin: ", "'demo/math'", "did you mean 'demo/maths'?"),
    ),
    "name of a folder that is too long": (
        "prompts.txt",
        "x" * 300,
        ("prompts.file: is no usable path", "Check the path."),
    ),
    "home of nobody": (
        "prompts.txt",
        "~nobody-has-this-name/prompts.txt",
        ("~nobody-has-this-name", "Check the path."),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PROFILES)
def test_a_bad_profile_is_refused(case: str, folder: Path, traffic: str, search: Run) -> None:
    old, new, parts = PROFILES[case]
    assert old in traffic
    (folder / TRAFFIC).write_text(traffic.replace(old, new), encoding="utf-8")

    assert_refused(search(), INPUT, *parts)


ODD_YAML = ("!!timestamp x", '!!int ""', '!!float ""', "!!bool x", "!!map ab", "2001-99-99")


@pytest.mark.parametrize("value", ODD_YAML)
@pytest.mark.parametrize("name", [TRAFFIC, SPACE])
def test_a_value_that_yaml_cannot_build_is_refused(
    value: str, name: str, folder: Path, search: Run
) -> None:
    (folder / name).write_text(f"version: 1\nname: {value}\n", encoding="utf-8")
    assert_refused(search(), INPUT, name, "not valid YAML")


def test_a_number_without_end_in_a_prompt_file_is_refused(
    folder: Path, traffic: str, search: Run
) -> None:
    (folder / "p.jsonl").write_text('{"prompt": 1' + "0" * 5000 + "}\n", encoding="utf-8")
    (folder / TRAFFIC).write_text(traffic.replace("prompts.txt", "p.jsonl"), encoding="utf-8")
    assert_refused(search(), INPUT, "p.jsonl:1: each line must be one JSON object")


@pytest.mark.parametrize("name", ["nope.yaml", "nope", "x" * 300, "~nobody-has-this-name/t.yaml"])
def test_a_missing_profile_is_refused(name: str, cli: Run) -> None:
    outcome = cli("search", "--profile", name, "--engine", "simulated")
    assert_refused(outcome, INPUT, name[:60], "Check the path.")


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("p-eagel", ("--space: ", "but got 'p-eagel'", "Did you mean 'p-eagle'?")),
        ("nope.yaml", ("nope.yaml: the search space must exist", "Check the path.")),
        ("x" * 300, ("--space: ", "is no usable path", "Check the path.")),
        ("~nobody-has-this-name/s.yaml", ("~nobody-has-this-name/s.yaml", "Check the path.")),
    ],
)
def test_an_unknown_space_is_refused(name: str, parts: tuple[str, ...], search: Run) -> None:
    assert_refused(search("--space", name), INPUT, *parts)


# --- Options ---


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--sampler", "tpee"), ("--sampler: must be one of auto, tpe,", "'tpee'", "Did you mean 'tpe'?")),
        (("--engine", "simulatd"), ("engine: ", "'simulatd'", "Did you mean 'simulated'?")),
        (("--engine", "os.path:Nothing"), ("the module 'os.path' must have the class", "'Nothing'")),
        (("--engine", "no_such_module:Engine"), ("'no_such_module' must be importable", "installed")),
        (("--engine", "json:JSONDecoder"), ("must be a subclass of autotune.serving.engine.Engine",)),
        (("--engine-option", "world=h100"), ("world: ", "but got 'h100'", "h100-8b")),
        (("--engine-option", "wrld=h100-8b"), ("wrld", "Did you mean 'world'?")),
        (("--engine-option", "faults=K=3:bang"), ("faults.K=3: ", "but got 'bang'")),
    ],
)  # fmt: skip
def test_an_unknown_name_is_refused(
    options: tuple[str, ...], parts: tuple[str, ...], search: Run
) -> None:
    assert_refused(search(*options), INPUT, *parts)


BAD_DURATIONS = ("90x", "-5m", "0", "0h", "soon", "1e3", "5 m", "nan", "inf", "")


@pytest.mark.parametrize("duration", BAD_DURATIONS)
def test_a_bad_duration_is_refused(duration: str, search: Run) -> None:
    parts = ("'--budget'", "such as 300s, 90m or 2h", f"but got {duration!r}")
    assert_refused(search("--budget", duration), INPUT, *parts, lines=None)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--trials", "0"), ("'--trials'", "0 is not in the range")),
        (("--repeats", "1"), ("'--repeats'", "1 is not in the range")),
        (("--finalists", "many"), ("'--finalists'", "'many' is not a valid integer")),
        (("--seed", "-1"), ("'--seed'", "-1 is not in the range")),
        (("--engine-option", "world"), ("--engine-option", "must be NAME=VALUE", "'world'")),
        (("--budgt", "5m"), ("--budgt", "--budget")),
        (("traffic.yaml",), ("unexpected extra argument", "traffic.yaml")),
    ],
)
def test_bad_usage_is_told(options: tuple[str, ...], parts: tuple[str, ...], search: Run) -> None:
    assert_refused(search(*options), INPUT, *parts, lines=None)


def test_a_search_needs_a_profile(cli: Run) -> None:
    assert_refused(cli("search"), INPUT, "Missing option '--profile'", lines=None)


def test_an_unknown_command_is_told_with_the_nearest(cli: Run) -> None:
    parts = ("no such command 'serch'", "Did you mean 'search'?")
    assert_refused(cli("serch"), INPUT, *parts, lines=None)


def test_an_unknown_command_far_from_all_is_told_with_the_list(cli: Run) -> None:
    parts = (
        "no such command 'zzz'",
        "Valid: dashboard, demo, doctor, export, noise, profile, search, show.",
    )
    assert_refused(cli("zzz"), INPUT, *parts, lines=None)


# --- Models ---

TARGET = {
    "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, "num_hidden_layers": 1,
    "vocab_size": 1000, "draft_vocab_size": 200, "ptd_token_id": 5,
}  # fmt: skip
SHAPES = {"mask_hidden": [1, 192], "fc.weight": [64, 192], "lm_head.weight": [200, 64]}


@pytest.fixture
def target(write_model: WriteModel) -> Path:
    return write_model("target", TARGET)


@pytest.fixture
def head(write_model: WriteModel) -> Path:
    return write_model("head", HEAD, SHAPES)


@pytest.mark.usefixtures("has_vllm", "target", "head")
def test_models_that_fit_are_planned_with(check: Run) -> None:
    outcome = check("--model", "target", "--drafter", "head", "--plan")
    assert outcome.returncode == 0, outcome.stderr
    assert "nothing was launched" in outcome.stdout


@pytest.mark.usefixtures("has_vllm")
def test_a_missing_model_folder_is_refused(folder: Path, traffic: str, check: Run) -> None:
    (folder / TRAFFIC).write_text(traffic.replace("owner/target", "./nowhere"), encoding="utf-8")
    parts = (
        "traffic.yaml: model: ",
        "must be an existing folder",
        "but got './nowhere'",
        "Check the path.",
    )
    assert_refused(check(), INPUT, *parts)


@pytest.mark.usefixtures("has_vllm")
def test_a_missing_model_of_the_command_line_is_told_by_its_option(check: Run) -> None:
    parts = ("--model: ", "must be an existing folder", "but got './nowhere'", "Check the path.")
    assert_refused(check("--model", "./nowhere"), INPUT, *parts)


@pytest.mark.usefixtures("has_vllm", "target")
@pytest.mark.parametrize("name", ["x" * 300, "~nobody-has-this-name/model"])
def test_a_path_that_cannot_be_is_refused(name: str, check: Run) -> None:
    assert_refused(check("--model", name), INPUT, "--model: is no usable path", "Check the path.")
    outcome = check("--model", "target", "--drafter", name)
    assert_refused(outcome, INPUT, "is no usable path", "Check the path.")


@pytest.mark.usefixtures("has_vllm")
def test_a_folder_without_a_model_is_refused(folder: Path, check: Run) -> None:
    (folder / "empty").mkdir()
    assert_refused(check("--model", "empty"), INPUT, "must hold a config.json", "'empty'")


@pytest.mark.usefixtures("has_vllm")
@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"hidden_size": -1}'])
def test_a_model_with_a_bad_config_is_refused(text: str, folder: Path, check: Run) -> None:
    (folder / "bad").mkdir()
    (folder / "bad" / "config.json").write_text(text, encoding="utf-8")
    assert_refused(check("--model", "bad"), INPUT, "error: ", "bad/config.json: ", lines=None)


@pytest.mark.usefixtures("has_vllm")
def test_a_model_that_was_not_downloaded_is_told_with_the_command(
    check: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(folder / "hub"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    parts = ("'owner/target'", "local Hugging Face cache", "hf download owner/target")
    assert_refused(check(), FAILED, *parts)


@pytest.mark.usefixtures("has_vllm", "target")
@pytest.mark.parametrize("name", ["./nowhere", "no/such/folder"])
def test_a_missing_drafter_folder_is_refused(name: str, check: Run) -> None:
    parts = ("drafter: ", "must be an existing folder", f"but got '{name}'", "Check the path.")
    assert_refused(check("--model", "target", "--drafter", name), INPUT, *parts)


@pytest.mark.usefixtures("has_vllm", "target")
@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"target_hidden_size": 128}, ("hidden size 128, but target has 64",)),
        ({"vocab_size": 2000}, ("vocabulary 2,000, but target has 1,000",)),
    ],
)
def test_a_drafter_for_another_target_is_refused(
    change: Mapping[str, int], parts: tuple[str, ...], write_model: WriteModel, check: Run
) -> None:
    write_model("head", {**HEAD, **change})
    advice = "Give a head that was trained for this target."
    outcome = check("--model", "target", "--drafter", "head")
    assert_refused(outcome, INPUT, "--drafter: head was made for a target with", *parts, advice)


@pytest.mark.usefixtures("has_vllm", "target")
def test_the_tensors_say_for_which_target_a_drafter_is(
    write_model: WriteModel, check: Run
) -> None:
    write_model("head", HEAD, {**SHAPES, "fc.weight": [64, 3 * 128]})
    outcome = check("--model", "target", "--drafter", "head")
    assert_refused(outcome, INPUT, "hidden size 128, but target has 64")


@pytest.mark.usefixtures("has_vllm", "target")
def test_a_drafter_that_is_no_head_is_refused(write_model: WriteModel, check: Run) -> None:
    write_model("head", {**HEAD, "architectures": ["LlamaForCausalLM"]})
    outcome = check("--model", "target", "--drafter", "head")
    assert_refused(
        outcome, INPUT, "head/config.json: architectures: ", "but got 'LlamaForCausalLM'"
    )


@pytest.fixture
def write_tokenizer() -> Callable[[Path], None]:
    tokenizers: Any = pytest.importorskip(
        "tokenizers", reason="without the package tokenizers, prompts cannot be counted exactly"
    )

    def write(model: Path) -> None:
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        words.save(str(model / "tokenizer.json"))

    return write


@pytest.mark.usefixtures("has_vllm", "head")
@pytest.mark.parametrize("num_words", [32, 33])
def test_a_prompt_longer_than_the_model_is_refused(
    num_words: int,
    folder: Path,
    write_model: WriteModel,
    write_tokenizer: Callable[[Path], None],
    check: Run,
) -> None:
    # The profile asks for 32 output tokens, so 32 words are all that fit into 64.
    write_tokenizer(write_model("target", {**TARGET, "max_position_embeddings": 64}))
    long = " ".join(["word"] * num_words)
    (folder / "prompts.txt").write_text(f"short\n{long}\n", encoding="utf-8")
    outcome = check("--model", "target", "--drafter", "head", "--plan")

    if num_words == 32:
        assert outcome.returncode == 0, outcome.stderr
    else:
        parts = (
            "traffic.yaml: classes.default: ",
            "must fit into the model's 64 tokens",
            "but got 65",
        )
        assert_refused(outcome, INPUT, *parts, "begins with 'word word", "or lower max_tokens")


# --- vLLM ---


def test_no_vllm_is_told_with_ways_to_get_one(check: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_install, "_installed", lambda interpreter: {})
    ways = (
        'pip install "autotune[cuda]"',
        'pip install "autotune[cpu]"',
        "--vllm-python",
        "--engine simulated",
    )
    assert_refused(check(), FAILED, "vLLM is not installed for", sys.executable, *ways)


@pytest.mark.parametrize("name", ["nowhere/python", "x" * 300, "~nobody-has-this-name/python"])
def test_an_interpreter_that_does_not_exist_is_refused(name: str, check: Run) -> None:
    rule = "path of a Python interpreter" if name.startswith("nowhere") else "is no usable path"
    parts = ("--vllm-python: ", rule, f"but got '{name[:60]}")
    assert_refused(check("--vllm-python", name), INPUT, *parts)


def test_an_interpreter_of_the_profile_that_does_not_exist_is_refused(
    check: Run, folder: Path, traffic: str
) -> None:
    text = f"{traffic}serve: {{python: nowhere/python}}\n"
    (folder / TRAFFIC).write_text(text, encoding="utf-8")
    assert_refused(check(), INPUT, "path of a Python interpreter", "but got 'nowhere/python'")


def test_a_file_that_is_no_interpreter_is_refused(check: Run, folder: Path) -> None:
    (folder / "python").write_text("not a program", encoding="utf-8")
    outcome = check("--vllm-python", str(folder / "python"))
    assert_refused(outcome, FAILED, str(folder / "python"), "cannot be asked for its packages")


def test_a_command_that_does_not_exist_is_refused(check: Run, folder: Path, traffic: str) -> None:
    text = f"{traffic}serve: {{command: [no-such-program-anywhere]}}\n"
    (folder / TRAFFIC).write_text(text, encoding="utf-8")
    parts = ("serve.command: 'no-such-program-anywhere' cannot be found", "Check the path.")
    assert_refused(check(), FAILED, *parts)


# --- The output folder ---


def no_space(*arguments: object, **options: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_output_folder_below_a_file_is_refused(search: Run, folder: Path) -> None:
    outcome = search("--out", "prompts.txt/out")
    assert_refused(
        outcome, INPUT, "--out: prompts.txt/out cannot be written to", "Give another folder"
    )
    assert not (folder / "autotune.db").exists()


def test_an_output_folder_that_is_a_file_is_refused(search: Run) -> None:
    assert_refused(
        search("--out", "prompts.txt"), INPUT, "--out: prompts.txt cannot be written to"
    )


def test_a_full_disk_is_told_before_the_search(
    search: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "write_bytes", no_space)
    parts = ("--out: out cannot be written to", "No space left on device", "make space")
    assert_refused(search("--out", "out"), INPUT, *parts)


@pytest.mark.usefixtures("finished")
def test_an_export_below_a_file_is_refused(cli: Run) -> None:
    outcome = cli("export", "--out", "prompts.txt/out")
    assert_refused(
        outcome, INPUT, "--out: prompts.txt/out cannot be written to", "Give another folder"
    )


@pytest.mark.usefixtures("finished")
def test_an_export_to_a_full_disk_leaves_nothing_half_written(
    cli: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "write_text", no_space)
    parts = ("--out: out cannot be written to", "No space left on device")
    assert_refused(cli("export", "--out", "out"), INPUT, *parts)
    assert list((folder / "out").iterdir()) == []


# Sizes at which a file must not grow any further, which is what a full disk looks like from inside:
# while our tables are made, while Optuna's are made, and in the middle of the search.
FULL_AT_BYTES = (40_000, 120_000, 400_000)
RUN_IN_LITTLE_SPACE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
from autotune.cli.main import run
sys.exit(run(sys.argv[2:]))
"""


@pytest.fixture
def in_little_space(
    folder: Path, environment: Mapping[str, str], search_arguments: tuple[str, ...]
) -> Callable[[int], subprocess.CompletedProcess[str]]:
    """Give a function that runs a search whose files cannot grow past a number of bytes."""

    def call(num_bytes: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", RUN_IN_LITTLE_SPACE, str(num_bytes), *search_arguments]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
        )

    return call


@pytest.mark.parametrize("num_bytes", FULL_AT_BYTES)
def test_a_database_that_cannot_grow_is_told(num_bytes: int, in_little_space: Run) -> None:
    outcome = in_little_space(num_bytes)
    assert_refused(outcome, FAILED, "autotune.db: the study database cannot be used")


@pytest.mark.parametrize("num_bytes", FULL_AT_BYTES)
def test_a_search_goes_on_when_there_is_space_again(
    num_bytes: int, in_little_space: Run, search: Run
) -> None:
    assert in_little_space(num_bytes).returncode != 0
    outcome = search()
    assert outcome.returncode == 0, outcome.stderr


# --- Databases ---

READERS = (("show",), ("export", "--out", "out"), ("dashboard", "--port", "0"))
reader = pytest.mark.parametrize("arguments", READERS, ids=lambda arguments: arguments[0])


def make_database(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


@reader
def test_a_missing_database_is_told(arguments: tuple[str, ...], cli: Run, folder: Path) -> None:
    parts = ("autotune.db: no study database is there", "Run `autotune search` first", "--storage")
    assert_refused(cli(*arguments), INPUT, *parts)
    assert not (folder / "autotune.db").exists()


@reader
def test_a_file_that_is_no_database_is_refused(arguments: tuple[str, ...], cli: Run) -> None:
    parts = ("prompts.txt: is not a SQLite database", "--storage")
    assert_refused(cli(*arguments, "--storage", "prompts.txt"), INPUT, *parts)


@reader
def test_a_folder_for_a_database_is_refused(arguments: tuple[str, ...], cli: Run) -> None:
    outcome = cli(*arguments, "--storage", ".")
    assert_refused(outcome, INPUT, "--storage: must be a file, not a folder")


def test_a_search_refuses_a_folder_and_a_file_that_is_no_database(
    search: Run, folder: Path
) -> None:
    (folder / "notes").mkdir()
    assert_refused(search("--storage", "notes"), INPUT, "must be a file, not a folder")
    before = (folder / "prompts.txt").read_bytes()
    assert_refused(search("--storage", "prompts.txt"), INPUT, "is not a SQLite database")
    assert (folder / "prompts.txt").read_bytes() == before


def test_a_search_into_a_folder_that_is_not_there_is_refused(search: Run) -> None:
    outcome = search("--storage", "nowhere/studies.db")
    assert_refused(outcome, INPUT, "nowhere/studies.db: the folder of the database must exist")


def test_a_damaged_database_is_refused(finished: Path, cli: Run) -> None:
    data = bytearray((finished / "autotune.db").read_bytes())
    data[100:4096] = b"\xff" * 3996
    (finished / "damaged.db").write_bytes(data)
    outcome = cli("show", "--storage", "damaged.db")
    assert_refused(outcome, INPUT, "damaged.db: is not a usable SQLite database")


# A table called `studies` is what Optuna has as well; it does not make a database Optuna's.
@pytest.mark.parametrize("table", ["customers", "studies"])
@pytest.mark.parametrize("does_search", [False, True], ids=["show", "search"])
def test_a_database_of_another_program_is_refused_and_left_alone(
    table: str, does_search: bool, folder: Path, cli: Run, search: Run
) -> None:
    make_database(folder / "crm.db", f"CREATE TABLE {table} (name TEXT)")
    before = (folder / "crm.db").read_bytes()
    storage = ("--storage", "crm.db")

    outcome = search(*storage) if does_search else cli("show", *storage)

    parts = ("crm.db: is a database, but not one of Autotune's", table, "--storage")
    assert_refused(outcome, INPUT, *parts)
    assert (folder / "crm.db").read_bytes() == before


@reader
def test_a_database_of_a_newer_version_is_refused(
    arguments: tuple[str, ...], finished: Path, cli: Run
) -> None:
    make_database(
        finished / "autotune.db", "UPDATE autotune_schema_version SET version_num = '9999'"
    )
    parts = (
        "autotune.db: was written by a newer Autotune",
        "schema 9999",
        "Update Autotune",
        "--storage",
    )
    assert_refused(cli(*arguments), FAILED, *parts)


def test_a_search_refuses_a_database_of_a_newer_version(finished: Path, search: Run) -> None:
    make_database(
        finished / "autotune.db", "UPDATE autotune_schema_version SET version_num = '9999'"
    )
    assert_refused(search(), FAILED, "was written by a newer Autotune")


@pytest.mark.parametrize(
    ("storage", "code", "parts"),
    [
        (
            "mysql://me:secret@127.0.0.1/x",
            INPUT,
            ("must be SQLite or PostgreSQL", "mysql://me:***@"),
        ),
        ("://", INPUT, ("--storage: must be a path or a database URL", "'://'")),
        ("postgresql+nope://me:secret@127.0.0.1:1/x", INPUT, ("--storage: ", "postgresql+nope")),
        ("~nobody-has-this-name/studies.db", INPUT, ("~nobody-has-this-name/studies.db",)),
        ("x" * 300, INPUT, ("x" * 100, "is no usable path")),
    ],
)
def test_a_bad_storage_is_refused(
    storage: str, code: int, parts: tuple[str, ...], cli: Run
) -> None:
    outcome = cli("show", "--storage", storage)
    assert_refused(outcome, code, *parts)
    assert "secret" not in outcome.stderr


def test_a_server_that_cannot_be_reached_is_told_without_the_password(cli: Run) -> None:
    """With the driver there is no such server; without it the driver is what is missing."""
    outcome = cli("show", "--storage", "postgresql://me:secret@127.0.0.1:1/x")
    assert_refused(outcome, FAILED, lines=None)
    assert outcome.stderr.startswith("error: ")
    assert "secret" not in outcome.stderr


# --- Studies ---


@pytest.mark.usefixtures("finished")
@pytest.mark.parametrize("arguments", READERS[:2], ids=lambda arguments: arguments[0])
def test_an_unknown_study_is_told_with_the_known_ones(
    arguments: tuple[str, ...], cli: Run, search: Run
) -> None:
    assert search("--study", "other", "--trials", "1").returncode == 0
    parts = (
        "autotune.db: no study is called 'tinny'",
        "Did you mean 'tiny'?",
        "Known: tiny, other.",
    )
    assert_refused(cli(arguments[0], "tinny", *arguments[1:]), INPUT, *parts)


@pytest.mark.parametrize("arguments", READERS[:2], ids=lambda arguments: arguments[0])
def test_a_database_without_studies_is_told(
    arguments: tuple[str, ...], cli: Run, folder: Path
) -> None:
    (folder / "autotune.db").touch()
    parts = ("autotune.db: holds no study yet", "Run `autotune search` first")
    assert_refused(cli(*arguments), INPUT, *parts)


def test_a_study_without_a_decision_is_not_exported(cli: Run, search: Run, folder: Path) -> None:
    searched = search("--budget", "1s")
    assert searched.returncode == 1
    assert "larger --budget" in searched.stdout

    parts = ("study 'tiny' has no decision yet", "--trial N", "autotune show")
    assert_refused(cli("export", "--out", "out"), FAILED, *parts)
    assert not (folder / "out").exists()


@pytest.mark.usefixtures("finished")
def test_an_unknown_export_target_is_refused(cli: Run, folder: Path) -> None:
    outcome = cli("export", "--to", "vlm", "--out", "out")
    assert_refused(outcome, INPUT, "--to: ", "but got 'vlm'", "Did you mean 'vllm'?")
    assert not (folder / "out").exists()


@pytest.mark.usefixtures("finished")
def test_an_unknown_trial_is_refused_with_the_measured_ones(cli: Run) -> None:
    outcome = cli("export", "--trial", "99", "--out", "out")
    assert_refused(outcome, INPUT, "--trial: ", "but got 99", "Measured: 0, 1, 2.")


def test_a_search_without_a_feasible_trial_fails_with_the_nearest_miss(
    folder: Path, traffic: str, search: Run, launches: Callable[..., list[LaunchRecord]]
) -> None:
    text = f"{traffic}    slo: {{ttft_p95_ms: 0.001}}\n"
    (folder / TRAFFIC).write_text(text, encoding="utf-8")
    parts = (
        "study 'tiny': none of 3 launches is feasible",
        "Nearest miss: K=", "default.ttft_p95_ms is", "% above its limit", "Raise the limit",
    )  # fmt: skip
    assert_refused(search(), FAILED, *parts, lines=2)
    assert len(launches()) == 3


def test_a_search_whose_launches_all_fail_says_why(search: Run) -> None:
    faults = ",".join(f"K={k}:insufficient_memory" for k in (0, 2, 3, 8))
    parts = ("none of 3 launches is feasible", "3 failed (insufficient_memory)", "injected fault")
    assert_refused(search("--engine-option", f"faults={faults}"), FAILED, *parts, lines=2)


# What is changed, in which file or by which options, and what is said to differ.
CHANGES: Mapping[str, tuple[str, str, str, tuple[str, ...], str]] = {
    "load": (TRAFFIC, "concurrency: 4", "concurrency: 8", (), "traffic.load.concurrency: 4 -> 8"),
    "class": (
        TRAFFIC, "max_tokens: 32", "max_tokens: 48", (),
        "traffic.classes[0].output.max_tokens: 32 -> 48",
    ),
    "model": (TRAFFIC, "owner/target", "owner/b", (), "model: 'owner/target' -> 'owner/b'"),
    "drafter": (TRAFFIC, "owner/head", "owner/b", (), "drafters[0]: 'owner/head' -> 'owner/b'"),
    "space": (
        SPACE, "[0, 2, 3, 8]", "[0, 2, 4, 8]", (),
        "space.parameters.num_speculative_tokens.choices[2]: 3 -> 4",
    ),
    "prompts": (
        "prompts.txt", "question 3", "question three", (),
        "the content of the prompt files has changed",
    ),
    "seed": (TRAFFIC, "", "", ("--seed", "5"), "seed: 0 -> 5"),
    "engine": (
        TRAFFIC, "", "", ("--engine-option", "world=l40s-8b"),
        "engine.hardware: 'simulated H100 SXM' -> 'simulated L40S'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_a_study_defined_otherwise_is_refused_with_what_differs(
    case: str, finished: Path, search: Run, launches: Callable[..., list[LaunchRecord]]
) -> None:
    name, old, new, options, difference = CHANGES[case]
    text = (finished / name).read_text(encoding="utf-8")
    assert old in text
    (finished / name).write_text(text.replace(old, new), encoding="utf-8")
    num_launches = len(launches())

    parts = (
        "autotune.db: study 'tiny' exists and was defined otherwise",
        f"  {difference}\n",
        "--study",
        "--fresh",
    )
    assert_refused(search(*options), INPUT, *parts, lines=3)
    assert len(launches()) == num_launches


def test_an_optuna_study_of_the_same_name_is_refused(folder: Path, search: Run, cli: Run) -> None:
    optuna.create_study(storage=f"sqlite:///{folder}/autotune.db", study_name="tiny")
    parts = (
        "autotune.db: an Optuna study called 'tiny' exists",
        "not Autotune's",
        "--study",
        "--storage",
    )
    assert_refused(search(), INPUT, *parts)
    assert_refused(search("--fresh"), INPUT, *parts)

    assert search("--study", "mine").returncode == 0
    names = optuna.get_all_study_names(f"sqlite:///{folder}/autotune.db")
    assert sorted(names) == ["mine", "tiny"]


# --- The dashboard ---


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.usefixtures("finished")
def test_a_port_that_is_taken_is_told(cli: Run, taken_port: int) -> None:
    pytest.importorskip("optuna_dashboard", reason="the dashboard is an optional package")
    parts = (
        f"--port: 127.0.0.1:{taken_port} cannot be listened on",
        "Give another port with --port",
    )
    assert_refused(cli("dashboard", "--port", str(taken_port)), FAILED, *parts)


@pytest.mark.usefixtures("finished")
def test_a_dashboard_that_is_not_installed_is_told_with_the_command(
    cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    assert_refused(cli("dashboard"), FAILED, 'pip install "autotune[dashboard]"')


# --- As a user sees it ---


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (("search", "--profile", "nope.yaml"), INPUT, "nope.yaml: the traffic profile must exist"),
        (("show",), INPUT, "no study database is there"),
    ],
)  # fmt: skip
def test_a_process_ends_with_the_code_and_the_message(
    arguments: tuple[str, ...], code: int, parts: str, process: Run
) -> None:
    outcome = process(*arguments)
    assert_refused(outcome, code, parts)
    assert outcome.stdout == ""


def test_debug_shows_the_traceback(process: Run) -> None:
    outcome = process("--debug", "search", "--profile", "nope.yaml")
    assert outcome.returncode != 0
    assert "Traceback" in outcome.stderr
    assert "the traffic profile must exist" in outcome.stderr


# --- Whatever a file holds: it loads, or InputError says what is wrong ---

KEYS = (
    "version", "name", "model", "drafter", "seed", "endpoint", "load", "kind", "concurrency", "rps",
    "arrival", "measure", "min_requests", "classes", "prompts", "file", "builtin", "format",
    "output", "max_tokens", "slo", "ttft_p95_ms", "objective", "maximize", "serve", "command", "env",
    "parameters", "fixed", "num_speculative_tokens", "weights", "max_num_seqs", "choices", "range",
    "powers_of_two", "some-option", "<<", "=", "~",
)  # fmt: skip
SCALARS = (
    "1", "0", "-1", "33", "1.5", ".inf", ".nan", "true", "~", "''", "concurrency", "rate", "[0, 33]",
    "demo/chat", "fp8", "2001-12-14", "0o17", "1:30", "1e400", "9" * 4400, "&a b", "*a", "!!str x",
    "!!int x", "!!set x", "!!binary x", "!!omap [1]", "!!python/name:os.system", '"\\ud800"', '"\\0"',
    "[", "{", "? [a]", "@", "%",
)  # fmt: skip

scalars = st.one_of(st.sampled_from(SCALARS), st.integers().map(str), st.text(max_size=8))
keys = st.one_of(st.sampled_from(KEYS), scalars)
yaml_values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.dictionaries(keys, inner, max_size=4).map(
            lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs.items()) + "}"
        ),
    ),
    max_leaves=8,
)
yaml_files = st.one_of(
    st.dictionaries(keys, yaml_values, max_size=6).map(
        lambda pairs: "".join(f"{key}: {value}\n" for key, value in pairs.items())
    ),
    # Version, name and the like are in order, so that what stands deeper is looked at.
    yaml_values.map(lambda value: f"version: 1\nname: n\nload: {value}\nclasses: {value}\n"),
    yaml_values.map(lambda value: f"version: 1\nname: n\nparameters: {value}\nfixed: {value}\n"),
    yaml_values.map(lambda value: f"version: 1\nname: n\nparameters: {{weights: {value}}}\n"),
).map(lambda text: text.encode("utf-8", "surrogatepass"))
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["prompt", "question", "messages", "turns", "role", "content", "x"]),
            inner,
        ),
    ),
    max_leaves=6,
)
prompt_files = st.lists(json_values, max_size=3).map(
    lambda rows: "\n".join(json.dumps(row) for row in rows).encode()
)
any_file = st.one_of(
    st.binary(max_size=64),
    st.text(max_size=64).map(lambda text: text.encode("utf-8", "surrogatepass")),
)

# The same examples in every run: a test that fails now and then helps nobody.
fuzz = settings(
    max_examples=200, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def loads_or_is_refused(load: Callable[[], object]) -> None:
    try:
        load()
    except InputError as err:
        assert str(err)  # noqa: PT017  # it need not be raised at all


@fuzz
@given(content=st.one_of(yaml_files, any_file))
@example(content=b'version: 1\nname: !!int ""\n')
@example(content=b"version: 1\nname: !!timestamp x\n")
@example(content=b"version: 1\nname: !!bool x\n")
@example(content=b'version: 1\n"\\ud800": 1\n')
def test_any_profile_loads_or_is_refused(content: bytes, scratch: Path) -> None:
    path = scratch / "traffic.yaml"
    path.write_bytes(content)
    loads_or_is_refused(lambda: load_profile(path))


@fuzz
@given(content=st.one_of(yaml_files, any_file))
@example(content=b'version: 1\nname: !!float ""\n')
@example(content=b"version: 1\nname: s\nparameters: {weights: {choices: [[]]}}\n")
@example(content=b"version: 1\nname: s\nparameters: {max_num_seqs: {powers_of_two: [3, 3]}}\n")
def test_any_space_loads_or_is_refused(content: bytes, scratch: Path) -> None:
    path = scratch / "space.yaml"
    path.write_bytes(content)
    loads_or_is_refused(lambda: load_space(str(path)))


@fuzz
@given(
    content=st.one_of(prompt_files, yaml_files, any_file), suffix=st.sampled_from(["jsonl", "txt"])
)
@example(content=b'{"prompt": 1' + b"0" * 5000 + b"}", suffix="jsonl")
@example(content=b"[" * 100_000, suffix="jsonl")
@example(content=b'{"prompt": "\\ud800"}', suffix="jsonl")
def test_any_prompt_file_loads_or_is_refused(content: bytes, suffix: str, scratch: Path) -> None:
    path = scratch / f"prompts.{suffix}"
    path.write_bytes(content)
    loads_or_is_refused(lambda: load_prompts(PromptSource(file=path), scratch))


@fuzz
@given(name=st.text(max_size=300))
@example(name="~nobody-has-this-name/x")
@example(name="x" * 300)
@example(name="a\0b")
def test_any_path_loads_or_is_refused(name: str, scratch: Path) -> None:
    loads_or_is_refused(lambda: load_profile(Path(name)))
    loads_or_is_refused(lambda: load_space(name))
    try:
        source = PromptSource(file=Path(name))
    except ValidationError:
        return
    loads_or_is_refused(lambda: load_prompts(source, scratch))
