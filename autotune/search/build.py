"""From a profile and the user's options to a search that is ready to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.demo.target import demo_cache_dir, resolve
from autotune.errors import InputError
from autotune.paths import user_path
from autotune.search.setup import SearchSettings, SearchSetup, prepare
from autotune.search.space import load_space
from autotune.serving.engine import Engine, EngineSettings
from autotune.serving.registry import create_engine
from autotune.traffic.profile import TrafficProfile


@dataclass(frozen=True)
class EngineChoice:
    """Which engine serves, and what the user said about it."""

    name: str = "vllm"
    python: Path | None = None
    options: Mapping[str, str] = field(default_factory=dict)


def build_search(
    profile: TrafficProfile,
    space_name: str,
    engine: EngineChoice,
    settings: SearchSettings,
    *,
    model: str | None = None,
    drafters: Sequence[str] = (),
    where: str = "--profile",
) -> SearchSetup:
    """Resolve names, create the engine and prepare the search.

    Args:
        profile: the traffic; its model, drafters and way to start vLLM are the defaults.
        space_name: a shipped search space or a path.
        engine: what serves.
        settings: the rest of the user's decisions.
        model: overrides the profile's model.
        drafters: override the profile's drafters.
        where: the profile's path, for messages.

    Raises:
        InputError: something the user gave cannot be used.
        PrerequisiteError: something has to be installed or downloaded first.
    """
    space = load_space(space_name)
    chosen_model = model or profile.model
    if chosen_model is None:
        raise InputError(
            f"{where}: no model is named. Add `model:` to the profile, or give --model."
        )
    chosen_drafters = tuple(drafters) or profile.drafters
    served = create_engine(engine.name, engine_settings(profile, engine, settings))
    served.describe()  # a missing vLLM is told before the demo's model is converted
    return prepare(
        profile,
        space,
        served,
        _resolve(chosen_model, served),
        [_resolve(name, served) for name in chosen_drafters],
        settings,
        where,
        model_where="--model" if model else None,
        drafter_where="--drafter" if drafters else None,
    )


def engine_settings(
    profile: TrafficProfile, engine: EngineChoice, settings: SearchSettings
) -> EngineSettings:
    """Collect what an engine is told."""
    serve = profile.serve
    python = engine.python or serve.python
    return EngineSettings(
        python=user_path(python, "--vllm-python") if python is not None else None,
        command=tuple(serve.command) if serve.command and engine.python is None else None,
        env=serve.env,
        options=engine.options,
        cache_dir=demo_cache_dir(),
        seed=profile.seed if settings.seed is None else settings.seed,
    )


def _resolve(name: str, engine: Engine) -> str:
    """Turn a demo name into a folder, unless nothing real is going to be served."""
    return name if engine.describe().engine in {"simulated", "replay"} else resolve(name)
