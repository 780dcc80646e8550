"""A draft is a profile that loads, holds what the log shows, and says what it comes from."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autotune.errors import InputError
from autotune.traffic.classes import LognormalLength, MaxTokensFromData, TrafficClass, Turns
from autotune.traffic.formats import FORMATS, read_rows
from autotune.traffic.importing.draft import DraftOptions, draft_profile
from autotune.traffic.importing.fit import fit_log
from autotune.traffic.importing.yaml_text import YamlText, flow, scalar
from autotune.traffic.loads import ConcurrencyLoad, RateLoad, TraceLoad
from autotune.traffic.profile import TrafficProfile, load_profile


class Drafted:
    """A draft, its text and the profile that it is."""

    def __init__(self, folder: Path, content: str, log_name: str, **options: Any) -> None:
        columns = options.pop("columns", {})
        log = folder / log_name
        log.write_text(content, encoding="utf-8")
        self.out = folder / "traffic.yaml"
        fit = fit_log(read_rows(log, columns=columns))
        self.text = draft_profile(fit, DraftOptions(self.out, columns=columns, **options))
        self.out.write_text(self.text, encoding="utf-8")
        self.profile: TrafficProfile = load_profile(self.out)

    @property
    def only_class(self) -> TrafficClass:
        (only,) = self.profile.classes
        return only

    def comment_of(self, start: str) -> str:
        """Return the comment beside the first line that begins so."""
        line = next(line for line in self.text.splitlines() if line.strip().startswith(start))
        return line.partition(" # ")[2].strip()


def drafted(
    folder: Path, records: Iterable[object], log_name: str = "log.jsonl", **options: Any
) -> Drafted:
    content = "".join(json.dumps(record) + "\n" for record in records)
    return Drafted(folder, content, log_name, **options)


def body(content: str = "hi", **more: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


def times(shape: float, rps: float, count: int = 3000) -> list[float]:
    rng = random.Random(9)
    now, found = 1_700_000_000.0, []
    for _ in range(count):
        found.append(now)
        now += rng.gammavariate(shape, 1 / (shape * rps))
    return found


# --- the load ---


@pytest.mark.parametrize(
    ("shape", "arrival"), [(0.5, "gamma"), (1.0, "poisson"), (4.0, "gamma"), (1e6, "constant")]
)
def test_times_become_a_rate(tmp_path: Path, shape: float, arrival: str) -> None:
    found = drafted(tmp_path, [body(str(t), timestamp=t) for t in times(shape, 5.0)])
    load = found.profile.load
    assert isinstance(load, RateLoad)
    assert load.arrival == arrival
    assert load.rps == pytest.approx(5.0, rel=4 / math.sqrt(shape * 3000))
    if arrival == "gamma":
        assert load.burstiness == pytest.approx(shape, rel=0.12)
    assert "3,000 with a time" in found.comment_of("rps:")
    assert "CV of 2,999 gaps" in found.comment_of("arrival:")


def test_bursts_are_replayed_and_the_fit_is_told(tmp_path: Path) -> None:
    found = drafted(tmp_path, [body(str(t), timestamp=t) for t in times(0.05, 5.0)])
    load = found.profile.load
    assert isinstance(load, TraceLoad)
    assert (load.file, load.format) == (Path("log.jsonl"), "openai")
    assert load.window is not None
    assert load.window.duration_s >= 300
    assert found.profile.measure.max_duration_s >= load.window.duration_s
    assert "gap CV 4." in found.comment_of("kind:")  # 1 / sqrt(0.05) = 4.47
    assert "# The fit, which would lose that: load: {kind: rate, rps: " in found.text


def test_few_gaps_are_replayed(tmp_path: Path) -> None:
    found = drafted(tmp_path, [body(str(n), timestamp=n) for n in range(30)])
    assert isinstance(found.profile.load, TraceLoad)
    assert found.comment_of("kind:") == "29 gaps are too few to fit a process to"
    assert found.profile.load.window is not None
    assert 29 < found.profile.load.window.duration_s <= 30  # the end is excluded
    found = drafted(tmp_path, [body(str(n), timestamp=n) for n in range(31)])
    assert isinstance(found.profile.load, RateLoad)


def test_times_without_order_are_replayed(tmp_path: Path) -> None:
    rng = random.Random(1)
    shuffled = rng.sample(range(20_000), 20_000)
    found = drafted(tmp_path, [{"prompt": f"{t}", "timestamp": t} for t in shuffled])
    assert "times are out of order" in found.comment_of("kind:")


def test_a_coarse_clock_is_jittered(tmp_path: Path) -> None:
    rows = [
        {
            "timestamp": 3000 * (n // 90),
            "input_length": 9,
            "output_length": 9,
            "hash_ids": [n // 2],
        }
        for n in range(5000)
    ]
    found = drafted(tmp_path, rows)
    load = found.profile.load
    assert isinstance(load, TraceLoad)
    assert load.jitter_s == 3.0
    assert found.comment_of("jitter_s:") == "the log's clock ticks every 3 s"
    assert found.comment_of("kind:") == "50% of the prompts' blocks are shared, as the rows say"


def test_a_log_without_times_gets_a_guess_that_says_so(tmp_path: Path) -> None:
    found = drafted(tmp_path, [{"prompt": str(n)} for n in range(10)])
    assert found.profile.load == ConcurrencyLoad(kind="concurrency", concurrency=8)
    assert found.comment_of("load:") == "a guess: the log has no times"


def test_a_slow_log_gets_time_enough(tmp_path: Path) -> None:
    found = drafted(tmp_path, [body(str(n), timestamp=100 * n) for n in range(50)])
    assert isinstance(found.profile.load, RateLoad)
    # 200 requests at 0.01 rps take 20,000 s; the profile would not load with less.
    assert found.profile.measure.max_duration_s >= 19_900


# --- the classes ---


def test_own_prompts_and_how_they_are_sampled(tmp_path: Path) -> None:
    rows = [
        body(f"q{n}", temperature=0.7 if n % 10 else 0.1, top_p=0.95, max_tokens=300,
             usage={"prompt_tokens": 9, "completion_tokens": 20})
        for n in range(250)
    ]  # fmt: skip
    found = drafted(
        tmp_path, rows, model="owner/target", drafter="owner/head", log_name="chat.log.jsonl"
    )
    profile, only = found.profile, found.only_class
    assert (profile.name, profile.model, profile.drafter) == ("chat", "owner/target", "owner/head")
    assert only.prompts is not None
    assert (only.prompts.file, only.prompts.format) == (Path("chat.log.jsonl"), "openai")
    assert only.prompts.holdout == 0.5
    assert only.lengths is None
    assert (only.sampling.temperature, only.sampling.top_p) == (0.7, 0.95)
    assert "temperature as in 90% of 250 rows" in found.comment_of("sampling:")
    assert only.output.max_tokens == MaxTokensFromData.model_validate(
        {"from": "data", "default": 300}
    )
    assert profile.endpoint == "chat"


def test_what_the_log_does_not_say_is_said(tmp_path: Path) -> None:
    found = drafted(tmp_path, [{"prompt": str(n)} for n in range(10)])
    assert found.only_class.output.max_tokens == 512
    assert found.comment_of("output:") == "not in the log: a default"
    assert found.only_class.sampling.temperature == 0.0
    assert found.comment_of("sampling:") == "temperature is not in the log: a default"
    assert "10 rows with text: few" in found.comment_of("prompts:")
    assert found.only_class.prompts is not None
    assert found.only_class.prompts.holdout == 0.0  # too few to hold any out
    assert "# model: " in found.text
    assert found.profile.model is None


def test_sampling_that_no_profile_takes_is_left_out(tmp_path: Path) -> None:
    rows = [
        body(str(n), temperature=5.0, top_p=0.9, top_k=40, min_p=0.1 * (n == 0)) for n in range(9)
    ]
    found = drafted(
        tmp_path, [{k: v for k, v in row.items() if k != "min_p" or v} for row in rows]
    )
    sampling = found.only_class.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.0,
        0.9,
        40,
        None,
    )


def test_a_log_of_completions_is_one(tmp_path: Path) -> None:
    found = drafted(
        tmp_path, [{"model": "m", "prompt": str(n), "max_tokens": 9} for n in range(9)]
    )
    assert found.profile.endpoint == "completions"


def test_classes_by_the_logs_names(tmp_path: Path) -> None:
    rows = [{"prompt": f"a{n}", "category": "chat & talk"} for n in range(60)]
    rows += [{"prompt": f"b{n}", "category": "chat/talk"} for n in range(39)]
    rows += [{"prompt": f"c{n}", "category": "rare: {x}\n# y"} for n in range(1)]
    found = drafted(tmp_path, [*rows, *rows, {"prompt": "d"}])
    first, second = found.profile.classes
    assert (first.name, second.name) == ("chat-talk", "chat-talk-2")
    assert first.prompts is not None
    assert first.prompts.category == "chat & talk"
    assert (first.weight, second.weight) == (
        pytest.approx(60 / 99, rel=1e-3),
        pytest.approx(39 / 99, rel=1e-3),
    )
    assert found.comment_of("weight:") == "120 of 201 rows"
    assert "# Rows left out: 3 (in classes of few rows: 2, in 1; of no class: 1)." in found.text


def test_names_that_say_little_make_no_classes(tmp_path: Path) -> None:
    rows: list[object] = [{"prompt": f"a{n}"} for n in range(60)]
    found = drafted(tmp_path, [*rows, *({"prompt": f"b{n}", "category": "x"} for n in range(40))])
    assert found.only_class.name == "default"
    assert found.only_class.prompts is not None
    assert found.only_class.prompts.category is None


def test_lengths_without_text_get_proxy_prompts(tmp_path: Path) -> None:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"{n},{100 + n},{10 + n % 7}" for n in range(200)]
    found = Drafted(tmp_path, "\n".join(lines), "code-trace.csv")
    only = found.only_class
    assert only.prompts is not None
    assert only.prompts.builtin == "demo/code"
    assert found.comment_of("prompts:") == "0 of 200 rows have text; results count as proxy"
    assert only.lengths is not None
    # Of 100..299: the 100th is 199, the 190th 289, the last 299.
    assert only.lengths.input == LognormalLength(dist="lognormal", p50=199, p95=289, max=299)
    assert only.lengths.output is not None
    assert "output: {max_tokens" not in found.text  # the lengths say it
    assert only.turns is None


def test_shared_blocks_without_times_become_a_prefix(tmp_path: Path) -> None:
    rows = [
        {"input_length": 2048, "hash_ids": [n // 10, 1000 + n // 10, 2000 + n, 3000 + n]}
        for n in range(200)
    ]
    found = drafted(tmp_path, rows)
    only = found.only_class
    # 800 blocks: 20 first and 20 second ones, 200 third and 200 fourth ones, so 360 came before: 45 %.
    assert only.shared_prefix is not None
    assert only.shared_prefix.tokens == round(0.45 * 2048)
    # 20 first blocks to 800 blocks; to 200 requests of four blocks, 20 groups.
    assert only.shared_prefix.groups == 20
    assert only.lengths is not None
    assert isinstance(only.lengths.input, LognormalLength)
    assert only.lengths.input.p50 == 2048 - round(0.45 * 2048)


@pytest.mark.parametrize(("answers", "replay"), [(True, "recorded"), (False, "live")])
def test_scripts_become_conversations(tmp_path: Path, answers: bool, replay: str) -> None:
    said: list[dict[str, str]] = []
    for n in range(21):
        said += [{"from": "gpt", "value": "b"}] * answers + [{"from": "human", "value": f"c{n}"}]
    rows = [{"conversations": [{"from": "human", "value": str(n)}, *said]} for n in range(9)]
    found = Drafted(tmp_path, json.dumps(rows), "s.json")
    assert found.only_class.turns == Turns(max=8, replay=replay)
    assert "max 22 of 9 conversations" in found.comment_of("turns:")


def test_conversations_arrive_at_the_rate_of_their_first_requests(tmp_path: Path) -> None:
    starts = times(1.0, 0.5, 500)
    rows = [
        body(f"{start} {n}", timestamp=start + n, conversation_id=str(start))
        for start in starts
        for n in range(3)
    ]
    rows.sort(key=lambda row: str(row["timestamp"]))
    found = drafted(tmp_path, rows)
    load = found.profile.load
    assert isinstance(load, RateLoad)
    assert load.rps == pytest.approx(0.5, rel=4 / math.sqrt(500))
    assert found.only_class.turns == Turns(max=3, replay="recorded")
    assert found.comment_of("rps:").startswith("conversations a second: 500 ")


def test_system_prompts_are_told(tmp_path: Path) -> None:
    def rows(*systems: str) -> list[object]:
        return [
            body(
                messages=[{"role": "system", "content": text}, {"role": "user", "content": str(n)}]
            )
            for n, text in enumerate(systems)
        ]

    found = drafted(tmp_path, rows(*["x" * 400] * 10))
    assert (
        "# 100% of 10 requests begin with the same system prompt, about 100 tokens, which the prompts "
        "hold already." in found.text
    )
    assert found.only_class.shared_prefix is None
    found = drafted(tmp_path, rows("x" * 400, "x" * 400, "x" * 400, "y", "y", "z"))
    assert "# 83% of 6 requests begin with one of 2 system prompts, about 100" in found.text


def test_named_columns_go_into_the_profile(tmp_path: Path) -> None:
    rows = [{"q": str(n), "at": 1000 * n} for n in range(10)]
    columns = {"prompt": "q", "timestamp": "at[ms]"}
    found = drafted(tmp_path, rows, columns=columns)
    assert isinstance(found.profile.load, TraceLoad)
    assert found.profile.load.columns == columns
    assert found.only_class.prompts is not None
    assert dict(found.only_class.prompts.columns) == columns


# --- names and paths ---


def test_paths_are_relative_to_the_profile(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "out").mkdir()
    log = tmp_path / "logs" / "it's: {a} #log.jsonl"
    log.write_text('{"prompt": "x"}\n', encoding="utf-8")
    out = tmp_path / "out" / "traffic.yaml"
    out.write_text(draft_profile(fit_log(read_rows(log)), DraftOptions(out)), encoding="utf-8")
    profile = load_profile(out)
    assert profile.name == "it-s-a-log"
    prompts = profile.classes[0].prompts
    assert prompts is not None
    assert prompts.file == Path("../logs") / log.name


@pytest.mark.parametrize("name", ["", "-x", "a b", "x" * 65, "a\nb"])
def test_a_name_that_no_profile_may_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="--name: must be at most 64 letters"):
        drafted(tmp_path, [{"prompt": "x"}], name=name)


def test_a_name_can_be_given(tmp_path: Path) -> None:
    assert drafted(tmp_path, [{"prompt": "x"}], name="prod-1.2_x").profile.name == "prod-1.2_x"
    assert drafted(tmp_path, [{"prompt": "x"}], log_name="---.jsonl").profile.name == "imported"


# --- whatever the log holds ---

tokens = st.integers(0, 10**8)
names = (
    st.none() | st.text(max_size=6) | st.sampled_from(["chat", "a: b", "#", "'", "{x}", "\u2028"])
)
log_rows = st.fixed_dictionaries(
    {"prompt": st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)},
    optional={
        "category": names,
        "timestamp": st.floats(0, 1e10) | st.integers(0, 20),
        "conversation_id": st.integers(0, 5),
        "prompt_tokens": tokens,
        "completion_tokens": tokens,
        "max_tokens": tokens,
        "temperature": st.floats(allow_nan=False, allow_infinity=False),
        "top_p": st.floats(0, 2),
        "top_k": st.floats(-5, 100),
    },
)
trace_rows = st.fixed_dictionaries(
    {"input_length": st.integers(1, 10**8), "output_length": st.integers(1, 10**8)},
    optional={
        "timestamp": st.floats(0, 1e10) | st.integers(0, 20),
        "hash_ids": st.lists(st.integers(0, 9), max_size=4),
        "type": names,
    },
)


@given(
    rows=st.lists(log_rows, min_size=1, max_size=60)
    | st.lists(trace_rows, min_size=1, max_size=60)
)
@settings(max_examples=80, deadline=None)
@example(rows=[{"input_length": 2_000_002, "output_length": 1, "hash_ids": [0, 0]}])
@example(
    rows=[{"input_length": n + 1, "output_length": 1, "timestamp": 604_800.0 * n} for n in (0, 1)]
)
def test_every_draft_loads(rows: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "drafts"
    folder.mkdir(exist_ok=True)
    if all("prompt" in row and not row["prompt"].strip() for row in rows):
        return  # refused: there is nothing to draft from
    found = drafted(folder, rows)
    for traffic_class in found.profile.classes:
        assert traffic_class.prompts is not None
    assert sum(c.weight for c in found.profile.classes) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_can_be_drafted_from(name: str, tmp_path: Path) -> None:
    record: dict[str, object] = {
        "TIMESTAMP": 1, "ContextTokens": 2, "GeneratedTokens": 3, "Timestamp": 1, "Request tokens": 2,
        "Response tokens": 3, "timestamp": 1, "input_length": 2, "output_length": 3, "hash_ids": [1],
        "conversations": [{"from": "human", "value": "a"}], "turns": ["a"], "prompt": "a",
        "question": "a", "custom_id": "1", "body": {"prompt": "a"},
    }  # fmt: skip
    if name == "otel":
        call = {"key": "gen_ai.request.model", "value": {"stringValue": "m"}}
        used = {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "5"}}
        spans = [{"attributes": [call, used], "startTimeUnixNano": "5"}]
        record = {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}
    if name == "aiperf":
        record = {"text": "a"}
    log, out = tmp_path / "log.jsonl", tmp_path / "traffic.yaml"
    log.write_text(json.dumps(record), encoding="utf-8")
    out.write_text(
        draft_profile(fit_log(read_rows(log, name)), DraftOptions(out)), encoding="utf-8"
    )
    assert load_profile(out).classes


# --- YAML ---


@pytest.mark.parametrize(
    "value",
    ["plain", "a: b", "#x", "{a}", "it's", '"', "1.0", "null", "yes", "", " x ", "é\U0001f600", "a\u2028b",
     "a\nb", "\x85", "-", "x" * 300, 0.005782, 1e-12, 5.0, -1],
)  # fmt: skip
def test_scalars_are_read_back(value: str | float) -> None:
    text = f"a: {scalar(value)}\nb: {flow({'k': value, 'm': {'n': value}})}\n"
    assert yaml.safe_load(text) == {"a": value, "b": {"k": value, "m": {"n": value}}}
    assert text.count("\n") == 2


def test_a_comment_stays_on_its_line() -> None:
    text = YamlText()
    text.line("a: 1", "one\ntwo\u2028three")
    text.comment("four\x85five\x00")
    assert yaml.safe_load(str(text)) == {"a": 1}
    assert str(text).count("\n") == 2
    assert str(text).isascii() is False
