"""`autotune search`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from autotune.cli.options import Duration, engine_options, parse_engine_options, storage_option


@click.command("search")
@click.option("--profile", "profile_path", required=True, type=click.Path(path_type=Path),
              help="Traffic profile (YAML), or the name of a shipped one.")  # fmt: skip
@click.option("--space", "space_name", default="p-eagle", show_default=True,
              help="Search space (YAML), or the name of a shipped one.")  # fmt: skip
@click.option("--model", help="Target model: folder or hub id. Default: the profile's.")
@click.option("--drafter", "drafters", multiple=True,
              help="Draft head: folder or hub id; several are searched over.")  # fmt: skip
@click.option("--budget", "budget_s", type=Duration(), help="Stop after this time, such as 90m.")
@click.option("--trials", "max_trials", type=click.IntRange(1, 100_000),
              help="Configs to try before the best are confirmed. Default: 20, or by budget.")  # fmt: skip
@click.option("--finalists", "num_finalists", default=2, show_default=True, type=click.IntRange(1, 20),
              help="Best configs to confirm, beside no speculation and the default.")  # fmt: skip
@click.option("--repeats", "num_repeats", default=3, show_default=True, type=click.IntRange(2, 20),
              help="Fresh launches a finalist, on average.")  # fmt: skip
@click.option(
    "--sampler", default="auto", show_default=True, help="auto, tpe, gp, random or grid."
)
@click.option("--refine-by-batch", "is_refined_by_batch", is_flag=True,
              help="After the decision, try switching speculation off above a batch size.")  # fmt: skip
@click.option("--warm-start/--cold-start", "is_warm_started", default=True, show_default=True,
              help="Begin with what earlier studies of this GPU and model learnt.")  # fmt: skip
@click.option("--study", help="Name of the study. Default: the profile's name.")
@click.option("--resume/--fresh", "is_resume", default=True,
              help="Go on with an existing study (default), or delete it and start over.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Default: the profile's.")
@click.option("--out", "out_dir", type=click.Path(path_type=Path),
              help="Folder for logs and the resulting files. Default: autotune-out/STUDY.")  # fmt: skip
@click.option(
    "--plan", "is_plan", is_flag=True, help="Print what would be launched; launch nothing."
)
@storage_option
@engine_options
def command(
    profile_path: Path,
    space_name: str,
    model: str | None,
    drafters: tuple[str, ...],
    budget_s: float | None,
    max_trials: int | None,
    num_finalists: int,
    num_repeats: int,
    sampler: str,
    is_refined_by_batch: bool,
    is_warm_started: bool,
    study: str | None,
    is_resume: bool,
    seed: int | None,
    out_dir: Path | None,
    is_plan: bool,
    storage: str,
    engine_name: str,
    vllm_python: Path | None,
    engine_options: tuple[str, ...],
) -> int:
    """Search serving configs for your traffic, and recommend one.

    Run the same command again to go on with a study that was stopped.
    """
    from autotune.cli.running import check_sampler, print_plan, run_and_report
    from autotune.search.build import EngineChoice, build_search
    from autotune.search.setup import SearchSettings
    from autotune.traffic.profile import load_profile

    check_sampler(sampler)
    profile = load_profile(profile_path)
    settings = SearchSettings(
        storage=storage,
        study=study,
        out_dir=out_dir or Path("autotune-out") / (study or profile.name),
        sampler=sampler,
        seed=seed,
        max_trials=max_trials,
        budget_s=budget_s,
        num_finalists=num_finalists,
        num_repeats=num_repeats,
        is_refined_by_batch=is_refined_by_batch,
        is_warm_started=is_warm_started,
        is_fresh=not is_resume,
        command_line=["autotune", *sys.argv[1:]],
    )
    engine = EngineChoice(engine_name, vllm_python, parse_engine_options(engine_options))
    setup = build_search(profile, space_name, engine, settings, model=model, drafters=drafters,
                         where=str(profile_path))  # fmt: skip
    if is_plan:
        print_plan(setup)
        return 0
    return run_and_report(setup)
