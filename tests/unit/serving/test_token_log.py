"""The table of who got how many tokens when."""

from __future__ import annotations

import numpy as np

from autotune.serving.token_log import TokenLog


def test_a_place_is_read_from_where_its_request_came() -> None:
    log = TokenLog(2)
    first, second = log.take_place(), log.take_place()
    log.add(np.array([1.0, 2.0]), np.array([first]), np.array([[1], [3]]))
    log.add(np.array([3.0]), np.array([first, second]), np.array([[2, 4]]))

    assert log.chunks(first, 0) == ([1.0, 2.0, 3.0], [1, 4, 6])
    assert log.chunks(second, 2) == ([3.0], [4])
    assert log.chunks(first, 2) == ([3.0], [2])


def test_steps_that_bring_nothing_are_no_chunks() -> None:
    log = TokenLog(1)
    place = log.take_place()
    log.add(np.array([1.0, 2.0]), np.array([place]), np.array([[0], [5]]))

    assert log.chunks(place, 0) == ([2.0], [5])


def test_a_prompts_last_step_brings_the_first_token() -> None:
    log = TokenLog(2)
    place = log.take_place()
    log.add(np.array([1.0]), np.array([], dtype=np.int64), np.zeros((1, 0), dtype=np.int64))
    log.add_to_last([place])

    assert log.chunks(place, 0) == ([1.0], [1])


def test_it_grows_and_places_are_used_again() -> None:
    log = TokenLog(1)
    place = log.take_place()
    for step in range(3000):
        log.add(np.array([float(step)]), np.array([place]), np.array([[1]]))
    log.leave(place)

    assert log.take_place() == place
    times_s, totals = log.chunks(place, 0)
    assert times_s == [float(step) for step in range(3000)]
    assert totals[-1] == 3000
