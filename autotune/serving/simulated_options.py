"""Options of the simulated engine, from code or as text from the command line."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import invalid, suggestion
from autotune.serving.failures import FailureKind
from autotune.serving.worlds import DEFAULT_WORLD, WORLDS, World

MAX_NOISE = 100


@dataclass(frozen=True)
class SimulatedOptions:
    """What the engine simulates, checked."""

    world: World
    noise: float
    """Factor on the noise of launches and steps."""
    faults: dict[str, FailureKind]
    """Failure kind by config label or digest."""


def parse_options(options: Mapping[str, Any]) -> SimulatedOptions:
    """Check the options and fill in the defaults.

    Raises:
        InputError: one is unknown or has a bad value.
    """
    _check_option_names(options)
    return SimulatedOptions(
        world=_world(options.get("world", DEFAULT_WORLD)),
        noise=_noise(options.get("noise", 1.0)),
        faults=_faults(options.get("faults", {})),
    )


def _check_option_names(options: Mapping[str, Any]) -> None:
    known = ("world", "noise", "faults")
    for name in options:
        if name not in known:
            raise invalid("the simulated engine has no such option", where="engine options",
                          got=name, next_step=suggestion(str(name), known))  # fmt: skip


def _world(value: object) -> World:
    if isinstance(value, World):
        return value
    if isinstance(value, str) and value in WORLDS:
        return WORLDS[value]
    raise invalid(
        "no simulated world has this name",
        where="engine options",
        key_path="world",
        got=value,
        next_step=suggestion(str(value), WORLDS),
    )


def _noise(value: object) -> float:
    """Check the factor on the noise; text comes from the command line."""
    factor = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            factor = float(value)
    if 0 <= factor <= MAX_NOISE:
        return factor
    raise invalid(
        f"the noise must be a factor from 0 to {MAX_NOISE}",
        where="engine options",
        key_path="noise",
        got=value,
        next_step="1 is realistic, 0 is none.",
    )


def _faults(value: object) -> dict[str, FailureKind]:
    """Check the faults: a mapping, or ``CONFIG:KIND,CONFIG:KIND`` from the command line."""
    if isinstance(value, str):
        pairs = (pair.partition(":") for pair in value.split(",") if pair.strip())
        value = {config.strip(): kind.strip() for config, _, kind in pairs}
    if not isinstance(value, Mapping):
        raise invalid(
            "the faults must map config labels or digests to failure kinds",
            where="engine options",
            key_path="faults",
            got=value,
        )
    return {str(config): _fault(str(config), kind) for config, kind in value.items()}


def _fault(config: str, kind: object) -> FailureKind:
    kinds = {kind.value: kind for kind in FailureKind}
    if isinstance(kind, str) and kind in kinds:
        return kinds[kind]
    raise invalid(
        "the fault must be a failure kind",
        where="engine options",
        key_path=f"faults.{config}",
        got=kind,
        next_step=suggestion(str(kind), kinds),
    )
