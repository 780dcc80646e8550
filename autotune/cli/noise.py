"""`autotune noise`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from autotune.cli.options import engine_options, parse_engine_options, storage_option


@click.command("noise")
@click.option("--profile", "profile_path", required=True, type=click.Path(path_type=Path),
              help="Traffic profile (YAML), or the name of a shipped one.")  # fmt: skip
@click.option("--space", "space_name", default="p-eagle", show_default=True,
              help="Search space that the config comes from.")  # fmt: skip
@click.option("--model", help="Target model: folder or hub id. Default: the profile's.")
@click.option("--drafter", "drafters", multiple=True, help="Draft head: folder or hub id.")
@click.option("--k", "num_speculative_tokens", type=click.IntRange(0, 128),
              help="Repeat the config of this K. Default: the space's default config.")  # fmt: skip
@click.option("--concurrency", type=click.IntRange(1, 4096),
              help="Measure at another concurrency than the profile's.")  # fmt: skip
@click.option("--launches", "num_launches", default=3, show_default=True, type=click.IntRange(2, 100),
              help="Fresh launches of the config.")  # fmt: skip
@click.option("--measurements", "num_measurements", default=2, show_default=True,
              type=click.IntRange(1, 100), help="How often each launch is measured.")  # fmt: skip
@click.option("--study", help="Name of the study. Default: the profile's name and -noise.")
@click.option("--resume/--fresh", "is_resume", default=True,
              help="Count earlier launches of the study (default), or delete it.")  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Print JSON instead of a table.")
@storage_option
@engine_options
def command(
    profile_path: Path,
    space_name: str,
    model: str | None,
    drafters: tuple[str, ...],
    num_speculative_tokens: int | None,
    concurrency: int | None,
    num_launches: int,
    num_measurements: int,
    study: str | None,
    is_resume: bool,
    is_json: bool,
    storage: str,
    engine_name: str,
    vllm_python: Path | None,
    engine_options: tuple[str, ...],
) -> int:
    """Launch one config again and again, and say how far equal things differ.

    The differences are this machine's noise floor: no smaller gain can be believed. The more
    launches a search spends on its finalists, the smaller the gain that it can see.
    """
    from autotune.cli.running import run_noise_and_report
    from autotune.search.build import EngineChoice, build_search
    from autotune.search.setup import SearchSettings
    from autotune.traffic.profile import load_profile

    profile = load_profile(profile_path)
    if concurrency is not None:
        profile = profile.with_concurrency(concurrency)
    name = study or f"{profile.name}-noise"
    settings = SearchSettings(
        storage=storage,
        study=name,
        out_dir=Path("autotune-out") / name,
        is_fresh=not is_resume,
        command_line=["autotune", *sys.argv[1:]],
    )
    engine = EngineChoice(engine_name, vllm_python, parse_engine_options(engine_options))
    setup = build_search(profile, space_name, engine, settings, model=model, drafters=drafters,
                         where=str(profile_path))  # fmt: skip
    return run_noise_and_report(
        setup, num_speculative_tokens, num_launches, num_measurements, is_json=is_json
    )
