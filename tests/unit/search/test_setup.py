"""Everything that is known, checked and refused before the first launch."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from study_helpers import (
    PEAK_AT_5,
    ROUND_HARDWARE,
    TRAINED_DEPTH,
    make_profile,
    make_setup,
    make_space,
    simulated,
    with_limits,
)

import autotune
from autotune.errors import InputError
from autotune.search.setup import (
    DEFAULT_TRIALS,
    SearchSettings,
    SearchSetup,
    goal_of,
    prepare,
    prepare_out_dir,
)
from autotune.serving.engine import Engine, EngineSettings
from autotune.serving.models import DrafterInfo, ModelInfo
from autotune.serving.simulated import SimulatedEngine
from autotune.serving.sizes import ServingSizes
from autotune.store.records import Phase


class EngineWithFolders(SimulatedEngine):
    """A simulated engine that looks at model folders as the real one does."""

    def inspect(
        self, *args: Any, **kwargs: Any
    ) -> tuple[ModelInfo | None, tuple[DrafterInfo, ...]]:
        return Engine.inspect(self, *args, **kwargs)


MODEL_CONFIG = {
    "hidden_size": 64,
    "vocab_size": 1000,
    "num_attention_heads": 2,
    "max_position_embeddings": 4096,
}
WORD_TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"},
}
"""Counts words: every word is one token."""


def with_folders(
    tmp_path: Path, write_model: Callable[..., Path], max_tokens: int, **config: Any
) -> SearchSetup:
    """Prepare a search of a model folder without a drafter."""
    folder = write_model("target", {**MODEL_CONFIG, **config})
    classes = [{"prompts": {"file": "prompts.jsonl"}, "output": {"max_tokens": max_tokens}}]
    return prepare(
        make_profile(tmp_path, classes=classes),
        make_space(),
        EngineWithFolders(EngineSettings(options={"world": PEAK_AT_5})),
        str(folder),
        [],
        SearchSettings(storage=str(tmp_path / "x.db")),
        "traffic.yaml",
    )


# --- what is put together ---


def test_a_setup_is_complete(tmp_path: Path) -> None:
    setup = make_setup(tmp_path)

    assert setup.study_name == "study"
    assert setup.info.is_simulated
    assert len(setup.schedule.requests) == 8
    assert len(setup.schedule.warmup) == 1
    # K = 0 to 10, which is the trained depth of 8 and 2 more.
    assert [c.config.num_speculative_tokens for c in setup.candidates.items] == list(range(11))
    assert setup.trained_depth == TRAINED_DEPTH
    assert setup.needs.concurrency == 1
    assert setup.needs.max_num_speculative_tokens == 10


def test_nothing_is_launched_or_written(tmp_path: Path) -> None:
    make_setup(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_the_environment_says_what_would_be_measured(tmp_path: Path) -> None:
    setup = make_setup(tmp_path)
    environment = json.loads(json.dumps(setup.environment))

    assert environment["autotune"] == autotune.__version__
    assert environment["engine"]["hardware"] == "simulated Round GPU"
    assert environment["engine"]["is_simulated"] is True
    assert environment["command_line"] == ["autotune", "search"]
    by_digest = {c.config.digest: c.config.label() for c in setup.candidates.items}
    anchors = {role: by_digest[digest] for role, digest in environment["anchors"].items()}
    assert anchors == {"baseline": "K=0", "default": f"K={TRAINED_DEPTH}"}


def test_the_name_of_the_study_can_be_chosen(tmp_path: Path) -> None:
    assert make_setup(tmp_path, study="mine").study_name == "mine"


def test_the_goal_is_the_profiles(tmp_path: Path) -> None:
    classes = with_limits({"ttft_p95_ms": 500})
    goal = goal_of(
        make_profile(
            tmp_path,
            classes=classes,
            objective={"minimize": "tpot_p95_ms", "practical_margin_ratio": 0.05},
        )
    )

    assert (goal.objective, goal.is_maximized, goal.margin_ratio) == ("tpot_p95_ms", False, 0.05)
    assert goal.limits == {"default": {"ttft_p95_ms": 500.0}}


def test_a_class_without_limits_has_none(tmp_path: Path) -> None:
    assert goal_of(make_profile(tmp_path)).limits == {}


def test_the_users_seed_goes_before_the_profiles(tmp_path: Path) -> None:
    profile = make_profile(tmp_path, seed=3)

    assert make_setup(tmp_path, profile=profile).seed == 3
    assert make_setup(tmp_path, profile=profile, seed=0).seed == 0
    assert (
        make_setup(tmp_path, profile=profile, seed=3).schedule.digest
        == make_setup(tmp_path, profile=profile).schedule.digest
        != make_setup(tmp_path, profile=profile, seed=0).schedule.digest
    )


# --- how many trials ---


@pytest.mark.parametrize(
    ("settings", "num_candidates", "trials"),
    [
        ({}, 33, DEFAULT_TRIALS),
        ({}, 5, 5),  # there are no more
        ({"max_trials": 7}, 33, 7),
        ({"max_trials": 99}, 33, 33),
        ({"budget_s": 3600.0}, 33, 33),  # time is the limit then
        ({"budget_s": 3600.0, "max_trials": 7}, 33, 7),
    ],
)
def test_the_number_of_trials(
    tmp_path: Path, settings: dict[str, Any], num_candidates: int, trials: int
) -> None:
    depths = {"num_speculative_tokens": {"range": [0, num_candidates - 1]}}
    space = make_space(depths, beyond_trained_depth=True)

    setup = make_setup(tmp_path, space=space, **settings)

    assert len(setup.candidates.items) == num_candidates
    assert setup.max_trials == trials


# --- trained depth ---


def test_k_beyond_the_trained_depth_is_prepared_when_asked(tmp_path: Path) -> None:
    depths = {"num_speculative_tokens": {"range": [0, 32]}}

    assert make_setup(tmp_path, space=make_space(depths)).needs.max_num_speculative_tokens == 10
    asked = make_setup(tmp_path, space=make_space(depths, beyond_trained_depth=True))
    assert asked.needs.max_num_speculative_tokens == 32


def test_without_a_drafter_there_is_no_trained_depth(tmp_path: Path) -> None:
    setup = make_setup(tmp_path, drafters=[])

    assert setup.trained_depth is None
    assert [c.config.label() for c in setup.candidates.items] == ["K=0"]
    assert any("no drafter" in note for note in setup.notes)


# --- notes ---


def test_a_simulated_search_says_so(tmp_path: Path) -> None:
    assert any(note.startswith("simulated: ") for note in make_setup(tmp_path).notes)


@pytest.mark.parametrize(("max_concurrency", "is_noted"), [(None, True), (8, False)])
def test_budgets_that_cannot_be_checked_are_noted(
    tmp_path: Path, max_concurrency: int | None, is_noted: bool
) -> None:
    load = {"kind": "rate", "rps": 2.0, "max_concurrency": max_concurrency}

    setup = make_setup(tmp_path, profile=make_profile(tmp_path, load=load))

    assert any("load.max_concurrency is not given" in note for note in setup.notes) is is_noted
    assert setup.needs.concurrency == max_concurrency


# --- requests and the model's length ---


def test_lengths_are_counted_with_the_models_own_tokenizer(
    tmp_path: Path, write_model: Callable[..., Path]
) -> None:
    pytest.importorskip("tokenizers", reason="prompts are counted with the tokenizers package")
    folder = write_model("tokenized", MODEL_CONFIG)
    (folder / "tokenizer.json").write_text(json.dumps(WORD_TOKENIZER))
    classes = [{"prompts": {"file": "prompts.jsonl"}, "output": {"max_tokens": 100}}]

    setup = prepare(
        make_profile(tmp_path, classes=classes),
        make_space(),
        EngineWithFolders(EngineSettings(options={"world": PEAK_AT_5})),
        str(folder),
        [],
        SearchSettings(),
    )

    # "Question 3: what is 3 + 3?" is 7 words; 100 tokens of output; 64 + 16 for the template.
    assert setup.needs.longest_request_tokens == 7 + 100 + 80
    assert setup.needs.model_max_len == 4096


@pytest.mark.parametrize(("max_tokens", "is_refused"), [(93, False), (94, True)])
def test_a_prompt_longer_than_the_model_is_refused(
    tmp_path: Path, write_model: Callable[..., Path], max_tokens: int, is_refused: bool
) -> None:
    """7 words and 93 tokens of output are the 100 that the model can take."""
    pytest.importorskip("tokenizers", reason="prompts are counted with the tokenizers package")
    folder = write_model("short", {**MODEL_CONFIG, "max_position_embeddings": 100})
    (folder / "tokenizer.json").write_text(json.dumps(WORD_TOKENIZER))
    classes = [
        {
            "name": "chat",
            "prompts": {"file": "prompts.jsonl"},
            "output": {"max_tokens": max_tokens},
        }
    ]
    arguments: tuple[Any, ...] = (
        make_profile(tmp_path, classes=classes),
        make_space(),
        EngineWithFolders(EngineSettings(options={"world": PEAK_AT_5})),
        str(folder),
        [],
        SearchSettings(),
        "traffic.yaml",
    )

    if not is_refused:
        assert prepare(*arguments).needs.model_max_len == 100
        return
    with pytest.raises(InputError) as caught:
        prepare(*arguments)
    text = str(caught.value)
    assert text.startswith("traffic.yaml: classes.chat: prompt and output of every request must")
    assert "100 tokens, but got 101" in text
    assert "lower max_tokens" in text


def test_without_a_tokenizer_a_guess_refuses_nothing(
    tmp_path: Path, write_model: Callable[..., Path]
) -> None:
    """A byte counts as a token then, which is an upper bound: no ground to refuse anything."""
    setup = with_folders(tmp_path, write_model, 90, max_position_embeddings=100)

    # "Question 10: what is 10 + 10?" is 29 bytes long.
    assert setup.needs.longest_request_tokens == 29 + 90 + 80


def test_the_server_is_told_the_models_folder(
    tmp_path: Path, write_model: Callable[..., Path]
) -> None:
    setup = with_folders(tmp_path, write_model, 10)

    assert setup.candidates.baseline.config.model == str(tmp_path / "target")
    assert setup.target is not None
    assert setup.target.hidden_size == 64


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^traffic.yaml: model: .*'./nowhere'"):
        prepare(
            make_profile(tmp_path),
            make_space(),
            EngineWithFolders(EngineSettings()),
            "./nowhere",
            [],
            SearchSettings(),
            "traffic.yaml",
        )


def test_a_space_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    profile = make_profile(tmp_path, load={"kind": "concurrency", "concurrency": 8})
    space = make_space(fixed={"max-num-batched-tokens": 4})

    with pytest.raises(InputError, match="leaves nothing to launch"):
        make_setup(tmp_path, profile=profile, space=space)


# --- the output folder ---


def test_the_output_folder_is_made_and_left_clean(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"

    assert prepare_out_dir(out) == out
    assert [path.name for path in out.iterdir()] == ["logs"]
    assert prepare_out_dir(out) == out  # again, over what is there


def test_an_output_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("I was here first")

    with pytest.raises(InputError, match=r"^--out: .*out cannot be written to \("):
        prepare_out_dir(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "I was here first"


@pytest.mark.parametrize(
    "problem", [errno.ENOSPC, errno.EROFS, errno.EACCES], ids=["full", "read-only", "no rights"]
)
def test_a_folder_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: int
) -> None:
    def fail(self: Path, data: bytes) -> int:
        raise OSError(problem, "the system's own words")

    monkeypatch.setattr(Path, "write_bytes", fail)

    with pytest.raises(InputError, match=r"cannot be written to \(the system's own words\)"):
        prepare_out_dir(tmp_path / "out")


def test_simulated_worlds_are_engines_like_any_other(tmp_path: Path) -> None:
    setup = make_setup(tmp_path, engine=simulated(seed=3))

    assert setup.model == "model"
    assert setup.target is None
    assert [head.name for head in setup.drafters] == ["head"]


# --- what a search is measured with ---


def test_candidates_are_screened_with_the_beginning_of_the_whole_schedule(tmp_path: Path) -> None:
    """Two fifths of 100 requests, which is above 24 and three a slot. The race sends all."""
    setup = make_setup(
        tmp_path, profile=make_profile(tmp_path, measure={"min_requests": 100, "warmup": 1})
    )
    assert len(setup.schedule.requests) == len(setup.confirm_schedule.requests) == 100
    assert setup.screen_schedule.requests == setup.schedule.requests[:40]
    assert setup.schedule_of(Phase.SEARCH) is setup.screen_schedule
    for phase in (Phase.CONFIRM, Phase.NOISE):
        assert setup.schedule_of(phase) is setup.confirm_schedule


@pytest.mark.parametrize(("concurrency", "rungs"), [(1, []), (16, [1, 4])])
def test_the_ladder_lies_below_the_load(
    tmp_path: Path, concurrency: int, rungs: list[int]
) -> None:
    load = {"kind": "concurrency", "concurrency": concurrency}
    setup = make_setup(tmp_path, profile=make_profile(tmp_path, load=load))
    assert [rung.concurrency for rung in setup.ladder] == rungs


def test_an_engine_without_sizes_prunes_nothing_for_memory(tmp_path: Path) -> None:
    """10 GB of weights in 4 GB: refused where sizes are known, left to the launch where not."""
    small = replace(PEAK_AT_5, hardware=replace(ROUND_HARDWARE, memory_bytes=4e9))

    class Unsized(SimulatedEngine):
        def sizes(self, model: str, drafters: Sequence[DrafterInfo]) -> ServingSizes | None:  # type: ignore[override]  # what `Engine` allows
            return None

    setup = make_setup(tmp_path, engine=Unsized(EngineSettings(options={"world": small})))
    assert setup.sizes is None
    assert len(setup.candidates.items) == 11

    with pytest.raises(InputError, match="memory"):
        make_setup(tmp_path, engine=simulated(small))


def test_sizes_are_the_engines(tmp_path: Path) -> None:
    setup = make_setup(tmp_path)
    assert setup.sizes == setup.engine.sizes("model", setup.drafters)
    assert setup.sizes is not None


def test_the_default_sampler_is_our_own() -> None:
    assert SearchSettings().sampler == "auto"
