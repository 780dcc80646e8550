"""Where answers part, and how many do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autotune.measure.quality.endpoint import Answer
from autotune.measure.quality.matching import first_divergence, match


def answer(*token_ids: int) -> Answer:
    return Answer((1, 2), token_ids, "text", "length")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([5, 6, 7], [5, 6, 7], None),
        ([5, 6, 7], [5, 9, 7], 1),
        ([5, 6, 7], [5, 6], 2),  # the second one ends where the first one goes on
        ([5], [5, 6], 1),
        ([], [], None),
        ([], [5], 0),
        ([0], [], 0),  # token 0 is a token
    ],
)
def test_first_divergence(a: Sequence[int], b: Sequence[int], expected: int | None) -> None:
    assert first_divergence(a, b) == expected
    assert first_divergence(b, a) == expected


def test_match_counts_whole_answers_and_prefixes() -> None:
    left = [answer(1, 2, 3, 4), answer(1, 2, 3, 4), answer(1, 2, 3), answer(9, 2, 3, 4)]
    right = [answer(1, 2, 3, 4), answer(1, 2, 9, 4), answer(1, 2, 3, 4), answer(1, 2, 3, 4)]
    # Prefixes: 4 (equal), 2, 3 (ends early), 0; the median of 0, 2, 3, 4 is 2.5.
    found = match(left, right)
    assert (found.num_pairs, found.num_exact) == (4, 1)
    assert found.median_matched_prefix_tokens == 2.5
    # Wilson, 1 of 4: z^2 = 3.8415; (0.25 + 0.4802 -+ 1.96 sqrt(0.046875 + 0.060023)) / 1.9604
    assert (found.exact_low_ratio, found.exact_high_ratio) == pytest.approx(
        (0.0456, 0.6994), abs=2e-4
    )


def test_answers_to_different_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter|longer"):
        match([answer(1)], [answer(1), answer(2)])
