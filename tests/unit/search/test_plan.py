"""What the plan says of memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from study_helpers import make_setup

from autotune.search.plan import make_plan
from autotune.search.setup import SearchSetup
from autotune.serving.sizes import DeviceSizes, ServingSizes, TargetSizes
from autotune.serving.vllm_options import Needs

TARGET = TargetSizes(8e9, 8e9, 16e9, 32, 4096, 100_000, 65_536.0)
NEEDS = Needs(concurrency=8, longest_request_tokens=4000, max_num_speculative_tokens=8)


def memory_lines(setup: SearchSetup, device: DeviceSizes | None) -> list[str]:
    sizes = ServingSizes(TARGET, {}, device, 0.9) if device is not None else None
    lines = make_plan(replace(setup, sizes=sizes, needs=NEEDS)).lines
    first = next(i for i, line in enumerate(lines) if line.startswith("memory"))
    return list(lines[first : first + 2])


def test_the_plan_says_what_the_default_takes_or_that_nobody_knows(tmp_path: Path) -> None:
    setup = make_setup(tmp_path)

    assert memory_lines(setup, None)[0].startswith("memory: sizes are not known")
    unknown = DeviceSizes("CPU", None, 128, 2048, has_graphs=False)
    assert memory_lines(setup, unknown)[0].startswith("memory: the device's is not known")
    said = memory_lines(setup, DeviceSizes("GPU", 80e9, 256, 8192))[0]
    # Working memory: 0.5 GB + 8192 x 4096 x 2 x 20 bytes + 256 x 100,000 x 4 x 2 bytes = 2.0 GB.
    assert "weights 16.0 GB" in said
    assert "working memory 2.0 GB" in said


def test_a_kv_cache_too_small_for_all_users_is_a_caution(tmp_path: Path) -> None:
    setup = make_setup(tmp_path)
    # 8 users x 4,000 tokens x 65,536 bytes = 2.1 GB.
    small = DeviceSizes("CPU", None, 128, 2048, kv_bytes=2.0e9, has_graphs=False)
    large = replace(small, kv_bytes=2.2e9)

    assert (
        "8 of the longest requests (4,000 tokens) do not fit at once"
        in (memory_lines(setup, small)[1])
    )
    assert "do not fit" not in memory_lines(setup, large)[1]
