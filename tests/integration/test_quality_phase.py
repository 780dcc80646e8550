"""The quality gate inside a study: who is asked, what a failed verdict does, what is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from quality_fakes import FakeEndpoint
from study_helpers import PEAK_AT_5, make_profile, make_setup, make_space

from autotune.measure.quality.endpoint import Endpoint, EndpointKind
from autotune.measure.quality.verdict import QualityLevel
from autotune.report.study import load_study
from autotune.search.setup import SearchSetup
from autotune.search.study import SearchOutcome, run_search
from autotune.serving.config import ServingConfig
from autotune.serving.engine import EngineSettings, LaunchContext, Server
from autotune.serving.simulated import SimulatedEngine
from autotune.store.records import Phase
from autotune.store.repository import Store

SECRET = "Platypus"
NUM_TOKENS = 24


def right_token(prompt: int, position: int) -> int:
    """What the model says: any rule will do that differs from place to place."""
    return 10 + (prompt * 31 + position * position * 7) % 400


class ToyModel(FakeEndpoint):
    """Answers by `right_token`; with `wrong_at` every answer has one wrong token there."""

    def __init__(self, wrong_at: int | None = None, *, is_broken: bool = False) -> None:
        super().__init__(self._handle_request)
        self._wrong_at = wrong_at
        self._is_broken = is_broken

    async def _handle_request(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self._is_broken:
            return web.json_response({"message": "out of order"}, status=500)
        if request.path.endswith("/chat/completions"):
            return web.json_response(self._answer_to(body))
        return web.json_response(self._scores_of(body["prompt"]))

    def _answer_to(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = sum(map(ord, body["messages"][-1]["content"])) % 997
        tokens = [right_token(prompt, n) for n in range(body["max_tokens"])]
        if self._wrong_at is not None:
            tokens[self._wrong_at] += 1
        message = {"role": "assistant", "content": " ".join(f"{SECRET}{t}" for t in tokens)}
        choice = {"message": message, "token_ids": tokens, "finish_reason": "length"}
        return {"choices": [choice], "prompt_token_ids": [prompt]}

    def _scores_of(self, sequence: list[int]) -> dict[str, Any]:
        rows: list[dict[str, Any] | None] = [None]
        for position, token in enumerate(sequence[1:]):
            best = right_token(sequence[0], position)
            row = {str(best): {"logprob": -0.1, "rank": 1}}
            if token != best:
                row[str(token)] = {"logprob": -6.0, "rank": 90}
            rows.append(row)
        return {"choices": [{"prompt_logprobs": rows}]}


class AskableEngine(SimulatedEngine):
    """The simulated engine, whose servers answer questions: K by K as a toy model does."""

    can_be_asked = True

    def __init__(self, models: dict[int, ToyModel], honest: ToyModel) -> None:
        super().__init__(EngineSettings(options={"world": PEAK_AT_5, "noise": 0.01}))
        self._models = models
        self._honest = honest

    def launch(self, config: ServingConfig, context: LaunchContext) -> Server:
        server = super().launch(config, context)
        model = self._models.get(config.num_speculative_tokens, self._honest)

        def endpoint(kind: EndpointKind) -> Endpoint:
            assert kind == "chat"
            return model.endpoint

        server.endpoint = endpoint  # type: ignore[method-assign]  # the one thing that is not simulated
        return server


@pytest.fixture
def honest() -> Iterator[ToyModel]:
    with ToyModel() as model:
        yield model


def searched(folder: Path, engine: SimulatedEngine, **changes: Any) -> tuple[SearchSetup, Store]:
    profile = make_profile(
        folder,
        measure={"min_requests": 8, "warmup": 1},
        **{"quality": {"num_prompts": 6}, **changes},
    )
    space = make_space({"num_speculative_tokens": [0, 2, 5]})
    setup = make_setup(folder, profile=profile, space=space, engine=engine, num_repeats=2)
    return setup, Store(setup.settings.storage, create=True)


def run(setup: SearchSetup, store: Store) -> SearchOutcome:
    outcome = run_search(setup, store)
    assert outcome.decision is not None
    return outcome


def asked(store: Store, setup: SearchSetup) -> list[int]:
    """K of the launches that were made to check answers, in order."""
    launches = store.launches(store.get_study(setup.study_name))
    return [x.config.num_speculative_tokens for x in launches if x.phase is Phase.QUALITY]


def test_a_winner_that_answers_as_the_model_does_passes(tmp_path: Path, honest: ToyModel) -> None:
    setup, store = searched(tmp_path, AskableEngine({}, honest))

    decision = run(setup, store).decision

    assert decision is not None
    assert decision.winner_label == "K=5"
    verdict = decision.of(decision.winner).quality
    assert verdict is not None
    assert verdict.level is QualityLevel.PASSED, verdict.reasons
    assert verdict.figures is not None
    assert verdict.figures.num_prompts == 6
    assert asked(store, setup) == [5, 0]  # the config first, then who judges it
    assert not any("answers" in warning for warning in decision.warnings)
    # What is stored is what was decided, and going on repeats nothing.
    assert load_study(store, None).decision == decision
    assert run(setup, store).decision == decision
    assert asked(store, setup) == [5, 0]


def test_a_winner_with_one_wrong_token_is_not_recommended_and_the_next_one_is_judged(
    tmp_path: Path, honest: ToyModel
) -> None:
    with ToyModel(wrong_at=3) as wrong:
        setup, store = searched(tmp_path, AskableEngine({5: wrong}, honest))

        decision = run(setup, store).decision

    assert decision is not None
    assert decision.winner_label == "K=2"
    (failed,) = [f for f in decision.finalists if f.label == "K=5"]
    assert failed.is_feasible is False
    assert failed.quality is not None
    assert failed.quality.level is QualityLevel.FAILED
    assert "nat" in failed.quality.reasons[0]
    # The second one answers as the baseline does, whose own answers are judged already.
    assert asked(store, setup) == [5, 0, 2]
    rows = {row.label: row for row in load_study(store, None).rows}
    assert rows["K=5"].is_feasible is False


def test_a_config_whose_server_gives_no_answers_is_not_recommended(
    tmp_path: Path, honest: ToyModel
) -> None:
    with ToyModel(is_broken=True) as broken:
        setup, store = searched(tmp_path, AskableEngine({5: broken}, honest))

        decision = run(setup, store).decision

    assert decision is not None
    assert decision.winner_label == "K=2"
    (failed,) = [f for f in decision.finalists if f.label == "K=5"]
    assert failed.quality is not None
    assert "HTTP 500" in failed.quality.reasons[0]


def test_without_a_baseline_to_ask_there_is_a_warning_and_a_later_run_tries_again(
    tmp_path: Path, honest: ToyModel
) -> None:
    with ToyModel(is_broken=True) as broken:
        setup, store = searched(tmp_path, AskableEngine({0: broken}, honest))
        decision = run(setup, store).decision

    assert decision is not None
    assert decision.winner_label == "K=5"
    (warning,) = [w for w in decision.warnings if "were not checked" in w]
    assert "HTTP 500" in warning
    assert store.verdicts(store.get_study(None)) == {}

    again, _ = searched(tmp_path, AskableEngine({}, honest))
    decision = run(again, store).decision

    assert decision is not None
    verdict = decision.of(decision.winner).quality
    assert verdict is not None
    assert verdict.level is QualityLevel.PASSED
    assert not any("were not checked" in warning for warning in decision.warnings)


def test_the_gate_can_be_turned_off(tmp_path: Path, honest: ToyModel) -> None:
    setup, store = searched(tmp_path, AskableEngine({}, honest), quality={"gate": "off"})

    decision = run(setup, store).decision

    assert decision is not None
    assert asked(store, setup) == []
    assert decision.of(decision.winner).quality is None


def test_no_answer_and_no_prompt_is_kept(tmp_path: Path, honest: ToyModel) -> None:
    setup, store = searched(tmp_path, AskableEngine({}, honest))

    run(setup, store)

    (sent, *_) = (body for body in honest.bodies if "messages" in body)
    prompt = sent["messages"][-1]["content"]
    assert len(prompt) > 10
    stored = json.dumps(store.verdicts(store.get_study(None)))
    database = Path(setup.settings.storage).read_bytes()
    assert SECRET not in stored
    assert SECRET.encode() not in database
    assert prompt.encode() not in database


def test_tasks_whose_file_is_missing_are_refused_before_any_launch(
    tmp_path: Path, honest: ToyModel
) -> None:
    from autotune.errors import InputError

    with pytest.raises(InputError, match=r"no-such\.jsonl"):
        searched(
            tmp_path,
            AskableEngine({}, honest),
            quality={"tasks": [{"file": "no-such.jsonl"}]},
        )
