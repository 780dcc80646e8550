"""Engines by name: built in, installed by another package, or any class that is spelled out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points

from autotune.errors import InputError, invalid, suggestion
from autotune.serving.engine import Engine, EngineSettings

ENTRY_POINT_GROUP = "autotune.engines"

# Names, not classes: each is imported when it is asked for, so no engine pays for another.
BUILTIN_ENGINES = {
    "vllm": "autotune.serving.vllm_engine:VllmEngine",
    "simulated": "autotune.serving.simulated:SimulatedEngine",
    "replay": "autotune.serving.replay:ReplayEngine",
}


def engine_names() -> list[str]:
    """Name the built-in engines, then those that installed packages bring."""
    installed = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
    return [*BUILTIN_ENGINES, *sorted(installed - BUILTIN_ENGINES.keys())]


def create_engine(name: str, settings: EngineSettings) -> Engine:
    """Create the engine called `name`.

    Args:
        name: a built-in engine, an entry point of the group ``autotune.engines``, or
            ``package.module:Class``.
        settings: handed to the engine's constructor.

    Raises:
        InputError: there is no such engine, it cannot be imported, or it is no `Engine`.
    """
    return _engine_class(name)(settings)


def _engine_class(name: str) -> Callable[[EngineSettings], Engine]:
    found = _find(name)
    if not (inspect.isclass(found) and issubclass(found, Engine)):
        raise invalid(
            "the engine must be a subclass of autotune.serving.engine.Engine",
            where=_where(name),
            got=found,
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise invalid(f"the engine must define {missing}", where=_where(name), got=found)
    return found


def _find(name: str) -> object:
    if name in BUILTIN_ENGINES:
        return _load(BUILTIN_ENGINES[name], name)
    if ":" in name:
        return _load(name, name)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            return _load(point.value, name)
    raise invalid(
        "no engine has this name",
        where="engine",
        got=name,
        next_step=f"{suggestion(name, engine_names())} A class works too: package.module:Class.",
    )


def _load(target: str, name: str) -> object:
    """Import ``package.module:Class``."""
    # An entry point may name its extras in brackets; they matter only to the installer.
    module_name, _, attribute = target.partition("[")[0].strip().partition(":")
    try:
        found: object = import_module(module_name.strip())
    except (ImportError, ValueError, TypeError) as err:
        raise InputError(
            f"{_where(name)}: the module {module_name!r} must be importable, but: {err}. "
            "Check the spelling and that its package is installed."
        ) from err
    for part in attribute.strip().split("."):
        if not hasattr(found, part):
            raise invalid(
                f"the module {module_name!r} must have the class",
                where=_where(name),
                got=attribute,
                next_step=suggestion(part, _classes_in(found)),
            )
        found = getattr(found, part)
    return found


def _classes_in(scope: object) -> list[str]:
    return [name for name, value in vars(scope).items() if inspect.isclass(value)]


def _where(name: str) -> str:
    return f"engine {name}"
