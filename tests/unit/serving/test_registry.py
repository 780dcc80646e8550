"""Engines are found by name, and what is no engine is refused with a hint."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from autotune.errors import InputError
from autotune.serving import registry
from autotune.serving.engine import Engine, EngineSettings
from autotune.serving.registry import create_engine, engine_names
from autotune.serving.simulated import SimulatedEngine
from autotune.serving.vllm_engine import VllmEngine


class TinyEngine(SimulatedEngine):
    """Stands for an engine of another package."""


class HalfEngine(Engine):
    """Lacks everything that an engine must define."""


@pytest.fixture
def module_with_engines(monkeypatch: pytest.MonkeyPatch) -> str:
    """Make this module importable under a name, however pytest imported it."""
    monkeypatch.setitem(sys.modules, "other_package", sys.modules[__name__])
    return "other_package"


def install(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    def installed(*, group: str) -> list[EntryPoint]:
        return [point for point in points if point.group == group]

    monkeypatch.setattr(registry, "entry_points", installed)


@pytest.mark.parametrize(
    ("name", "engine"), [("vllm", VllmEngine), ("simulated", SimulatedEngine)]
)
def test_built_in_engines(name: str, engine: type[Engine]) -> None:
    assert type(create_engine(name, EngineSettings())) is engine


def test_the_settings_reach_the_engine(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing.jsonl"):
        create_engine("replay", EngineSettings(options={"recording": tmp_path / "missing.jsonl"}))


def test_a_class_by_its_path(module_with_engines: str) -> None:
    engine = create_engine(f"{module_with_engines}:TinyEngine", EngineSettings(seed=3))

    assert isinstance(engine, TinyEngine)
    assert engine.seed == 3


def test_an_engine_of_an_installed_package(
    module_with_engines: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"{module_with_engines}:TinyEngine [extra]"
    install(monkeypatch, EntryPoint("tiny", target, "autotune.engines"))

    assert isinstance(create_engine("tiny", EngineSettings()), TinyEngine)
    assert engine_names() == ["vllm", "simulated", "replay", "tiny"]


def test_a_built_in_engine_cannot_be_replaced(
    module_with_engines: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"{module_with_engines}:TinyEngine"
    install(monkeypatch, EntryPoint("simulated", target, "autotune.engines"))

    assert type(create_engine("simulated", EngineSettings())) is SimulatedEngine


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("simulate", ["engine: no engine has this name, but got 'simulate'", "'simulated'?"]),
        ("sglang", ["Valid: replay, simulated, vllm.", "package.module:Class"]),
        ("", ["no engine has this name"]),
        ("no_such_package.engines:Engine", ["'no_such_package.engines' must be importable"]),
        (":Engine", ["must be importable"]),
        ("other_package:TinyEngin", ["must have the class", "Did you mean 'TinyEngine'?"]),
        ("other_package:", ["must have the class"]),
        ("pathlib:Path", ["must be a subclass of autotune.serving.engine.Engine"]),
        ("other_package:create_engine", ["must be a subclass"]),
        ("other_package:HalfEngine", ["the engine must define describe, launch"]),
    ],
)
def test_what_is_no_engine_is_an_input_error(
    name: str, messages: list[str], module_with_engines: str
) -> None:
    with pytest.raises(InputError) as caught:
        create_engine(name, EngineSettings())
    for message in messages:
        assert message in str(caught.value)


def test_a_broken_entry_point_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, EntryPoint("broken", "no_such_package:Engine", "autotune.engines"))

    with pytest.raises(InputError, match="engine broken: the module 'no_such_package'"):
        create_engine("broken", EngineSettings())


def test_engines_are_imported_only_when_asked_for() -> None:
    script = (
        "import sys, autotune.serving.registry\n"
        "names = ('vllm_engine', 'simulated', 'replay')\n"
        "assert not [n for n in names if f'autotune.serving.{n}' in sys.modules]\n"
    )

    subprocess.run([sys.executable, "-c", script], check=True)
