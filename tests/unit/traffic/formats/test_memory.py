"""Files of any size are read in the same little memory, whatever holds their records."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

FILE_BYTES = 150 * 2**20
MAX_EXTRA_BYTES = 48 * 2**20
"""Room for one record of the largest size, as bytes and as text; far less than the file."""

PROGRAM = """
import sys
from pathlib import Path
from autotune.traffic.formats import read_rows
from autotune.traffic.importing.fit import fit_log

def peak():
    # Not getrusage: its maximum goes on from the process that started this one.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

def fit(path):
    return fit_log(read_rows(path)).whole.num_rows

def read_at_once(path):
    return len(path.read_text().splitlines())

measured = {"fit": fit, "read_at_once": read_at_once}[sys.argv[1]]
measured(Path(sys.argv[2]))  # a small file of the same kind, so that all modules are loaded
before = peak()
found = measured(Path(sys.argv[3]))
print(peak() - before, found)
"""


def extra_bytes_and_rows(program: str, small: Path, large: Path) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, program, str(small), str(large)],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    extra_bytes, found = map(int, done.stdout.split())
    return extra_bytes, found


PROMPT = "a prompt of some length, " * 400


def json_lines(count: int) -> Iterator[str]:
    for number in range(count):
        yield f'{{"prompt": "{number} {PROMPT}", "conversation_id": {number}, "time": {number}}}\n'


def json_array(count: int) -> Iterator[str]:
    yield "["
    for number in range(count):
        said = f'{{"from": "human", "value": "{number} {PROMPT}"}}'
        yield f'{"," if number else ""}\n{{"id": {number}, "conversations": [{said}]}}'
    yield "]"


def csv(count: int) -> Iterator[str]:
    yield "prompt,output_tokens_count\n"
    for number in range(count):
        yield f'"{number}\n{PROMPT}",{number}\n'


def one_line(count: int) -> Iterator[str]:
    yield '{"prompt": "small"}\n{"prompt": "'
    for _ in range(count):
        yield PROMPT
    yield '"}\n{"prompt": "small"}\n'


def written(folder: Path, make: Callable[[int], Iterable[str]], suffix: str, count: int) -> Path:
    path = folder / f"{count}.{suffix}"
    with path.open("w", encoding="utf-8") as file:
        file.writelines(make(count))
    return path


COUNT = FILE_BYTES // len(PROMPT)


@pytest.mark.parametrize(
    ("make", "suffix", "num_rows"),
    [
        (json_lines, "jsonl", COUNT),
        (json_array, "json", COUNT),
        (csv, "csv", COUNT),
        (one_line, "jsonl", 2),
    ],
)
def test_memory_does_not_grow_with_the_file(
    tmp_path: Path, make: Callable[[int], Iterable[str]], suffix: str, num_rows: int
) -> None:
    small, large = written(tmp_path, make, suffix, 50), written(tmp_path, make, suffix, COUNT)
    assert large.stat().st_size > FILE_BYTES * 0.99
    extra_bytes, found = extra_bytes_and_rows("fit", small, large)
    assert found == num_rows
    assert extra_bytes < MAX_EXTRA_BYTES


def test_the_bound_catches_a_reader_that_loads_the_file(tmp_path: Path) -> None:
    small = written(tmp_path, json_lines, "jsonl", 50)
    large = written(tmp_path, json_lines, "jsonl", 3 * MAX_EXTRA_BYTES // len(PROMPT))
    extra_bytes, _ = extra_bytes_and_rows("read_at_once", small, large)
    assert extra_bytes > MAX_EXTRA_BYTES
