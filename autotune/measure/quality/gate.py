"""The gate: what it has to ask which server, in the fewest launches, and what follows from it.

A config that keeps weights and KV cache as they are must say what the model says without
speculation. The baseline, launched after it, judges its answers token by token: two launches.

A config that quantises weights or KV cache is another model, and its answers cannot be the
baseline's. It is judged by its distributions on the baseline's answers, so the baseline is launched
before it. If it speculates as well, what is missing is whether its tokens are those of its own
target. It is asked itself: prompt log-probabilities come from the target alone, in one pass over the
prompt in which nothing is drafted. So that takes two launches too, not a third of its K = 0 twin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autotune.measure.client import ShouldStop
from autotune.measure.loops import is_looping
from autotune.measure.quality.check_runner import CheckOutcome
from autotune.measure.quality.divergence import DistributionFigures, compare_distributions
from autotune.measure.quality.endpoint import (
    Answer,
    Endpoint,
    ScoredToken,
    TokenSequence,
    collect_answers,
    score,
)
from autotune.measure.quality.forcing import ForcedFigures, teacher_forced
from autotune.measure.quality.matching import match
from autotune.measure.quality.prompts import QualityPrompt
from autotune.measure.quality.rules import judge
from autotune.measure.quality.tasks import LoadedTask, compare_tasks, solve
from autotune.measure.quality.verdict import (
    LoopFigures,
    QualityFigures,
    QualityLevel,
    QualityVerdict,
)
from autotune.traffic.quality import QualitySettings

Side = Literal["baseline", "candidate"]
Scores = dict[TokenSequence, tuple[ScoredToken, ...]]

MIN_CONCURRENCY = 4
"""The second concurrency is at least this, so that requests share batches at all."""
NUM_TOP = 20
"""Best tokens compared per position: the most that vLLM gives unless told otherwise."""
MAX_GAP_NATS = 0.25
MAX_GAP_QUANTISED_NATS = 0.5
MAX_SCORED_TOKENS = 4096
"""Longer sequences are not scored. vLLM holds the log-probabilities of the whole vocabulary for each
token of a pass, outside of the memory that it has set aside: 4096 tokens of a vocabulary of 150,000
are 2.5 GB in fp32."""


@dataclass(frozen=True)
class Findings:
    """What one server answered."""

    serial: tuple[Answer, ...]
    """Answers to the prompts, one at a time."""
    concurrent: tuple[Answer, ...]
    """Answers to the same prompts, several at a time."""
    outcomes: tuple[tuple[CheckOutcome, ...], ...]
    """For each task, whether each of its questions was solved."""
    scores: Scores = field(default_factory=dict)
    """What the server thinks of sequences that it was shown."""

    @property
    def answers(self) -> tuple[Answer, ...]:
        return (*self.serial, *self.concurrent)


class Gate:
    """Asks a config's server and the baseline's, and gives the verdict.

    Ask `missing` which server is needed, launch it, and call `visit_baseline` or `visit_candidate`;
    repeat until `missing` returns None; then `verdict`. The baseline is the same model without
    speculation and without quantisation.
    """

    def __init__(
        self,
        settings: QualitySettings,
        prompts: Sequence[QualityPrompt],
        concurrency: int,
        *,
        is_lossy: bool,
        tasks: Sequence[LoadedTask] = (),
        baseline: Findings | None = None,
    ) -> None:
        """
        Args:
            prompts: what to ask, see `quality_prompts`; at least one.
            concurrency: the profile's, requests in flight.
            is_lossy: whether the candidate's weights or KV cache are quantised.
            tasks: the settings' tasks, from `load_tasks`.
            baseline: the `baseline` of an earlier gate with the same prompts, tasks and concurrency;
                then it is not asked again for what is known.
        """
        self.concurrency = max(concurrency, MIN_CONCURRENCY)
        self.baseline = baseline
        self._candidate: Findings | None = None
        self._settings = settings
        self._prompts = tuple(prompts)
        self._is_lossy = is_lossy
        self._tasks = tuple(tasks)
        self._max_gap_nats = settings.max_logprob_gap or (
            MAX_GAP_QUANTISED_NATS if is_lossy else MAX_GAP_NATS
        )

    def missing(self) -> Side | None:
        """Say which server has to be visited next; None when the verdict can be given."""
        if self._settings.gate == "off":
            return None
        order: tuple[Side, Side] = ("candidate", "baseline")
        if self._is_lossy:
            order = ("baseline", "candidate")
        return next((side for side in order if not self._is_complete(side)), None)

    def visit_baseline(self, endpoint: Endpoint, should_stop: ShouldStop | None = None) -> None:
        """Ask the baseline everything that is missing of it.

        Raises:
            EndpointFailed: it did not answer.
            MeasurementStopped: `should_stop` said so.
        """
        if self.baseline is None:
            self.baseline = self._collect(endpoint, should_stop)
        scores = self.baseline.scores
        # The answers of one at a time are those that distributions are compared on.
        _score_into(scores, endpoint, self.baseline.serial, NUM_TOP, should_stop)
        _score_into(scores, endpoint, self.baseline.concurrent, 1, should_stop)
        if self._candidate is not None and not self._is_lossy:
            _score_into(scores, endpoint, self._candidate.answers, 1, should_stop)

    def visit_candidate(self, endpoint: Endpoint, should_stop: ShouldStop | None = None) -> None:
        """Ask the candidate everything that is missing of it.

        Raises:
            EndpointFailed: it did not answer.
            MeasurementStopped: `should_stop` said so.
        """
        if self._candidate is None:
            self._candidate = self._collect(endpoint, should_stop)
        if self._is_lossy and self.baseline is not None:
            scores = self._candidate.scores
            # The baseline's first: one of our own answers may be equal, and needs fewer best tokens.
            _score_into(scores, endpoint, self.baseline.serial, NUM_TOP, should_stop)
            _score_into(scores, endpoint, self._candidate.answers, 1, should_stop)

    def verdict(self) -> QualityVerdict:
        """Judge what was found.

        Returns:
            A verdict `not_checked`, with the reason, where the gate is off or something is missing.
        """
        if self._settings.gate == "off":
            return _not_checked("the quality gate is off")
        if self.missing() is not None or self.baseline is None or self._candidate is None:
            return _not_checked(f"the {self.missing()}'s server has not been asked")
        figures = self._figures(self.baseline, self._candidate)
        if figures.forced.num_positions == 0:
            return _not_checked(
                f"all prompts are too long to be scored, above {MAX_SCORED_TOKENS} tokens"
            )
        return judge(figures, self._settings.thresholds)

    def _is_complete(self, side: Side) -> bool:
        """Whether a server was asked for answers, and shown all sequences that it has to score."""
        findings = self.baseline if side == "baseline" else self._candidate
        return findings is not None and all(
            answer.sequence in findings.scores for answer in _scorable(self._to_score(side))
        )

    def _to_score(self, side: Side) -> Iterable[Answer]:
        baseline = self.baseline.answers if self.baseline else ()
        candidate = self._candidate.answers if self._candidate else ()
        if side == "baseline":
            return baseline if self._is_lossy else (*baseline, *candidate)
        if not self._is_lossy:
            return ()
        return (*(self.baseline.serial if self.baseline else ()), *candidate)

    def _collect(self, endpoint: Endpoint, should_stop: ShouldStop | None) -> Findings:
        serial = collect_answers(endpoint, self._prompts, 1, should_stop)
        concurrent = collect_answers(endpoint, self._prompts, self.concurrency, should_stop)
        outcomes = [solve(task, endpoint, self.concurrency, should_stop) for task in self._tasks]
        return Findings(tuple(serial), tuple(concurrent), tuple(outcomes))

    def _figures(self, baseline: Findings, candidate: Findings) -> QualityFigures:
        judged_by = candidate if self._is_lossy else baseline
        return QualityFigures(
            is_lossy=self._is_lossy,
            num_prompts=len(self._prompts),
            num_unscored=sum(
                not _is_scorable(answer) for answer in (*baseline.serial, *candidate.answers)
            ),
            concurrency=self.concurrency,
            floor=match(baseline.serial, baseline.concurrent),
            match_serial=match(candidate.serial, baseline.serial),
            match_concurrent=match(candidate.concurrent, baseline.concurrent),
            num_cut_short=self._num_cut_short(baseline, candidate),
            forced=self._forced(candidate, judged_by.scores),
            forced_baseline=self._forced(baseline, baseline.scores),
            distributions=_distances(baseline, candidate) if self._is_lossy else None,
            loops=_loops(baseline, candidate),
            tasks=tuple(
                compare_tasks(task, b, c)
                for task, b, c in zip(
                    self._tasks, baseline.outcomes, candidate.outcomes, strict=True
                )
            ),
        )

    def _forced(
        self, findings: Findings, scores: Mapping[TokenSequence, Sequence[ScoredToken]]
    ) -> ForcedFigures:
        thresholds = self._settings.thresholds
        answers = [*enumerate(findings.serial), *enumerate(findings.concurrent)]
        return teacher_forced(
            [(number, scores[a.sequence]) for number, a in answers if _is_scorable(a)],
            self._max_gap_nats,
            thresholds.max_single_gap_nats,
            thresholds.min_forced_ratio,
        )

    def _num_cut_short(self, baseline: Findings, candidate: Findings) -> int:
        """Count answers that end for no good reason, where the baseline's answer does not."""
        prompts = [*self._prompts, *self._prompts]
        return sum(
            _is_cut_short(ours, prompt.max_tokens) and not _is_cut_short(its, prompt.max_tokens)
            for prompt, ours, its in zip(prompts, candidate.answers, baseline.answers, strict=True)
        )


def _score_into(
    scores: Scores,
    endpoint: Endpoint,
    answers: Iterable[Answer],
    num_top: int,
    should_stop: ShouldStop | None,
) -> None:
    """Score what is not scored yet; equal answers at two concurrencies are scored once."""
    wanted = list(
        dict.fromkeys(a.sequence for a in _scorable(answers) if a.sequence not in scores)
    )
    if wanted:
        found = score(endpoint, wanted, num_top, should_stop)
        scores.update(zip(wanted, found, strict=True))


def _scorable(answers: Iterable[Answer]) -> list[Answer]:
    return [answer for answer in answers if _is_scorable(answer)]


def _is_scorable(answer: Answer) -> bool:
    return 0 < len(answer.token_ids) <= MAX_SCORED_TOKENS - len(answer.prompt_token_ids)


def _is_cut_short(answer: Answer, max_tokens: int) -> bool:
    if answer.finish_reason == "length":
        return len(answer.token_ids) < max_tokens
    return answer.finish_reason != "stop" or not answer.token_ids


def _distances(baseline: Findings, candidate: Findings) -> DistributionFigures:
    sequences = [answer.sequence for answer in _scorable(baseline.serial)]
    return compare_distributions(
        [baseline.scores[s] for s in sequences], [candidate.scores[s] for s in sequences]
    )


def _loops(baseline: Findings, candidate: Findings) -> LoopFigures:
    b, c = _looping_prompts(baseline), _looping_prompts(candidate)
    return LoopFigures(
        num_prompts=len(baseline.serial),
        num_baseline=len(b),
        num_candidate=len(c),
        num_new=len(c - b),
    )


def _looping_prompts(findings: Findings) -> set[int]:
    """Return the numbers of the prompts with a loop in any of their answers."""
    both = (findings.serial, findings.concurrent)
    return {
        number
        for answers in both
        for number, answer in enumerate(answers)
        if is_looping(answer.text)
    }


def _not_checked(reason: str) -> QualityVerdict:
    return QualityVerdict(QualityLevel.NOT_CHECKED, (reason,))
