"""Everything that can be known, checked and refused before the first launch."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import autotune
from autotune.errors import InputError, invalid
from autotune.measure.quality.tasks import LoadedTask, load_tasks
from autotune.search.calibration import ladder_schedules, screen_schedule
from autotune.search.candidates import Candidates, enumerate_candidates, largest_depth
from autotune.search.decision import Goal
from autotune.search.definition import study_definition
from autotune.search.samplers import resolve_sampler
from autotune.search.space import SearchSpace
from autotune.serving.capabilities import (
    FP8_ARITHMETIC_CAPABILITY,
    EngineInfo,
    capabilities,
)
from autotune.serving.config import ServingConfig
from autotune.serving.engine import Engine
from autotune.serving.memory import MemoryModel
from autotune.serving.models import DrafterInfo, ModelInfo
from autotune.serving.sizes import ServingSizes
from autotune.serving.vllm_options import Needs
from autotune.store.records import Phase
from autotune.store.schema import without_password
from autotune.traffic.caveats import caveats
from autotune.traffic.drawing import build_schedule
from autotune.traffic.pools import Part
from autotune.traffic.profile import TrafficProfile
from autotune.traffic.schedule import Schedule
from autotune.traffic.tokens import TokenCounter, longest_request, token_counter

DEFAULT_TRIALS = 20
_STUDY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""Also names a folder and stands in comments of shell scripts."""


@dataclass(frozen=True)
class SearchSettings:
    """What the user decides about a search, beside traffic and space."""

    storage: str = "autotune.db"
    study: str | None = None
    """Name of the study; the profile's name when None."""
    out_dir: Path = Path("autotune-out")
    sampler: str = "auto"
    seed: int | None = None
    """Seed of schedule and sampler; the profile's own when None."""
    max_trials: int | None = None
    """Configs to try in the search phase; `DEFAULT_TRIALS` when there is no budget either."""
    budget_s: float | None = None
    num_finalists: int = 2
    """Best configs of the search that are confirmed, beside no speculation and the default."""
    num_repeats: int = 3
    """Fresh launches a finalist, on average: the race spends them where they decide something."""
    is_refined_by_batch: bool = False
    """Try switching speculation off above a batch size, after the decision."""
    is_warm_started: bool = True
    """Whether the cost model starts from what earlier studies of this GPU and model learnt."""
    is_fresh: bool = False
    """Throw an existing study of this name away."""
    command_line: Sequence[str] = ()


@dataclass(frozen=True)
class SearchSetup:
    """A search that is ready to run: every input checked, every candidate listed."""

    profile: TrafficProfile
    space: SearchSpace
    settings: SearchSettings
    engine: Engine
    info: EngineInfo
    model: str
    target: ModelInfo | None
    drafters: tuple[DrafterInfo, ...]
    schedule: Schedule
    """A whole measurement on the prompts of the search."""
    screen_schedule: Schedule
    """The beginning of `schedule`, which candidates are screened with."""
    ladder: tuple[Schedule, ...]
    """Short schedules at lower concurrencies, for calibration."""
    confirm_schedule: Schedule
    """What the finalists are compared on: held-out prompts, where the profile holds some out."""
    candidates: Candidates
    needs: Needs
    sizes: ServingSizes | None
    """What the arithmetic of memory and cost needs; None where it is not known."""
    why_not_off_by_batch: str | None
    """Why speculation cannot be switched off above a batch size here; None where it can."""
    goal: Goal
    definition: Mapping[str, Any]
    environment: Mapping[str, Any]
    notes: tuple[str, ...] = field(default=())
    quality_tasks: tuple[LoadedTask, ...] = field(default=())
    """Questions with checkable answers, for the quality gate."""
    caveats: tuple[str, ...] = field(default=())
    """What limits every conclusion of this study; goes into its decision."""

    def schedule_of(self, phase: Phase) -> Schedule:
        """Return what a launch of that phase is measured with."""
        return self.screen_schedule if phase is Phase.SEARCH else self.confirm_schedule

    @property
    def study_name(self) -> str:
        return self.settings.study or self.profile.name

    @property
    def sampler(self) -> str:
        """Name of the sampler that is used: the user's, or what `auto` comes to."""
        return resolve_sampler(self.settings.sampler, has_sizes=self.sizes is not None)

    @property
    def seed(self) -> int:
        return self.profile.seed if self.settings.seed is None else self.settings.seed

    @property
    def max_trials(self) -> int:
        """Configs to try in the search phase."""
        limit = self.settings.max_trials
        if limit is None:
            limit = (
                DEFAULT_TRIALS if self.settings.budget_s is None else len(self.candidates.items)
            )
        return min(limit, len(self.candidates.items))

    def label(self, config: ServingConfig) -> str:
        """Name a config by what sets it apart from the other candidates."""
        return config.label(self.candidates.standing_knobs, self.candidates.named_knobs)

    @property
    def trained_depth(self) -> int | None:
        depths = [d.trained_depth for d in self.drafters if d.trained_depth]
        return min(depths) if depths else None


def prepare(
    profile: TrafficProfile,
    space: SearchSpace,
    engine: Engine,
    model: str,
    drafters: Sequence[str],
    settings: SearchSettings,
    where: str = "--profile",
    model_where: str | None = None,
    drafter_where: str | None = None,
) -> SearchSetup:
    """Check everything and list the candidates; launches nothing.

    Args:
        profile: the traffic.
        space: the knobs.
        engine: what serves.
        model: folder or hub id of the target.
        drafters: folders or hub ids of the heads to search over; may be empty.
        settings: the rest.
        where: the profile's path, for messages.
        model_where: where the model's name stands, if not in the profile.
        drafter_where: where the drafters' names stand, if not in the profile.

    Raises:
        InputError: something the user gave cannot be used.
        PrerequisiteError: something has to be installed or downloaded first.
    """
    if settings.study is not None and not _STUDY_NAME.fullmatch(settings.study):
        raise invalid(
            "a study's name must be letters, digits, dots, dashes and underscores, at most 64, "
            "and begin with a letter or digit",
            where="--study",
            got=settings.study,
        )
    info = engine.describe()
    target, heads = engine.inspect(model, drafters, model_where or where, drafter_where or where)
    served_as = str(target.folder) if target is not None else model
    sizes = engine.sizes(served_as, heads)
    ranks = space.fixed_flags.get("data-parallel-size", 1)
    capable = capabilities(
        info,
        target,
        heads,
        beyond_trained_depth=space.beyond_trained_depth,
        data_parallel_size=ranks if isinstance(ranks, int) else 1,
        is_quantized=sizes is not None and sizes.target.is_quantized,
    )
    seed = profile.seed if settings.seed is None else settings.seed
    counter = token_counter(target.folder if target is not None else None)
    schedule = build_schedule(profile, seed, counter=counter)
    confirm_schedule = build_schedule(profile, seed, counter=counter, part=Part.HOLDOUT)
    longest = _longest_tokens(profile, (schedule, confirm_schedule), counter, target, where)

    def needs(max_k: int) -> Needs:
        return Needs(
            concurrency=profile.offered_concurrency,
            longest_request_tokens=longest,
            max_num_speculative_tokens=max_k,
            model_max_len=target.max_position_embeddings if target is not None else None,
        )

    memory = MemoryModel(sizes, needs(largest_depth(space, capable))) if sizes else None
    candidates = enumerate_candidates(
        space,
        capable,
        served_as,
        heads,
        concurrency=profile.offered_concurrency,
        longest_request_tokens=longest,
        memory=memory,
    )
    max_k = max(c.config.num_speculative_tokens for c in candidates.items)
    return SearchSetup(
        profile=profile,
        space=space,
        settings=settings,
        engine=engine,
        info=info,
        model=model,
        target=target,
        drafters=heads,
        schedule=schedule,
        screen_schedule=screen_schedule(profile, schedule),
        ladder=ladder_schedules(schedule, profile.offered_concurrency),
        confirm_schedule=confirm_schedule,
        candidates=candidates,
        needs=needs(max_k),
        sizes=sizes,
        why_not_off_by_batch=capable.why_not_off_by_batch,
        goal=goal_of(profile),
        definition=study_definition(
            profile, space, (schedule, confirm_schedule), info, model, tuple(drafters), seed
        ),
        environment={
            **_environment(info, profile, settings, candidates, schedule),
            "sampler": resolve_sampler(settings.sampler, has_sizes=sizes is not None),
        },
        notes=(*_notes(profile, info, heads), *schedule.notes),
        quality_tasks=load_tasks(profile.quality, profile.folder),
        caveats=tuple(caveats(profile, schedule)),
    )


def goal_of(profile: TrafficProfile) -> Goal:
    """Return what the profile wants optimised and kept."""
    return Goal(
        objective=profile.objective_name,
        is_maximized=profile.is_maximized,
        limits={c.name: dict(c.slo) for c in profile.classes if c.slo},
        margin_ratio=profile.objective.practical_margin_ratio,
    )


def _longest_tokens(
    profile: TrafficProfile,
    schedules: Sequence[Schedule],
    counter: TokenCounter,
    target: ModelInfo | None,
    where: str,
) -> int:
    """Return prompt and output of the longest request.

    Raises:
        InputError: it does not fit into the model.
    """
    longest = max(
        (longest_request(schedule, counter) for schedule in schedules), key=lambda x: x.max_tokens
    )
    if target is None:
        return longest.max_tokens
    if longest.is_exact and longest.min_tokens > target.max_position_embeddings:
        raise invalid(
            f"prompt and output of every request must fit into the model's "
            f"{target.max_position_embeddings:,} tokens",
            where=where,
            key_path=f"classes.{longest.class_name}",
            got=longest.min_tokens,
            next_step=f"Shorten the prompt that begins with {longest.start!r}, or lower max_tokens.",
        )
    return longest.max_tokens


def _environment(
    info: EngineInfo,
    profile: TrafficProfile,
    settings: SearchSettings,
    candidates: Candidates,
    schedule: Schedule,
) -> dict[str, Any]:
    return {
        "standing_knobs": list(candidates.standing_knobs),
        "named_knobs": list(candidates.named_knobs),
        "anchors": {
            "baseline": candidates.baseline.config.digest,
            "default": candidates.default.config.digest,
        },
        "autotune": autotune.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "engine": info.as_dict(),
        "cost": profile.cost.model_dump() if profile.cost is not None else None,
        "prompt_realism": str(schedule.prompt_realism),
        "command_line": [without_password(a) for a in settings.command_line or sys.argv],
    }


def _notes(profile: TrafficProfile, info: EngineInfo, heads: Sequence[DrafterInfo]) -> list[str]:
    notes = [f"drafter {head.name}: {head.describe()}" for head in heads]
    if not heads:
        notes.append("no drafter: only configs without speculation are searched")
    if not profile.is_closed_loop and profile.offered_concurrency is None:
        notes.append(
            "load.max_concurrency is not given, so token budgets cannot be checked before launch"
        )
    if info.compute_capability and info.compute_capability < FP8_ARITHMETIC_CAPABILITY:
        notes.append("FP8 weights save memory here but no time: this GPU has no FP8 arithmetic")
    if info.engine == "replay":
        notes.append("replayed: every figure comes from a recording, nothing is launched")
    if info.is_simulated:
        notes.append(
            "simulated: every figure comes from a model of the hardware, not from a server"
        )
    return notes


def prepare_out_dir(path: Path) -> Path:
    """Make the output folder and prove that it can be written to.

    Raises:
        InputError: it cannot, or the disk is full.
    """
    probe = path / ".autotune-write-test"
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x" * 4096)
    except OSError as err:
        raise InputError(
            f"--out: {path} cannot be written to ({err.strerror}). "
            "Give another folder, or make space or rights there."
        ) from err
    finally:
        try:
            probe.unlink(missing_ok=True)
        except OSError:
            pass  # the folder is not writable, which was said above
    return path
