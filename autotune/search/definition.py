"""What makes two runs the same study, and how they differ when they are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.search.space import SearchSpace
from autotune.serving.capabilities import EngineInfo
from autotune.traffic.profile import TrafficProfile
from autotune.traffic.schedule import Schedule


def study_definition(
    profile: TrafficProfile,
    space: SearchSpace,
    schedules: tuple[Schedule, Schedule],
    engine: EngineInfo,
    model: str,
    drafters: tuple[str, ...],
    seed: int,
) -> dict[str, Any]:
    """Collect everything that measurements of one study must share to be compared.

    How to start the server (interpreter, variables) is left out: variables may hold secrets, and
    the engine's version and hardware are what matters. So is what changes no measurement. The
    hashes of the schedules (search, confirmation) stand for the content of the prompt files.
    """
    traffic = profile.model_dump(
        mode="json",
        by_alias=True,
        exclude={"serve", "model", "drafter", "seed", "name", "cost", "privacy"},
    )
    return {
        "model": model,
        "drafters": list(drafters),
        "seed": seed,
        "schedule": [schedule.digest for schedule in schedules],
        "traffic": traffic,
        "space": space.model_dump(mode="json", exclude={"name"}),
        "engine": {
            "engine": engine.engine,
            "version": engine.version,
            "hardware": engine.hardware,
        },
    }


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Say where two definitions differ, one line a key: ``traffic.load.concurrency: 1 -> 4``.

    The schedule's hash is named only when nothing else explains it: then a prompt file changed.
    """
    lines = [
        f"{path}: {_show(a)} -> {_show(b)}"
        for path, a, b in _walk("", stored, wanted)
        if not path.startswith("schedule")
    ]
    if not lines and stored.get("schedule") != wanted.get("schedule"):
        return ["the content of the prompt files has changed"]
    return lines


def _walk(path: str, a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    if a == b:
        return []
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        found = []
        for key in sorted({*a, *b}):
            found += _walk(f"{path}.{key}" if path else str(key), a.get(key), b.get(key))
        return found
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        found = []
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            found += _walk(f"{path}[{i}]", x, y)
        return found
    return [(path, a, b)]


def _show(value: Any, limit: int = 60) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
