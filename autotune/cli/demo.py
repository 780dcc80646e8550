"""`autotune demo`."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.cli.options import engine_options, parse_engine_options, storage_option


@click.command("demo")
@click.option("--concurrency", default=1, show_default=True, type=click.IntRange(1, 32),
              help="Users at once; the best config differs.")  # fmt: skip
@click.option("--fresh", is_flag=True, help="Delete an earlier run and start over.")
@click.option(
    "--plan", "is_plan", is_flag=True, help="Print what would be launched; launch nothing."
)
@storage_option
@engine_options
def command(
    concurrency: int,
    fresh: bool,
    is_plan: bool,
    storage: str,
    engine_name: str,
    vllm_python: Path | None,
    engine_options: tuple[str, ...],
) -> int:
    """Run the embedded example: a small real model on this machine, no GPU needed.

    Does what `autotune search --profile demo --space demo-cpu --trials 5 --finalists 1 --repeats 2`
    does, at the concurrency you choose; under 12 minutes on two CPU cores.
    """
    from autotune.cli.running import print_plan, run_and_report
    from autotune.search.build import EngineChoice, build_search
    from autotune.search.setup import SearchSettings
    from autotune.traffic.profile import load_profile

    profile = load_profile(Path("demo")).with_concurrency(concurrency)
    settings = SearchSettings(
        storage=storage,
        out_dir=Path("autotune-out") / profile.name,
        max_trials=5,
        num_finalists=1,
        num_repeats=2,
        is_fresh=fresh,
    )
    engine = EngineChoice(engine_name, vllm_python, parse_engine_options(engine_options))
    setup = build_search(profile, "demo-cpu", engine, settings, where="profiles/demo.yaml")
    if is_plan:
        print_plan(setup)
        return 0
    return run_and_report(setup)
