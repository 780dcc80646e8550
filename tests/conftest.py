"""What tests share: no network beyond this machine, a mock of vLLM, small models and profiles."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

TESTS = Path(__file__).parent
# Test modules can then import `mock_server`, however pytest was started.
sys.path.insert(0, str(TESTS))

UNGUARDED_FOLDERS = frozenset({"e2e", "gpu"})


@pytest.fixture(autouse=True)
def _no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail every connection that would leave this machine; tests of real servers are exempt."""
    if UNGUARDED_FOLDERS & set(Path(request.node.path).relative_to(TESTS).parts):
        return
    connect = socket.socket.connect

    def connect_here(self: socket.socket, address: Any) -> None:
        is_internet = self.family in {socket.AF_INET, socket.AF_INET6}
        if is_internet and address[0] not in {"127.0.0.1", "::1", "localhost"}:
            raise OSError(f"tests must not use the network, but one connects to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_here)


@pytest.fixture
def wait_until() -> Callable[..., bool]:
    """Give a function that polls a condition and says whether it came true in time."""

    def wait(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.02)
        return condition()

    return wait


@pytest.fixture
def is_running() -> Callable[[int], bool]:
    """Give a function that says whether a process id belongs to a live process, zombies aside."""

    def running(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return running


@pytest.fixture
def no_process_left() -> Iterator[None]:
    """Fail the test that leaves a child process behind, and end the child."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    names = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                names.append(" ".join(process.cmdline()))
                process.kill()
    assert names == [], "the test left processes behind"


@pytest.fixture
def write_profile(tmp_path: Path) -> Callable[..., Path]:
    """Give a function that writes a traffic profile, with prompts beside it, and returns its path."""

    def write(text: str, *, prompts: Sequence[str] = ("one", "two", "three", "four")) -> Path:
        lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
        (tmp_path / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
        path = tmp_path / "traffic.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def safetensors_bytes(shapes: Mapping[str, Sequence[int]]) -> bytes:
    """Write a safetensors file of bf16 zeros by hand: header length, JSON header, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        num_bytes = 2
        for size in shape:
            num_bytes *= size
        offsets = [end, end + num_bytes]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": offsets}
        end += num_bytes
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * end


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[..., Path]:
    """Give a function that writes a model folder: its config and the shapes of its tensors."""

    def write(
        name: str, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]] | None = None
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        if shapes is not None:
            (folder / "model.safetensors").write_bytes(safetensors_bytes(shapes))
        return folder

    return write
