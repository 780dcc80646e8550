"""Traffic profiles: good ones load, and every bad one is refused with what is wrong and where."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from autotune.errors import InputError
from autotune.traffic.classes import PromptSource, SharedPrefix
from autotune.traffic.loads import ConcurrencyLoad, RateLoad
from autotune.traffic.profile import Cost, MeasureSettings, TrafficProfile, load_profile

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
measure: {min_requests: 200, warmup: 0, max_duration_s: 60, request_timeout_s: 30}
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
    assert traffic_profile.measure.warmup == 0
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
        ["qqq: unknown key 'qqq'", "Valid: classes, cost, drafter, endpoint, load"],
    ),
    "unknown limit": (
        f"{GOOD}    slo: {{ttft_p42_ms: 500}}\n",
        ["classes[0].slo: ", "(ttft|tpot|e2el|icl)_(mean|p50|p90|p95|p99)_ms", "'ttft_p42_ms'"],
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
        ["classes[0].prompts: ", "exactly one of `file`, `builtin` and `random`"],
    ),
    "neither file nor built-in set": (
        swapped("{file: prompts.jsonl}", "{format: text}"),
        ["classes[0].prompts: ", "exactly one of `file`, `builtin` and `random`"],
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
        ["classes[0].output.max_tokens: must be a number of tokens", "but got 'many'"],
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


# --- all loads, all parts of a class ---

CONCURRENCY = "{kind: concurrency, concurrency: 4}"

# What stands for the load, and what its message must hold.
BAD_LOADS = {
    "gamma without a shape": (
        "{kind: rate, rps: 1, arrival: gamma}",
        ["load", "`burstiness` is required with `arrival: gamma`, such as 0.6"],
    ),
    "shape without gamma": (
        "{kind: rate, rps: 1, burstiness: 0.5}",
        ["load", "`burstiness` goes with `arrival: gamma` only"],
    ),
    "shape that is none": (
        "{kind: rate, rps: 1, arrival: gamma, burstiness: 0}",
        ["load.burstiness: ", "greater than or equal to 0.001", "but got 0"],
    ),
    "more users in flight than any server takes": (
        "{kind: rate, rps: 1, max_concurrency: 1000000000}",
        ["load.max_concurrency: ", "less than or equal to 4096", "but got 1000000000"],
    ),
    "no stages": (
        "{kind: stages, stages: []}",
        ["load.stages: ", "at least 1", "but got []"],
    ),
    "stage without an end": (
        "{kind: stages, stages: [{rps: 2}]}",
        ["load.stages[0].duration_s: the key is required"],
    ),
    "stages without a single arrival": (
        "{kind: stages, stages: [{rps: 0.1, duration_s: 4}]}",
        ["load", "must have 1 to 100,000 arrivals in all (rps x duration_s)", "but they have 0"],
    ),
    "stages that would fill the memory": (
        "{kind: stages, stages: [{rps: 100000, duration_s: 100}]}",
        ["load", "1 to 100,000 arrivals", "but they have 10,000,000"],
    ),
    "users and a rate": (
        "{kind: users, users: 3, rps: 2}",
        ["load: ", "exactly one kind", "got rps=2 and users=3", "keep one of them"],
    ),
    "rate and stages": (
        "{kind: rate, rps: 2, stages: [{rps: 2, duration_s: 4}]}",
        ["load: ", "exactly one kind", "got rps=2 and stages", "keep one of them"],
    ),
    "users who do not think": ("{kind: users, users: 3}", ["think_time: the key is required"]),
    "think time of an unknown kind": (
        "{kind: users, users: 3, think_time: {dist: normal, mean_s: 3}}",
        ["load.think_time", "'normal'", "'constant', 'exponential', 'lognormal'"],
    ),
    "think time of two kinds": (
        "{kind: users, users: 3, think_time: {dist: constant, s: 3, mean_s: 3}}",
        ["load.think_time", "unknown key 'mean_s'"],
    ),
    "lognormal without its spread": (
        "{kind: users, users: 3, think_time: {dist: lognormal, median_s: 3}}",
        ["load.think_time", "sigma: the key is required"],
    ),
    "trace without a file": ("{kind: trace}", ["load.file: the key is required"]),
    "trace in an unknown format": (
        "{kind: trace, file: a.csv, format: azur}",
        ["load.format: must be a format", "(did you mean 'azure'?), but got 'azur'"],
    ),
    "trace with an unknown column": (
        "{kind: trace, file: a.csv, columns: {timestmp: ts}}",
        ["load.columns: no format knows a column 'timestmp' (did you mean 'timestamp'?)"],
    ),
    "trace that stands still": (
        "{kind: trace, file: a.csv, time_scale: 0}",
        ["load.time_scale: ", "greater than or equal to 0.001", "but got 0"],
    ),
    "window without an end": (
        "{kind: trace, file: a.csv, window: {start_s: 3}}",
        ["load.window.duration_s: the key is required"],
    ),
    "window before the start": (
        "{kind: trace, file: a.csv, window: {start_s: -3, duration_s: 5}}",
        ["load.window.start_s: ", "greater than or equal to 0", "but got -3"],
    ),
}

# What is added to the only class, and what its message must hold.
BAD_CLASSES = {
    "random prompts": (
        "prompts: {random: {tokens: 100}}",
        [
            "classes[0].prompts.random: random prompts are refused",
            "what a drafter gets accepted",
            "`force: true` sends them anyway and marks every result",
        ],
    ),
    "random prompts and a file": (
        "prompts: {file: p.jsonl, random: {tokens: 100, force: true}}",
        ["classes[0].prompts: ", "exactly one of `file`, `builtin` and `random`"],
    ),
    "format of a built-in set": (
        "prompts: {builtin: demo/chat, format: jsonl}",
        ["classes[0].prompts: `format` goes with `file` only"],
    ),
    "prompts in an unknown format": (
        "prompts: {file: p.jsonl, format: sharegtp}",
        ["classes[0].prompts.format: ", "(did you mean 'sharegpt'?), but got 'sharegtp'"],
    ),
    "columns as a list": (
        "prompts: {file: p.jsonl, columns: [[prompt, q]]}",
        ["classes[0].prompts.columns: ", "valid dictionary", "but got [['prompt', 'q']]"],
    ),
    "unknown column": (
        "prompts: {file: p.jsonl, columns: {promt: q}}",
        ["classes[0].prompts.columns: no format knows a column 'promt' (did you mean 'prompt'?)"],
    ),
    "everything held out": (
        "prompts: {file: p.jsonl, holdout: 1}",
        ["classes[0].prompts.holdout: ", "less than or equal to 0.9", "but got 1"],
    ),
    "no prompts": ("weight: 2", ["classes[0].prompts: the key is required"]),
    "turns and lengths": (
        "prompts: {file: p.jsonl}, turns: {}, lengths: {input: {dist: fixed, tokens: 9}}",
        ["classes[0]: `turns` and `lengths` do not go together"],
    ),
    "turns of random words": (
        "prompts: {random: {tokens: 9, force: true}}, turns: {}",
        ["classes[0]: `turns` and random prompts do not go together"],
    ),
    "prefix of nothing": (
        "prompts: {file: p.jsonl}, shared_prefix: {}",
        ["classes[0].shared_prefix: exactly one of `tokens` and `file`"],
    ),
    "prefix twice": (
        "prompts: {file: p.jsonl}, shared_prefix: {tokens: 3, file: s.txt}",
        ["classes[0].shared_prefix: exactly one of `tokens` and `file`"],
    ),
    "groups of one file": (
        "prompts: {file: p.jsonl}, shared_prefix: {file: s.txt, groups: 2}",
        ["classes[0].shared_prefix: `groups` goes with `tokens` only"],
    ),
    "lengths out of order": (
        "prompts: {file: p.jsonl}, lengths: {input: {dist: lognormal, p50: 9, p95: 8, max: 7}}",
        ["classes[0].lengths.input", "lengths must be in order: p50 <= p95 <= max"],
    ),
    "lengths without their kind": (
        "prompts: {file: p.jsonl}, lengths: {input: {tokens: 9}}",
        ["classes[0].lengths.input"],
    ),
    "limits of answers from nowhere": (
        "prompts: {file: p.jsonl}, output: {max_tokens: {from: file}}",
        [
            "classes[0].output.max_tokens: must be a number of tokens above 0, or {from: data",
            "but got {'from': 'file'}",
        ],
    ),
    "no tokens": (
        "prompts: {file: p.jsonl}, output: {max_tokens: 0}",
        ["classes[0].output.max_tokens: must be a number of tokens above 0", "but got 0"],
    ),
    "a field of the body that is ours": (
        "prompts: {file: p.jsonl}, extra_body: {stream: false}",
        ["classes[0].extra_body: `stream` is set by Autotune itself; use the profile's keys"],
    ),
    "sampling in the body": (
        "prompts: {file: p.jsonl}, extra_body: {top_k: 5}",
        ["classes[0].extra_body: `top_k` is set by Autotune itself"],
    ),
    "a date in the body": (
        "prompts: {file: p.jsonl}, extra_body: {since: 2026-01-05}",
        ["classes[0].extra_body: must hold plain JSON values"],
    ),
    "a number as a key in the body": (
        "prompts: {file: p.jsonl}, extra_body: {logit_bias: {17: 1}}",
        ["classes[0].extra_body: must hold plain JSON values"],
    ),
    "no number in the body": (
        "prompts: {file: p.jsonl}, extra_body: {x: .nan}",
        ["classes[0].extra_body: must hold plain JSON values"],
    ),
    "weight of everything": (
        "prompts: {file: p.jsonl}, weight: 1.0e+300",
        ["classes[0].weight: ", "less than or equal to 1000000", "but got 1e+300"],
    ),
}

# What stands at the end of the profile, and what its message must hold.
BAD_ENDS = {
    "price of nothing": (
        "cost: {gpu_hourly_usd: 0}",
        ["cost.gpu_hourly_usd: ", "greater than 0", "but got 0"],
    ),
    "cost without a price": ("cost: {gpus: 2}", ["cost.gpu_hourly_usd: the key is required"]),
    "unknown gate": (
        "quality: {gate: of}",
        ["quality.gate: ", "'teacher_forced' or 'off'", "but got 'of'"],
    ),
    "typo in privacy": (
        "privacy: {store_output: true}",
        ["privacy.store_output: unknown key", "Did you mean 'store_outputs'?"],
    ),
    "warm-up of nothing known": (
        "measure: {warmup: some}",
        ["measure.warmup: must be a number of requests from 0 to 100,000, or auto", "got 'some'"],
    ),
    "drafter that is no name": (
        "drafter: {name: a/b}",
        ["drafter: must be a name, or a list of names", "but got {'name': 'a/b'}"],
    ),
    "more requests than memory": (
        "measure: {min_requests: 100001}",
        ["measure.min_requests: ", "less than or equal to 100000", "but got 100001"],
    ),
}

BAD_PARTS = {
    **{
        f"load: {name}": (GOOD.replace(CONCURRENCY, load), told)
        for name, (load, told) in BAD_LOADS.items()
    },
    **{
        f"class: {name}": (GOOD.replace("prompts: {file: prompts.jsonl}", f"{{{only}}}"), told)
        for name, (only, told) in BAD_CLASSES.items()
    },
    **{f"end: {name}": (f"{GOOD}{end}\n", told) for name, (end, told) in BAD_ENDS.items()},
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_a_bad_part_is_refused_once_with_its_place(write_profile: Write, case: str) -> None:
    text, told = BAD_PARTS[case]
    path = write_profile(text)
    message = refusal(path)
    assert message.startswith(f"{path}: ")
    assert message.count("\n") == 0, message
    for part in told:
        assert part in message


# --- time enough ---


def test_requests_that_cannot_be_sent_in_time_are_refused(write_profile: Write) -> None:
    # The first is sent at 0, so 200 at 1 a second take 199 s, and 181 take 180 s.
    text = GOOD.replace(CONCURRENCY, "{kind: rate, rps: 1}")
    path = write_profile(f"{text}measure: {{min_requests: 200, max_duration_s: 180}}\n")
    assert refusal(path) == (
        f"{path}: measure: 200 requests at 1 rps take 199 s, but max_duration_s is 180; "
        "raise it to 199, or lower min_requests to 181."
    )


def test_stages_that_last_too_long_are_refused(write_profile: Write) -> None:
    text = GOOD.replace(CONCURRENCY, "{kind: stages, stages: [{rps: 1, duration_s: 100.5}]}")
    path = write_profile(f"{text}measure: {{max_duration_s: 100}}\n")
    assert refusal(path) == (
        f"{path}: measure: the stages take 100.5 s, but max_duration_s is 100; raise it to 101."
    )


def test_users_who_think_too_long_are_refused(write_profile: Write) -> None:
    # 300 waits of 10 s shared by 20 users: 150 s; 100 s are enough for 200.
    load = "{kind: users, users: 20, think_time: {dist: exponential, mean_s: 10}}"
    text = GOOD.replace(CONCURRENCY, load)
    path = write_profile(f"{text}measure: {{min_requests: 300, max_duration_s: 100}}\n")
    assert refusal(path) == (
        f"{path}: measure: 300 requests of 20 users who think 10 s on average take 150 s, but "
        "max_duration_s is 100; raise it to 150, or lower min_requests to 200."
    )


def test_advice_that_cannot_be_followed_is_not_given(write_profile: Write) -> None:
    text = GOOD.replace(CONCURRENCY, "{kind: rate, rps: 1.0e-300}")
    message = refusal(write_profile(f"{text}measure: {{min_requests: 2}}\n"))
    assert message.endswith("but max_duration_s is 180; lower min_requests to 1.")
    load = "{kind: users, users: 1, think_time: {dist: lognormal, median_s: 600000, sigma: 5}}"
    message = refusal(write_profile(GOOD.replace(CONCURRENCY, load)))
    assert message.endswith("but max_duration_s is 180; let the users think less.")


@pytest.mark.parametrize("count", [1, 2])
def test_the_smallest_numbers_there_are_do_no_harm(write_profile: Write, count: int) -> None:
    end = f"measure: {{min_requests: {count}}}\n"
    load = "{kind: users, users: 1, think_time: {dist: constant, s: 5.0e-324}}"
    assert load_profile(write_profile(GOOD.replace(CONCURRENCY, load) + end)).num_requests == count
    text = GOOD.replace(CONCURRENCY, "{kind: rate, rps: 5.0e-324}") + end
    if count == 1:  # the first one is sent at once
        assert load_profile(write_profile(text)).num_requests == 1
    else:
        assert "2 requests at 4.94066e-324 rps take inf s" in refusal(write_profile(text))


@settings(max_examples=100, deadline=None)
@given(st.floats(0.01, 1000), st.integers(2, 2000), st.floats(1, 500))
def test_the_advice_on_time_helps(rps: float, count: int, limit_s: float) -> None:
    def told(min_requests: int, max_duration_s: float) -> str:
        data = yaml.safe_load(GOOD)
        data["load"] = {"kind": "rate", "rps": rps}
        data["measure"] = {"min_requests": min_requests, "max_duration_s": max_duration_s}
        try:
            TrafficProfile.model_validate(data)
        except ValidationError as err:
            return str(err)
        return ""

    message = told(count, limit_s)
    if (count - 1) / rps < limit_s:
        assert message == ""
    elif message:
        longer, fewer = re.findall(r"raise it to (\d+), or lower min_requests to (\d+)", message)[
            0
        ]
        assert told(count, float(longer)) == ""
        assert told(int(fewer), limit_s) == ""


# --- limits that a measurement is too short for ---


def thin_limits(write_profile: Write, load: str, measure: str = "{}") -> list[str]:
    text = (
        f"version: 1\nname: t\nload: {load}\nmeasure: {measure}\nclasses:\n"
        "  - {name: chat, weight: 0.7, prompts: {file: prompts.jsonl}}\n"
        "  - {name: code, weight: 0.3, prompts: {file: prompts.jsonl}, slo: {ttft_p95_ms: 800}}\n"
    )
    return load_profile(write_profile(text)).thin_limits()


def test_a_thin_limit_of_a_rate(write_profile: Write) -> None:
    assert thin_limits(write_profile, "{kind: rate, rps: 6}", "{min_requests: 120}") == [
        "classes[1].slo.ttft_p95_ms: a p95 limit needs at least 59 requests of class 'code'; "
        "at 0.3 x 6 rps that takes 33 s, the window is 20 s"
    ]


def test_a_thin_limit_of_stages_has_their_mean_rate(write_profile: Write) -> None:
    # 40 + 80 arrivals in 30 s: 4 a second, 36 of them code. 59 / (0.3 x 4) = 49.2 s.
    load = "{kind: stages, stages: [{rps: 2, duration_s: 20}, {rps: 8, duration_s: 10}]}"
    assert thin_limits(write_profile, load) == [
        "classes[1].slo.ttft_p95_ms: a p95 limit needs at least 59 requests of class 'code'; "
        "at 0.3 x 4 rps that takes 49 s, the window is 30 s"
    ]


@pytest.mark.parametrize(("count", "of_class", "is_thin"), [(192, 58, True), (196, 59, False)])
def test_a_thin_limit_in_closed_loop(
    write_profile: Write, count: int, of_class: int, is_thin: bool
) -> None:
    # 0.3 x 192 = 57.6 -> 58, since its remainder is the larger; 0.3 x 196 = 58.8 -> 59.
    found = thin_limits(write_profile, CONCURRENCY, f"{{min_requests: {count}}}")
    assert bool(found) is is_thin
    assert all(line.endswith(f"one measurement has {of_class}") for line in found)


def test_counts_that_a_schedule_knows_go_before_the_weights(write_profile: Write) -> None:
    text = f"{GOOD}    slo: {{ttft_p95_ms: 800}}\n"
    profile = load_profile(write_profile(text))
    assert profile.thin_limits({"default": 59}) == []
    (line,) = profile.thin_limits({"default": 58})
    assert line.endswith("one measurement has 58")


# --- the whole schema ---

DESIGN = """\
version: 1
name: support-chat
model: Qwen/Qwen3-Coder-30B-A3B-Instruct
drafter: amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE
seed: 7
endpoint: chat
load: {kind: rate, rps: 6.0, arrival: gamma, burstiness: 0.6}
measure: {warmup: auto, min_requests: 200, max_duration_s: 180, request_timeout_s: 120}
classes:
  - name: chat
    weight: 0.7
    prompts: {file: prompts.jsonl, format: auto, holdout: 0.5}
    shared_prefix: {tokens: 800, groups: 3}
    output: {max_tokens: {from: data, default: 512}}
    sampling: {temperature: 0.7, top_p: 0.95}
    slo: {ttft_p95_ms: 500, tpot_p95_ms: 25, e2el_p95_ms: 8000}
  - name: code
    weight: 0.3
    prompts: {file: prompts.jsonl}
    sampling: {temperature: 0.0}
    slo: {ttft_p95_ms: 800}
objective: {maximize: goodput_tokens_per_s, practical_margin_ratio: 0.02}
cost: {gpu_hourly_usd: 3.50, gpus: 1}
quality: {gate: teacher_forced, tasks: []}
"""
OTHER_LOADS = (
    "{kind: concurrency, concurrency: 32}",
    "{kind: users, users: 50, think_time: {dist: lognormal, median_s: 8, sigma: 0.6}}",
    "{kind: stages, stages: [{rps: 4, duration_s: 12}, {rps: 9, duration_s: 6, arrival: constant}]}",
    "{kind: trace, file: azure_code.csv, format: azure, window: {start_s: 0, duration_s: 300}, "
    "time_scale: 1.0}",
)


def test_every_key_of_the_design_is_read(write_profile: Write) -> None:
    profile = load_profile(write_profile(DESIGN))
    chat, code = profile.classes
    assert profile.load == RateLoad(kind="rate", rps=6.0, arrival="gamma", burstiness=0.6)
    assert profile.measure.warmup == "auto"
    assert chat.prompts == PromptSource(file=Path("prompts.jsonl"), format="auto", holdout=0.5)
    assert chat.shared_prefix == SharedPrefix(tokens=800, groups=3)
    assert [chat.output.limit(tokens) for tokens in (None, 99)] == [512, 99]
    assert [code.output.limit(tokens) for tokens in (None, 99)] == [256, 256]
    assert profile.objective_name == "goodput_tps"
    assert profile.is_maximized
    assert profile.cost == Cost(gpu_hourly_usd=3.5, gpus=1)
    assert profile.quality.gate == "teacher_forced"


@pytest.mark.parametrize("load", OTHER_LOADS)
def test_every_load_of_the_design_is_read(write_profile: Write, load: str) -> None:
    text = DESIGN.replace("{kind: rate, rps: 6.0, arrival: gamma, burstiness: 0.6}", load)
    profile = load_profile(write_profile(text))
    assert profile.load.kind == yaml.safe_load(load)["kind"]


@pytest.mark.parametrize(
    ("load", "is_closed_loop", "num_users", "offered", "num_requests"),
    [
        (OTHER_LOADS[0], True, 32, 32, 200),
        (OTHER_LOADS[1], True, 50, 50, 200),
        (OTHER_LOADS[2], False, None, None, 102),  # 4 x 12 + 9 x 6
        (OTHER_LOADS[3], False, None, None, None),
        ("{kind: rate, rps: 6, max_concurrency: 9}", False, None, 9, 200),
    ],
)
def test_what_a_load_says_of_itself(
    write_profile: Write,
    load: str,
    is_closed_loop: bool,
    num_users: int | None,
    offered: int | None,
    num_requests: int | None,
) -> None:
    text = DESIGN.replace("{kind: rate, rps: 6.0, arrival: gamma, burstiness: 0.6}", load)
    profile = load_profile(write_profile(text))
    assert profile.is_closed_loop is is_closed_loop
    assert profile.num_users == num_users
    assert profile.offered_concurrency == offered
    assert profile.num_requests == num_requests


@pytest.mark.parametrize(
    ("spelt_out", "name"),
    [
        ("goodput_tokens_per_s", "goodput_tps"),
        ("output_tokens_per_s", "output_throughput_tps"),
        ("requests_per_s", "request_throughput_rps"),
        ("goodput_requests_per_s", "goodput_rps"),
    ],
)
def test_throughputs_may_be_spelt_out(write_profile: Write, spelt_out: str, name: str) -> None:
    text = f"{GOOD}objective: {{maximize: {spelt_out}}}\n"
    assert load_profile(write_profile(text)).objective_name == name


@pytest.mark.parametrize("load", OTHER_LOADS)
def test_a_profile_survives_being_stored(write_profile: Write, load: str) -> None:
    """A study keeps its profile as JSON and reads it back."""
    text = DESIGN.replace("{kind: rate, rps: 6.0, arrival: gamma, burstiness: 0.6}", load)
    text = text.replace("format: auto,", "columns: {prompt: q},")
    profile = load_profile(write_profile(text))
    stored = json.loads(json.dumps(profile.model_dump(mode="json")))
    read = TrafficProfile.model_validate(stored)
    assert [getattr(read, name) for name in TrafficProfile.model_fields] == [
        getattr(profile, name) for name in TrafficProfile.model_fields
    ]


DOCUMENTED = re.findall(
    r"^\| `(\{kind: .*?\})` \|",
    (ROOT / "docs/traffic.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def test_every_load_of_the_documentation_is_read(write_profile: Write) -> None:
    kinds = set()
    for load in DOCUMENTED:
        text = GOOD.replace(CONCURRENCY, load)
        profile = load_profile(write_profile(f"{text}measure: {{max_duration_s: 600}}\n"))
        kinds.add(profile.load.kind)
    assert kinds == {"concurrency", "users", "rate", "stages", "trace"}


def test_another_concurrency_is_a_closed_loop_of_its_own(write_profile: Write) -> None:
    # 50 users who think are not 50 requests at once.
    text = DESIGN.replace(
        "{kind: rate, rps: 6.0, arrival: gamma, burstiness: 0.6}", OTHER_LOADS[1]
    )
    profile = load_profile(write_profile(text))
    assert profile.with_concurrency(50).load == ConcurrencyLoad(kind="concurrency", concurrency=50)
    assert profile.with_concurrency(50).folder == profile.folder
    full = load_profile(write_profile(GOOD))
    assert full.with_concurrency(4) is full


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
