"""Lengths drawn from distributions and from logs."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest

from autotune.errors import InputError
from autotune.traffic.classes import FixedLength, LognormalLength, TrafficClass
from autotune.traffic.lengths import LengthSequence, drawn_length


def sequence(folder: Path, seed: int = 1, **lengths: object) -> LengthSequence:
    c = TrafficClass.model_validate({"prompts": {"builtin": "demo/chat"}, "lengths": lengths})
    return LengthSequence(c, folder, random.Random(seed))


def test_a_class_without_lengths_leaves_them_free(tmp_path: Path) -> None:
    c = TrafficClass.model_validate({"prompts": {"builtin": "demo/chat"}})
    assert LengthSequence(c, tmp_path, random.Random(1)).next() == (None, None)


def test_output_lengths_may_be_left_free(tmp_path: Path) -> None:
    drawn = sequence(tmp_path, input={"dist": "fixed", "tokens": 9})
    assert [drawn.next() for _ in range(2)] == [(9, None), (9, None)]


def test_lognormal_lengths_have_their_percentiles() -> None:
    # Facts of a public trace: p50 1469, p95 7315. Sampling errors at n = 20,000: about 1.2 % of
    # the median (sigma 0.976 x 1.25 / sqrt(n)) and 1.5 % of the 95th percentile.
    length = LognormalLength(dist="lognormal", p50=1469, p95=7315, max=1_000_000)
    rng = random.Random(4)
    drawn = [drawn_length(length, rng) for _ in range(20_000)]
    assert statistics.median(drawn) == pytest.approx(1469, rel=0.04)
    assert statistics.quantiles(drawn, n=20)[-1] == pytest.approx(7315, rel=0.05)


def test_lognormal_lengths_end_at_their_maximum_and_at_one() -> None:
    length = LognormalLength(dist="lognormal", p50=2, p95=40, max=50)
    rng = random.Random(4)
    drawn = {drawn_length(length, rng) for _ in range(5000)}
    assert (min(drawn), max(drawn)) == (1, 50)


def test_equal_percentiles_make_one_length() -> None:
    length = LognormalLength(dist="lognormal", p50=30, p95=30, max=90)
    assert {drawn_length(length, random.Random(i)) for i in range(20)} == {30}
    assert drawn_length(FixedLength(dist="fixed", tokens=7), random.Random()) == 7


LOG = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2026-01-05 09:00:{i:02d}.0,{100 + i},{10 * i}\n" for i in range(1, 9)
)


def test_empirical_lengths_come_in_pairs(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(LOG, encoding="utf-8")
    of_file = {"dist": "empirical", "file": "log.csv"}
    drawn = sequence(tmp_path, input=of_file, output=of_file)
    pairs = [drawn.next() for _ in range(8)]
    assert sorted(pairs) == [(100 + i, 10 * i) for i in range(1, 9)]
    assert pairs != sorted(pairs)  # in a drawn order
    assert [drawn.next() for _ in range(8)] == pairs  # and again from the start


def test_empirical_lengths_may_be_cut(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(LOG, encoding="utf-8")
    of_file = {"dist": "empirical", "file": "log.csv", "format": "azure"}
    drawn = sequence(
        tmp_path, input={**of_file, "max": 104}, output={"dist": "fixed", "tokens": 3}
    )
    assert sorted(drawn.next() for _ in range(8)) == [
        (101, 3), (102, 3), (103, 3), (104, 3), (104, 3), (104, 3), (104, 3), (104, 3),
    ]  # fmt: skip


def test_a_file_without_lengths_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    with pytest.raises(InputError) as caught:
        sequence(tmp_path, input={"dist": "empirical", "file": "p.jsonl"})
    assert str(caught.value) == (
        f"{tmp_path / 'p.jsonl'}: a file of lengths must have rows with input and output tokens, "
        "but none has both. Give another file, or `dist: lognormal`."
    )


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nope\.csv: the file of lengths must exist"):
        sequence(tmp_path, input={"dist": "empirical", "file": "nope.csv"})
