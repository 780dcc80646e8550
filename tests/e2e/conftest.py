"""Real vLLM on this machine: skipped, with the reason, where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune.demo.target import demo_cache_dir, ensure_target, head_dir
from autotune.errors import AutotuneError
from autotune.serving.vllm_install import find_vllm

E2E_TIMEOUT_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e" in str(item.path):
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(E2E_TIMEOUT_S))


@pytest.fixture(scope="session", autouse=True)
def _needs_vllm() -> None:
    try:
        find_vllm(None, None)
    except AutotuneError as err:
        if os.environ.get("CI"):
            raise  # a green run of CI must not be one that skipped what matters
        # On a developer's machine without vLLM the other tests are still worth running.
        pytest.skip(f"needs vLLM in this environment: {err}")


@pytest.fixture(scope="session")
def target(_needs_vllm: None) -> Path:
    """The demo's target model, converted once into the cache."""
    return ensure_target()


@pytest.fixture(scope="session")
def head() -> Path:
    return head_dir()


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    return demo_cache_dir()
