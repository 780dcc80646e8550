"""Is an answer stuck in a loop?

A model that says the same thing over and over is easy to draft for: acceptance and tokens/s look
their best when the answers are worth nothing. Such answers are counted, so that no config wins by
them.

Only exact repetition counts. A loop with a counter in it ("1. ... 2. ...") is not seen: telling it
from an honest list would take an understanding of the text.
"""

from __future__ import annotations

MAX_UNIT_CHARS = 400
"""Longest repeated unit that is looked for: a paragraph."""
MIN_REPEATS = 4
"""A chorus is sung two or three times in a row, not more."""
MIN_LOOP_CHARS = 200
"""Some 50 tokens. Shorter runs are honest: "ha ha ha", unrolled code, one line of dashes."""
MIN_WORDLESS_CHARS = 1000
"""The same for units without a letter, such as dashes, zeros and cells of a board: rulers, tables and
matrices are made of them, and a 16 x 16 matrix of zeros has some 800 characters."""

# Every loop that counts holds its last block twice: 4 units of 50 characters are a block and a unit.
_BLOCK_CHARS = MIN_LOOP_CHARS - MIN_LOOP_CHARS // MIN_REPEATS


def is_looping(text: str) -> bool:
    """Whether `text` ends in a loop: one unit, at least `MIN_REPEATS` times, over a long stretch.

    The loop may be cut anywhere, as `max_tokens` does, but must reach to the end: a model that
    found its way out again is not stuck. The time does not grow with the text.
    """
    end = len(text)
    if end < MIN_LOOP_CHARS:
        return False
    block = text[-_BLOCK_CHARS:]
    lowest = max(0, end - _BLOCK_CHARS - MAX_UNIT_CHARS)
    # In a loop of units of p characters the last block stands again p characters earlier, though
    # also nearer where the unit has a repetition inside. So every place is tried.
    place = text.rfind(block, lowest, end - 1)
    while place >= 0:
        if _ends_with_loop(text, end - len(block) - place):
            return True
        place = text.rfind(block, lowest, place + len(block) - 1)
    return False


def _ends_with_loop(text: str, unit_chars: int) -> bool:
    """Whether the last `unit_chars` characters repeat backwards often and far enough."""
    unit = text[-unit_chars:]
    is_wordless = not unit.isspace() and not any(character.isalpha() for character in unit)
    needed = max(MIN_REPEATS * unit_chars, MIN_WORDLESS_CHARS if is_wordless else MIN_LOOP_CHARS)
    repeated = unit * (needed // unit_chars + 1)
    return text.endswith(repeated[-needed:])
