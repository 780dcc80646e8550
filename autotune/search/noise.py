"""A/A runs: one config launched again and again, to learn how far equal things differ here."""

from __future__ import annotations

from collections.abc import Callable

from autotune.errors import AutotuneError, InputError, suggestion
from autotune.measure.records import Measurement
from autotune.search.launcher import Launcher
from autotune.search.listener import SearchListener
from autotune.search.opening import open_study
from autotune.search.setup import SearchSetup
from autotune.serving.config import ServingConfig
from autotune.store.records import LaunchState, Phase, StudyRecord
from autotune.store.repository import Store

MAX_FAILED_LAUNCHES = 2
"""Of one run; a config that fails oftener has no noise to speak of."""


def noise_config(setup: SearchSetup, num_speculative_tokens: int | None) -> ServingConfig:
    """Choose the config that is repeated: the default, or the one of that K nearest to it.

    Raises:
        InputError: no candidate has that K.
    """
    default = setup.candidates.default.config
    if num_speculative_tokens is None:
        return default
    of_k = [
        c.config
        for c in setup.candidates.items
        if c.config.num_speculative_tokens == num_speculative_tokens
    ]
    if not of_k:
        known = sorted({c.config.num_speculative_tokens for c in setup.candidates.items})
        raise InputError(
            f"--k: no candidate of the search space has K = {num_speculative_tokens}. "
            f"{suggestion(str(num_speculative_tokens), map(str, known))}"
        )
    return min(of_k, key=lambda config: _num_differences(config, default))


def _num_differences(config: ServingConfig, other: ServingConfig) -> int:
    theirs = other.as_dict()
    return sum(value != theirs[name] for name, value in config.as_dict().items())


def run_noise(
    setup: SearchSetup,
    store: Store,
    config: ServingConfig,
    num_launches: int,
    num_measurements: int,
    listener: SearchListener,
    should_stop: Callable[[], bool],
) -> tuple[tuple[Measurement, ...], ...]:
    """Launch `config` until it has been measured in `num_launches` launches.

    Launches of an earlier run under the same study name count; nothing measured is repeated.

    Args:
        num_measurements: how often each launch is measured.

    Returns:
        The measurements, grouped by launch.

    Raises:
        MeasurementStopped: `should_stop` said so; what was measured is kept.
        AutotuneError: the config keeps failing.
        StudyChangedError: the study of this name was defined otherwise.
    """
    study = open_study(setup, store)
    store.take_hold(study)
    try:
        store.abandon_running(study)
        launcher = Launcher(setup, store, study, listener, should_stop)
        listener.on_start(setup, len(_measured(store, study, config)))
        listener.on_phase(Phase.NOISE, num_launches)
        num_failed = 0
        while (done := len(_measured(store, study, config))) < num_launches:
            result = launcher.measure(config, Phase.NOISE, done, num_measurements=num_measurements)
            num_failed += result.failure is not None
            if num_failed == MAX_FAILED_LAUNCHES:
                raise AutotuneError(f"{setup.label(config)} keeps failing: {result.failure}")
        return _measured(store, study, config)[:num_launches]
    finally:
        store.release(study)


def _measured(
    store: Store, study: StudyRecord, config: ServingConfig
) -> tuple[tuple[Measurement, ...], ...]:
    return tuple(
        launch.measurements
        for launch in store.launches(study)
        if launch.phase is Phase.NOISE
        and launch.state is LaunchState.MEASURED
        and launch.config.digest == config.digest
    )
