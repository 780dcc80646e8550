"""`autotune profile show` and `autotune profile schema`: what they print, and never print."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from autotune.cli import profile_schema, profile_show
from autotune.errors import InputError
from autotune.report.traffic import draw_traffic, view_traffic
from autotune.traffic.drawing import build_schedule
from autotune.traffic.pools import Part
from autotune.traffic.profile import load_profile
from autotune.traffic.schema import profile_schema as expected_schema
from autotune.traffic.tokens import EstimatedTokens

Show = Callable[..., str]

RATE = """\
version: 1
name: shop
seed: 4
load: {kind: stages, stages: [{rps: 2, duration_s: 30}, {rps: 6, duration_s: 10}]}
measure: {warmup: 5}
classes:
  - name: chat
    weight: 3
    prompts: {file: prompts.jsonl, holdout: 0.5}
    output: {max_tokens: {from: data}}
    slo: {ttft_p95_ms: 500, tpot_p99_ms: 25.5}
  - name: code
    prompts: {file: other.jsonl}
    output: {max_tokens: 64}
"""
FULL = """\
version: 1
name: full
load: {kind: concurrency, concurrency: 3}
measure: {min_requests: 12}
classes: [{prompts: {file: prompts.jsonl}}]
"""


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Show:
    """Give a function that shows a profile, from a folder that has prompts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path / "cache"))
    for name, num_words in (("prompts", 10), ("other", 90)):
        rows = [
            {"prompt": f"{name}{n} " + "secret " * num_words, "max_tokens": 10 * (n + 1)}
            for n in range(40)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")

    def call(text: str, *options: str) -> str:
        (tmp_path / "traffic.yaml").write_text(text, encoding="utf-8")
        result = CliRunner().invoke(profile_show.command, ["traffic.yaml", *options])
        if result.exception is not None:
            raise result.exception
        return result.output

    return call


def drawn(width: int) -> str:
    view = view_traffic(load_profile(Path("traffic.yaml")), EstimatedTokens(), 4)
    console = Console(width=width, file=io.StringIO())
    for part in draw_traffic(view, width):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_it_says_what_is_sent(show: Show) -> None:
    shown = show(RATE)
    profile = load_profile(Path("traffic.yaml"))
    digest = build_schedule(profile).digest
    held = build_schedule(profile, part=Part.HOLDOUT).digest

    lines = shown.splitlines()
    assert lines[0] == "shop: open loop, 2 stages in 40 s"
    # 2 x 30 + 6 x 10 = 120 requests, 3 : 1.
    assert "120 requests a measurement, 5 before it to warm up; endpoint chat; seed 4" in shown
    assert "duration: 40.0 s of arrivals" in shown
    assert "prompts: user; tokens are estimated, 4 characters each" in shown
    assert f"schedule: {digest}; on held-out prompts {held}" in shown
    # 40 prompts: 8 for the warm-up, 32 measured, half of them held out.
    assert "chat: 90 requests (75% by weight), 16 prompts" in shown
    assert "code: 30 requests (25% by weight), 30 prompts" in shown
    assert "limits: ttft_p95_ms 500, tpot_p99_ms 25.5" in shown


def test_it_draws_arrivals_over_time(show: Show) -> None:
    shown = show(RATE)
    start = shown.index("arrivals, requests per second")
    chart = [line.partition("│")[2] for line in shown[start:].splitlines()[1:7]]
    axis = shown[start:].splitlines()[7]
    assert axis.strip().startswith("└0 s")
    assert axis.endswith("40 s")
    # 2 a second for three quarters of the time, then 6: only the last quarter is high.
    width = max(len(line) for line in chart)
    heights = [
        sum(place < len(line) and line[place] != " " for line in chart) for place in range(width)
    ]
    late = heights[width * 3 // 4 :]
    early = heights[: width * 3 // 4 - 1]
    assert sum(late) / len(late) > 1.8 * sum(early) / len(early)


def test_it_draws_lengths_of_every_class(show: Show) -> None:
    shown = show(RATE)
    chat, code = shown[shown.index("chat: ") :].split("code: ", 1)
    # "prompts7 " and ten times "secret ": 79 or 80 characters, 20 tokens; 90 times: 159 or 160.
    assert "  tokens of a prompt (estimated): 20" in chat
    assert "16–31 90 " in chat
    # The rows' own limits: 10, 20, ... 400.
    assert "answer" in chat
    assert "256–511 " in chat
    assert "128–255 30 " in code
    assert "tokens of an answer, at most: 64" in code


def test_closed_loops_have_no_arrivals_to_draw(show: Show) -> None:
    shown = show(FULL)
    assert "full: closed loop, 3 at once" in shown
    assert "duration: as long as the server takes, since the next request follows" in shown
    assert "requests per second" not in shown


@pytest.mark.parametrize("width", [60, 140])
@pytest.mark.parametrize("text", [RATE, FULL], ids=["open", "closed"])
def test_it_fits_the_terminal(show: Show, text: str, width: int) -> None:
    show(text)
    lines = drawn(width).splitlines()
    assert max(len(line) for line in lines) <= width
    if text is RATE:
        # The chart takes what room there is, up to a hundred columns.
        axis = next(line for line in lines if "└" in line)
        assert len(axis) > min(width, 110) - 30


def test_what_limits_results_is_told(show: Show) -> None:
    shown = " ".join(show(RATE).split())
    assert (
        "Caveat: classes[0].slo.tpot_p99_ms: a p99 limit needs at least 299 requests of class "
        "'chat'; at 0.75 x 3 rps that takes 133 s, the window is 40 s."
    ) in shown
    assert "Caveat: class 'chat' has 16 different prompts for 90 requests" in shown
    shown = " ".join(show(FULL + "    \n").split())
    assert "Caveat" not in shown


def test_notes_are_told(show: Show) -> None:
    text = FULL.replace("prompts.jsonl}", "prompts.jsonl, sample: 30}")
    shown = " ".join(show(text).split())
    assert "Note: " in shown
    assert "prompts.jsonl: 30 of 40 rows are used as prompts (prompts.sample)." in shown


def test_repeated_beginnings_are_measured(show: Show) -> None:
    # 12 prompts behind one of 400 tokens: all but the first find it in the cache, in whole blocks
    # of 16 tokens.
    text = FULL.replace("prompts.jsonl}", "prompts.jsonl}, shared_prefix: {tokens: 400}")
    data = json.loads(show(text, "--json"))
    (only,) = data["classes"]
    reused, length = 11 * 400 // 16 * 16, 12 * (400 + 20)
    assert only["reused_ratio"] == pytest.approx(reused / length, abs=0.02)
    assert "text that a prefix cache would have seen before: 87%" in show(text)


def test_only_whole_blocks_are_reused(show: Show, tmp_path: Path) -> None:
    # One prompt is measured, four times. "user", 100 characters and two line ends are 106: one
    # block of 64, and a rest that no cache shares. 3 x 64 of 4 x 106 characters.
    rows = "".join(json.dumps({"prompt": letter * 100}) + "\n" for letter in "ab")
    (tmp_path / "prompts.jsonl").write_text(rows, encoding="utf-8")
    data = json.loads(show(FULL.replace("12", "4"), "--json"))
    assert data["classes"][0]["reused_ratio"] == pytest.approx(192 / 424)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_no_prompt_is_ever_printed(show: Show, options: tuple[str, ...]) -> None:
    lengths = "lengths: {input: {dist: fixed, tokens: 200}}, shared_prefix: {tokens: 50}"
    for text in (RATE, FULL, FULL.replace("prompts.jsonl}", f"prompts.jsonl}}, {lengths}")):
        assert "secret" not in show(text, *options)


def test_as_json(show: Show) -> None:
    data = json.loads(show(RATE, "--json"))
    assert (data["format"], data["version"], data["name"]) == ("autotune-traffic", 1, "shop")
    assert data["digest"] == build_schedule(load_profile(Path("traffic.yaml"))).digest
    assert (data["num_requests"], data["num_warmup"], data["duration_s"]) == (120, 5, 40.0)
    assert (data["prompt_realism"], data["is_exact"]) == ("user", False)
    # 30 parts of 40 s.
    assert sum(data["arrivals_rps"]) * 40 / 30 == pytest.approx(120)
    chat, code = data["classes"]
    assert (chat["share"], chat["num_requests"], chat["num_prompts"]) == (0.75, 90, 16)
    assert chat["limits"] == {"ttft_p95_ms": 500.0, "tpot_p99_ms": 25.5}
    assert code["prompt_histogram"] == [{"low": 128, "high": 255, "count": 30}]
    assert code["answer_histogram"] == [{"low": 64, "high": 127, "count": 30}]
    assert code["max_tokens"] == {"p50": 64, "p95": 64, "max": 64}
    assert json.loads(show(FULL, "--json"))["arrivals_rps"] is None


def test_conversations_are_counted(show: Show, tmp_path: Path) -> None:
    rows = [{"turns": [f"{n} secret", "more", "and more"]} for n in range(20)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "prompts.jsonl").write_text(text, encoding="utf-8")
    shown = show(FULL.replace("prompts.jsonl}", "prompts.jsonl}, turns: {max: 3}"))
    assert "12 conversations of several turns; 24 turns bring the server's own answers" in shown
    assert "36 requests a measurement" in shown


def test_another_seed_draws_another_schedule(show: Show) -> None:
    digests = {json.loads(show(RATE, "--json", *seed))["digest"]
               for seed in ((), ("--seed", "4"), ("--seed", "5"))}  # fmt: skip
    assert len(digests) == 2


def test_a_model_on_this_machine_counts_exactly(show: Show, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    for text, options in ((FULL, ("--model", "model")), (f"{FULL}model: ./model\n", ())):
        shown = show(text, *options)
        assert "tokens are exact, by the model's tokenizer" in shown
        assert "tokens of a prompt: 11" in shown


def test_a_model_that_is_not_here_is_no_matter(show: Show) -> None:
    assert "tokens are estimated" in show(f"{FULL}model: owner/not-downloaded\n")
    assert "tokens are estimated" in show(f"{FULL}model: demo:target\n")


def test_a_model_that_was_asked_for_must_be_here(show: Show) -> None:
    with pytest.raises(InputError, match="--model: model: "):
        show(FULL, "--model", "./nowhere")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (FULL.replace("name", "nme"), "nme: unknown key"),
        (FULL.replace("prompts.jsonl", "nope.jsonl"), "nope.jsonl: the prompt file must exist"),
    ],
)
def test_what_is_wrong_with_a_profile_is_told(show: Show, text: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        show(text)
    assert told in str(caught.value)


def test_shipped_profiles_can_be_shown_by_name(tmp_path: Path) -> None:
    result = CliRunner().invoke(profile_show.command, ["trace-replay"])
    assert result.exit_code == 0, result.output
    assert "trace-replay: open loop, trace trace-replay.csv" in result.output
    assert "prompts: proxy" in result.output


def test_the_schema_is_printed() -> None:
    result = CliRunner().invoke(profile_schema.command, [])
    assert result.exit_code == 0
    schema: Any = json.loads(result.output)
    assert schema == expected_schema()


def test_every_option_says_what_it_does() -> None:
    for command in (profile_show.command, profile_schema.command):
        assert command.help
        options = [p for p in command.params if isinstance(p, click.Option)]
        assert [option.name for option in options if not option.help] == []
