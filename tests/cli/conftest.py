"""The command line in this process, in a folder with a small profile, and a finished study to read."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from autotune.cli.main import run
from autotune.store.records import LaunchRecord
from autotune.store.repository import Store

TRAFFIC = """\
version: 1
name: tiny
model: owner/target
drafter: owner/head
load: {kind: concurrency, concurrency: 4}
measure: {min_requests: 16}
classes:
  - prompts: {file: prompts.txt}
    output: {max_tokens: 32}
"""
SPACE = """\
version: 1
name: small
parameters:
  num_speculative_tokens: {choices: [0, 2, 3, 8]}
"""
PROMPTS = "".join(f"question {number} of ten\n" for number in range(10))
INPUTS = ("search", "--profile", "traffic.yaml", "--space", "space.yaml")
SIMULATED = ("--engine", "simulated", "--trials", "3", "--finalists", "1", "--repeats", "2")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def write_inputs(folder: Path) -> None:
    (folder / "traffic.yaml").write_text(TRAFFIC, encoding="utf-8")
    (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
    (folder / "prompts.txt").write_text(PROMPTS, encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a fresh current folder with a profile, its prompts and a search space."""
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOTUNE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def traffic() -> str:
    """Return the text of the profile, to be changed."""
    return TRAFFIC


@pytest.fixture
def cli(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Give a function that runs `autotune` in this process and returns what came of it."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        code = run(list(arguments))
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, out, err)

    return call


@pytest.fixture
def check(cli: Run) -> Run:
    """Give a function that runs `autotune search` up to where it would launch real vLLM."""
    return lambda *more: cli(*INPUTS, *more)


@pytest.fixture
def search(cli: Run) -> Run:
    """Give a function that runs `autotune search` with the simulated engine."""
    return lambda *more: cli(*INPUTS, *SIMULATED, *more)


@pytest.fixture
def search_arguments() -> tuple[str, ...]:
    """Return the arguments of `search`, for a process of its own."""
    return (*INPUTS, *SIMULATED)


@pytest.fixture
def environment(folder: Path) -> Mapping[str, str]:
    """Return the variables of a process of its own."""
    return {**os.environ, "AUTOTUNE_CACHE_DIR": str(folder / "cache"), "NO_COLOR": "1"}


@pytest.fixture
def process(folder: Path, environment: Mapping[str, str]) -> Run:
    """Give a function that runs `autotune` in a process of its own."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "autotune.cli.main", *arguments]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
        )

    return call


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a simulated study that is done; nobody may change it."""
    folder = tmp_path_factory.mktemp("finished")
    write_inputs(folder)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.chdir(folder)
        assert run([*INPUTS, *SIMULATED]) == 0
    (folder / "said.txt").write_text(said.getvalue(), encoding="utf-8")
    return folder


@pytest.fixture
def finished(finished_once: Path, folder: Path) -> Path:
    """Return the current folder with a copy of a finished study called `tiny` in it."""
    shutil.copytree(finished_once, folder, dirs_exist_ok=True)
    return folder


@pytest.fixture
def said(finished_once: Path) -> str:
    """Return what the search of the finished study printed."""
    return (finished_once / "said.txt").read_text(encoding="utf-8")


@pytest.fixture
def launches(folder: Path) -> Callable[..., list[LaunchRecord]]:
    """Give a function that reads the launches of a study out of the database."""

    def read(study: str = "tiny", storage: str = "autotune.db") -> list[LaunchRecord]:
        store = Store(str(folder / storage))
        try:
            return store.launches(store.get_study(study))
        finally:
            store.close()

    return read
