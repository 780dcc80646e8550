"""Traffic profiles: good ones load, and every bad one is refused with what is wrong and where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from autotune.errors import InputError
from autotune.traffic.profile import (
    ConcurrencyLoad,
    MeasureSettings,
    RateLoad,
    TrafficProfile,
    load_profile,
)

ROOT = Path(__file__).parents[3]
PROFILES = sorted((ROOT / "profiles").glob("*.yaml"))

GOOD = """\
version: 1
name: support
load: {kind: concurrency, concurrency: 4}
classes:
  - prompts: {file: prompts.jsonl}
"""

Write = Callable[..., Path]


def test_a_short_profile_loads_with_its_defaults(write_profile: Write) -> None:
    path = write_profile(GOOD)
    traffic_profile = load_profile(path)

    assert traffic_profile.load == ConcurrencyLoad(kind="concurrency", concurrency=4)
    assert traffic_profile.endpoint == "chat"
    assert traffic_profile.seed == 0
    assert traffic_profile.measure == MeasureSettings()
    assert traffic_profile.folder == path.parent.resolve()
    (only,) = traffic_profile.classes
    assert (only.name, only.weight, only.slo) == ("default", 1.0, {})
    assert (only.output.max_tokens, only.output.ignore_eos) == (256, False)
    assert (only.sampling.temperature, only.sampling.top_p) == (0.0, 1.0)


def test_a_long_profile_loads_as_written(write_profile: Write) -> None:
    text = """\
version: 1
name: support-chat_2.0
model: owner/target
drafter: [owner/head-a, owner/head-b]
seed: 7
endpoint: completions
load: {kind: rate, rps: 6.5, arrival: constant, max_concurrency: 32}
measure: {min_requests: 200, warmup_requests: 0, max_duration_s: 60, request_timeout_s: 30}
classes:
  - name: chat
    weight: 0.7
    prompts: {file: prompts.jsonl, format: jsonl}
    output: {max_tokens: 64, ignore_eos: true}
    sampling: {temperature: 0.7, top_p: 0.95}
    slo: {ttft_p95_ms: 500, tpot_mean_ms: 25, e2el_p50_ms: 8000}
  - name: code
    weight: 0.3
    prompts: {builtin: demo/code}
objective: {maximize: goodput_tps, practical_margin_ratio: 0.05}
serve: {command: [docker, run, vllm], launch_timeout_s: 60, env: {A: "1"}}
"""
    traffic_profile = load_profile(write_profile(text))

    assert traffic_profile.drafters == ("owner/head-a", "owner/head-b")
    assert traffic_profile.load == RateLoad(
        kind="rate", rps=6.5, arrival="constant", max_concurrency=32
    )
    assert traffic_profile.measure.warmup_requests == 0
    assert traffic_profile.classes[0].slo == {
        "ttft_p95_ms": 500.0,
        "tpot_mean_ms": 25.0,
        "e2el_p50_ms": 8000.0,
    }
    assert traffic_profile.classes[1].prompts.builtin == "demo/code"
    assert traffic_profile.serve.command == ["docker", "run", "vllm"]


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.name)
def test_profiles_that_ship_load(path: Path) -> None:
    assert load_profile(path).classes


def test_some_profile_ships() -> None:
    assert PROFILES


def test_a_profile_cannot_be_changed(write_profile: Write) -> None:
    traffic_profile = load_profile(write_profile(GOOD))
    with pytest.raises(ValidationError, match="frozen"):
        traffic_profile.seed = 1  # type: ignore[misc]  # that is the point


# --- what the profile says ---


@pytest.mark.parametrize(
    ("load", "objective", "name", "is_maximized"),
    [
        ("{kind: concurrency, concurrency: 4}", "{}", "output_throughput_tps", True),
        ("{kind: rate, rps: 1}", "{}", "e2el_mean_ms", False),
        ("{kind: rate, rps: 1}", "{maximize: goodput_rps}", "goodput_rps", True),
        ("{kind: concurrency, concurrency: 4}", "{minimize: tpot_p95_ms}", "tpot_p95_ms", False),
    ],
)
def test_the_objective_follows_the_load_unless_given(
    write_profile: Write, load: str, objective: str, name: str, is_maximized: bool
) -> None:
    text = GOOD.replace("{kind: concurrency, concurrency: 4}", load)
    traffic_profile = load_profile(write_profile(f"{text}objective: {objective}\n"))
    assert (traffic_profile.objective_name, traffic_profile.is_maximized) == (name, is_maximized)


@pytest.mark.parametrize(
    ("load", "is_closed_loop", "offered"),
    [
        ("{kind: concurrency, concurrency: 4}", True, 4),
        ("{kind: rate, rps: 1, max_concurrency: 9}", False, 9),
        ("{kind: rate, rps: 1}", False, None),
    ],
)
def test_the_concurrency_it_offers(
    write_profile: Write, load: str, is_closed_loop: bool, offered: int | None
) -> None:
    text = GOOD.replace("{kind: concurrency, concurrency: 4}", load)
    traffic_profile = load_profile(write_profile(text))
    assert traffic_profile.is_closed_loop is is_closed_loop
    assert traffic_profile.offered_concurrency == offered


@pytest.mark.parametrize(
    ("drafter", "drafters"), [("null", ()), ("a/b", ("a/b",)), ("[a/b, c/d]", ("a/b", "c/d"))]
)
def test_drafters_are_none_one_or_several(
    write_profile: Write, drafter: str, drafters: tuple[str, ...]
) -> None:
    assert load_profile(write_profile(f"{GOOD}drafter: {drafter}\n")).drafters == drafters


# --- what is refused ---


def refusal(path: Path) -> str:
    """Return the message of the InputError that loading `path` ends in."""
    with pytest.raises(InputError) as caught:
        load_profile(path)
    return str(caught.value)


def swapped(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


# Each text, and what its message must hold after the file's name: key path, rule, value, advice.
BAD_VALUES = {
    "negative rate": (
        swapped("{kind: concurrency, concurrency: 4}", "{kind: rate, rps: -2.5}"),
        ["load.rps: ", "greater than 0", "but got -2.5"],
    ),
    "infinite rate": (
        swapped("{kind: concurrency, concurrency: 4}", "{kind: rate, rps: .inf}"),
        ["load.rps: ", "finite", "but got inf"],
    ),
    "no users": (
        swapped("concurrency: 4", "concurrency: 0"),
        ["load.concurrency: ", "greater than or equal to 1", "but got 0"],
    ),
    "two kinds of load": (
        swapped("concurrency: 4", "concurrency: 4, rps: 3"),
        ["load: ", "exactly one kind", "concurrency=4 and rps=3", "keep one of them"],
    ),
    "list of loads": (
        swapped("{kind: concurrency, concurrency: 4}", "[{kind: rate, rps: 1}]"),
        ["load: ", "exactly one kind"],
    ),
    "unknown kind of load": (
        swapped("kind: concurrency", "kind: concurency"),
        ["load", "concurency", "'concurrency', 'rate'"],
    ),
    "no kind of load": (
        swapped("kind: concurrency, ", ""),
        ["load", "kind"],
    ),
    "no load": (
        swapped("load: {kind: concurrency, concurrency: 4}\n", ""),
        ["load: the key is required"],
    ),
    "typo at the top": (f"{GOOD}sed: 3\n", ["sed: unknown key 'sed'", "Did you mean 'seed'?"]),
    "typo in the load": (
        swapped("concurrency: 4", "concurrency: 4, concurency: 3"),
        ["load.concurency: unknown key 'concurency'", "Did you mean 'concurrency'?"],
    ),
    "key of the other kind of load": (
        swapped("concurrency: 4", "concurrency: 4, arrival: poisson"),
        ["load.arrival: unknown key 'arrival'", "Valid: concurrency, kind."],
    ),
    "typo in a class": (
        swapped("  - prompts", "  - wieght: 2\n    prompts"),
        ["classes[0].wieght: unknown key 'wieght'", "Did you mean 'weight'?"],
    ),
    "typo in the prompts": (
        swapped("prompts.jsonl}", "prompts.jsonl, formt: text}"),
        ["classes[0].prompts.formt: unknown key", "Did you mean 'format'?"],
    ),
    "key without a neighbour": (
        f"{GOOD}qqq: 3\n",
        ["qqq: unknown key 'qqq'", "Valid: classes, drafter, endpoint, load"],
    ),
    "unknown limit": (
        f"{GOOD}    slo: {{ttft_p42_ms: 500}}\n",
        ["classes[0].slo: ", "(ttft|tpot|e2el)_(mean|p50|p90|p95|p99)_ms", "'ttft_p42_ms'"],
    ),
    "negative limit": (
        f"{GOOD}    slo: {{ttft_p95_ms: -500}}\n",
        ["classes[0].slo.ttft_p95_ms: ", "greater than 0", "but got -500"],
    ),
    "two classes of one name": (
        f"{GOOD}  - prompts: {{builtin: demo/chat}}\n",
        ["classes: ", "unique", "'default' stands twice"],
    ),
    "file and built-in set": (
        swapped("prompts.jsonl}", "prompts.jsonl, builtin: demo/chat}"),
        ["classes[0].prompts: ", "exactly one of `file` and `builtin`"],
    ),
    "neither file nor built-in set": (
        swapped("{file: prompts.jsonl}", "{format: text}"),
        ["classes[0].prompts: ", "exactly one of `file` and `builtin`"],
    ),
    "no classes": (
        swapped("  - prompts: {file: prompts.jsonl}\n", "  []\n"),
        ["classes: ", "at least 1"],
    ),
    "weight of nothing": (
        swapped("  - prompts", "  - weight: 0\n    prompts"),
        ["classes[0].weight: ", "greater than 0", "but got 0"],
    ),
    "text for a number": (
        f"{GOOD}    output: {{max_tokens: many}}\n",
        ["classes[0].output.max_tokens: ", "valid integer", "but got 'many'"],
    ),
    "too hot": (
        f"{GOOD}    sampling: {{temperature: 3}}\n",
        ["classes[0].sampling.temperature: ", "less than or equal to 2", "but got 3"],
    ),
    "two objectives": (
        f"{GOOD}objective: {{maximize: goodput_tps, minimize: tpot_p50_ms}}\n",
        ["objective: ", "only one of `maximize` and `minimize`"],
    ),
    "unknown objective": (
        f"{GOOD}objective: {{maximize: goodput}}\n",
        ["objective.maximize: ", "'goodput_tps'", "but got 'goodput'"],
    ),
    "margin of everything": (
        f"{GOOD}objective: {{practical_margin_ratio: 1}}\n",
        ["objective.practical_margin_ratio: ", "less than 1", "but got 1"],
    ),
    "two ways to start vLLM": (
        f"{GOOD}serve: {{python: /usr/bin/python3, command: [vllm]}}\n",
        ["serve: ", "only one of `python` and `command`"],
    ),
    "nothing to start vLLM with": (
        f"{GOOD}serve: {{command: []}}\n",
        ["serve: ", "`command` must not be empty"],
    ),
    "no version": (
        swapped("version: 1\n", ""),
        ["version: the key is required", "Write `version: 1`"],
    ),
    "version of the future": (
        swapped("version: 1", "version: 2"),
        ["version: ", "be 1", "but got 2"],
    ),
    "name with a space": (
        swapped("name: support", "name: my name"),
        ["name: ", "but got 'my name'"],
    ),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_a_bad_value_is_refused_with_its_place(write_profile: Write, case: str) -> None:
    text, told = BAD_VALUES[case]
    path = write_profile(text)
    message = refusal(path)
    assert message.startswith(f"{path}: ")
    for part in told:
        assert part in message


@pytest.mark.parametrize("case", BAD_VALUES)
def test_one_problem_is_told_once(write_profile: Write, case: str) -> None:
    message = refusal(write_profile(BAD_VALUES[case][0]))
    assert message.count("\n") == 0, message


def test_several_problems_are_told_together(write_profile: Write) -> None:
    extra = "".join(f"zz{number}: 1\n" for number in range(7))
    message = refusal(write_profile(GOOD + extra))
    assert "zz0" in message
    assert "zz4" in message
    assert "zz5" not in message
    assert message.splitlines()[-1] == "... and 2 more problems of this kind."


# --- files that are no YAML mapping ---

BILLION_LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{this}: &{this} [{', '.join([f'*{last}'] * 9)}]\n"
    for last, this in zip("abcdefgh", "bcdefghi", strict=True)
)

BAD_FILES = {
    # The bracket is opened in line 6; line 7 is the first that cannot go on.
    "open bracket": (f"{GOOD}seed: [1\nmodel: x\n", ":7:", "not valid YAML"),
    "tab": (f"{GOOD}\tseed: 1\n", ":6:1: ", "not valid YAML"),
    "key twice": (f"{GOOD}seed: 1\nseed: 2\n", ":7:1: ", "the key 'seed' stands twice"),
    "key twice below": (
        GOOD.replace("concurrency: 4}", "concurrency: 4, concurrency: 5}"),
        ":3:43: ",
        "the key 'concurrency' stands twice",
    ),
    "alias bomb": (BILLION_LAUGHS, ":2:", "aliases are not allowed"),
    "object tag": ("a: !!python/object/apply:os.system [ls]\n", ":1:4: ", "not valid YAML"),
    "too deep": ("a: " + "[" * 2000 + "]" * 2000, ":1:", "nesting deeper than 50 levels"),
    "list": ("- a\n- b\n", ": ", "must be a mapping of keys to values, but got 'list'"),
    "empty": ("", ": ", "must be a mapping of keys to values"),
    "number as a key": ("1: a\nversion: 1\n", ": ", "every key must be text, but got 1"),
    "control character": ("a: \0\n", ": ", "not valid YAML"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_is_no_mapping_is_refused(write_profile: Write, case: str) -> None:
    text, place, told = BAD_FILES[case]
    path = write_profile(text)
    message = refusal(path)
    assert message.startswith(f"{path}{place}")
    assert told in message


def test_the_alias_bomb_would_have_gone_off() -> None:
    # 9 to the power of 8 items: only counted here through identity, never expanded.
    loaded = yaml.safe_load(BILLION_LAUGHS)
    assert loaded["i"][0] is loaded["h"]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path / "nope.yaml")
    assert message == f"{tmp_path / 'nope.yaml'}: the traffic profile must exist. Check the path."


def test_a_folder_is_refused(tmp_path: Path) -> None:
    assert "the traffic profile must be a file" in refusal(tmp_path)


def test_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "traffic.yaml"
    path.write_bytes(b"name: caf\xe9\n")
    message = refusal(path)
    assert "must be UTF-8 text, but byte 9 is not" in message
    assert "iconv" in message


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "traffic.yaml"
    path.write_text("# " + "x" * 1_048_576, encoding="utf-8")
    assert "at most 1,048,576 bytes, but got 1048578" in refusal(path)


def test_paths_of_the_profile_start_at_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "traffic.yaml").write_text(GOOD, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert load_profile(Path("traffic.yaml")).folder == tmp_path.resolve()


def test_a_profile_made_in_code_has_the_current_folder() -> None:
    data = yaml.safe_load(GOOD)
    assert TrafficProfile.model_validate(data).folder == Path()
