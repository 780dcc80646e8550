"""When requests are sent, on a server of unlimited size: by hand, by a slow and plain reference, and
by the real client.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import pytest
from mock_server import MockServer, Truth

from autotune.measure.client import LoadClient
from autotune.measure.records import RequestRecord
from autotune.serving.flights import Arrivals, Flight
from autotune.traffic.prompts import Prompt
from autotune.traffic.schedule import Schedule, ScheduledRequest

SEED = 0


def request(
    request_id: int,
    tokens: int = 1,
    *,
    arrival_s: float | None = None,
    conversation_id: int | None = None,
    turn: int = 0,
    think_s: float = 0.0,
    is_live: bool = False,
    num_chars: int = 4,
) -> ScheduledRequest:
    """A request whose answer has exactly `tokens`."""
    return ScheduledRequest(
        request_id=request_id,
        class_name="default",
        prompt=Prompt(f"prompt-{request_id}", (("user", "x" * num_chars),)),
        max_tokens=tokens,
        temperature=0.0,
        top_p=1.0,
        ignore_eos=True,
        sampling_seed=request_id,
        arrival_s=arrival_s,
        conversation_id=conversation_id,
        turn=turn,
        think_s=think_s,
        is_live=is_live,
    )


def schedule(
    *requests: ScheduledRequest, users: int | None = None, max_duration_s: float = math.inf
) -> Schedule:
    return Schedule("chat", users, requests, (), max_duration_s, request_timeout_s=1e6)


@dataclass
class Served:
    """What came of a schedule."""

    sends: list[tuple[int, float]] = field(default_factory=list)
    """(request id, time) in the order in which requests were sent."""
    records: list[RequestRecord] = field(default_factory=list)
    """In the order in which requests ended."""


def serve(sent: Schedule, failing: Container[int] = (), token_s: float = 1.0) -> Served:
    """Answer every request in `token_s` a token, however many there are.

    Args:
        sent: what is sent.
        failing: ids of the requests that fail at once.
        token_s: seconds that a token takes.
    """
    arrivals = Arrivals(sent, sent.requests, SEED)
    ends: list[tuple[float, int, Flight]] = []
    served = Served()
    while True:
        now_s = min(arrivals.next_s, ends[0][0] if ends else math.inf)
        if now_s == math.inf:
            return served
        while ends and ends[0][0] <= now_s:
            end_s, _, flight = heapq.heappop(ends)
            is_failed = flight.request.request_id in failing
            if not is_failed:
                flight.take([end_s], [flight.num_tokens])
            error = "HTTP 429" if is_failed else None
            served.records.append(flight.record(end_s, error, "http_429" if is_failed else None))
            for later in arrivals.ended(flight, end_s, is_failed=is_failed):
                served.records.append(later.record(end_s, "given up", "previous_turn"))
        while (flight := arrivals.take(now_s)) is not None:
            is_failed = flight.request.request_id in failing
            took_s = 0.0 if is_failed else flight.num_tokens * token_s
            heapq.heappush(ends, (flight.sent_s + took_s, len(served.sends), flight))
            served.sends.append((flight.request.request_id, flight.sent_s))


def given_up(records: Sequence[RequestRecord]) -> dict[int, float]:
    """Return when each turn that was never sent was given up."""
    return {r.request_id: r.sent_s for r in records if r.error_kind == "previous_turn"}


class TestClosedLoop:
    def test_users_think_from_the_very_start(self) -> None:
        # Two users, 3 s of thought, 1 s an answer: 3 to 4 s, then 7 to 8 s.
        requests = [request(n, think_s=3.0) for n in range(4)]

        served = serve(schedule(*requests, users=2))
        assert served.sends == [(0, 3.0), (1, 3.0), (2, 7.0), (3, 7.0)]
        assert [r.scheduled_s for r in served.records] == [None] * 4
        assert [r.think_s for r in served.records] == [3.0] * 4

    def test_who_is_free_first_takes_the_next_request_however_long_it_makes_think(self) -> None:
        # Free at 1 s, the first user takes request 2, due at 6 s; the other takes 3 at 2 s, due at 3 s.
        requests = [request(0, 1), request(1, 2), request(2, think_s=5.0), request(3, think_s=1.0)]

        assert serve(schedule(*requests, users=2)).sends == [
            (0, 0.0),
            (1, 0.0),
            (3, 3.0),
            (2, 6.0),
        ]

    def test_a_user_stays_with_a_conversation_to_its_end(self) -> None:
        requests = (
            request(0, 2, conversation_id=8),
            request(1, 2, conversation_id=8, turn=1, think_s=0.5),
            request(2, 3),
            request(3),
        )

        # Alone: 0 to 2, 2.5 to 4.5, 4.5 to 7.5, 7.5. Of two, the second answers 2 until 3 and goes on.
        alone = serve(schedule(*requests, users=1)).sends
        assert alone == [(0, 0.0), (1, 2.5), (2, 4.5), (3, 7.5)]
        two = serve(schedule(*requests, users=2)).sends
        assert two == [(0, 0.0), (2, 0.0), (1, 2.5), (3, 3.0)]

    def test_turns_go_by_their_number_wherever_they_stand(self) -> None:
        requests = (
            request(0, conversation_id=0),
            request(1, conversation_id=1, turn=1),
            request(2, conversation_id=1),
            request(3, conversation_id=0, turn=1),
        )

        served = serve(schedule(*requests, users=1))
        assert served.sends == [(0, 0.0), (3, 1.0), (2, 2.0), (1, 3.0)]

    def test_equal_times_go_by_the_schedules_order(self) -> None:
        # All of it is due at 4 s: a second turn, a user's next request, and another's first one.
        requests = (
            request(9, 3, conversation_id=0),
            request(8, conversation_id=0, turn=1, think_s=1.0),
            request(7, 2),
            request(6, think_s=4.0),
            request(5, think_s=2.0),
        )

        served = serve(schedule(*requests, users=3))
        assert served.sends == [(9, 0.0), (7, 0.0), (8, 4.0), (6, 4.0), (5, 4.0)]

    def test_more_users_than_requests_and_no_requests_at_all(self) -> None:
        assert serve(schedule(request(0), users=5)).sends == [(0, 0.0)]
        assert serve(schedule(users=5)) == Served()

    def test_a_warm_up_for_an_open_loop_goes_all_at_once(self) -> None:
        served = serve(schedule(*(request(n) for n in range(3))))
        assert served.sends == [(0, 0.0), (1, 0.0), (2, 0.0)]
        assert [r.scheduled_s for r in served.records] == [None] * 3

    def test_nothing_is_sent_after_the_longest_duration(self) -> None:
        # The first user is free at 1 s, takes request 2, would send it at 11 s, and is done with that.
        # The other sends 3 at 2 s, 4 at 4 s, and the second turn of 4 at 10 s, just in time; the third
        # would be sent at 12 s.
        requests = (
            request(0, 1),
            request(1, 2),
            request(2, think_s=10.0),
            request(3, 2),
            request(4, 2, conversation_id=0),
            request(5, 2, conversation_id=0, turn=1, think_s=4.0),
            request(6, conversation_id=0, turn=2),
            request(7),
        )

        served = serve(schedule(*requests, users=2, max_duration_s=10.0))
        assert served.sends == [(0, 0.0), (1, 0.0), (3, 2.0), (4, 4.0), (5, 10.0)]
        assert given_up(served.records) == {}

    def test_after_a_failed_turn_the_user_goes_on_with_the_next_conversation(self) -> None:
        requests = (
            request(0, conversation_id=0),
            request(1, conversation_id=0, turn=1, think_s=1.0),
            request(2, conversation_id=0, turn=2, think_s=7.0),
            request(3, conversation_id=0, turn=3),
            request(4, think_s=1.0),
        )

        served = serve(schedule(*requests, users=1), failing={1})
        assert served.sends == [(0, 0.0), (1, 2.0), (4, 3.0)]
        assert [r.request_id for r in served.records] == [0, 1, 2, 3, 4]
        assert given_up(served.records) == {2: 2.0, 3: 2.0}
        never = served.records[2]
        assert (never.turn, never.conversation_id, never.think_s) == (2, 0, 7.0)
        assert (never.chunk_times_s, never.num_completion_tokens, never.finished_s) == ((), 0, 2.0)
        assert not never.is_ok

    def test_a_user_who_is_refused_goes_on_before_one_who_gets_free_later(self) -> None:
        # A server that looks up at 3 s only: the second user was answered then, but the first one's
        # request was refused at 2 s, so it is the first one who takes request 2.
        sent = schedule(request(0, think_s=2.0), request(1), request(2), request(3), users=2)
        arrivals = Arrivals(sent, sent.requests, SEED)
        answered = arrivals.take(0.0)
        assert answered is not None
        assert answered.request.request_id == 1
        arrivals.ended(answered, 3.0, is_failed=False)
        refused = arrivals.take(3.0)
        assert refused is not None
        arrivals.ended(refused, refused.sent_s, is_failed=True)

        later = [arrivals.take(3.0), arrivals.take(3.0)]
        assert [(f.request.request_id, f.sent_s) for f in later if f] == [(2, 2.0), (3, 3.0)]


class TestOpenLoop:
    def test_a_later_turn_is_due_after_the_answer_to_the_one_before(self) -> None:
        # 1 to 3 s, then 2 s of thought; the lone request comes when it comes.
        requests = (
            request(0, 2, conversation_id=0, arrival_s=1.0),
            request(1, 2, conversation_id=0, turn=1, think_s=2.0),
            request(2, arrival_s=4.0),
        )

        served = serve(schedule(*requests))
        assert served.sends == [(0, 1.0), (2, 4.0), (1, 5.0)]
        assert {r.request_id: r.scheduled_s for r in served.records} == {0: 1.0, 1: 5.0, 2: 4.0}

    def test_a_time_to_think_does_not_move_an_arrival(self) -> None:
        served = serve(schedule(request(0, arrival_s=1.0, think_s=3.0)))

        assert served.sends == [(0, 1.0)]
        assert served.records[0].scheduled_s == 1.0

    def test_a_slow_server_does_not_hold_arrivals_up(self) -> None:
        requests = [request(n, 100, arrival_s=n / 2) for n in range(4)]

        assert serve(schedule(*requests)).sends == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]

    def test_equal_times_go_by_the_schedules_order(self) -> None:
        # As in a trace with a coarse clock; a second turn that is due then goes by its conversation.
        requests = (
            request(9, arrival_s=3.0),
            request(8, conversation_id=0, arrival_s=1.0),
            request(7, conversation_id=0, turn=1, think_s=1.0),
            request(6, arrival_s=3.0),
            request(5, arrival_s=3.0),
        )

        served = serve(schedule(*requests))
        assert served.sends == [(8, 1.0), (9, 3.0), (7, 3.0), (6, 3.0), (5, 3.0)]

    def test_arrivals_count_not_the_order_of_the_list(self) -> None:
        requests = (request(0, arrival_s=2.0), request(1, arrival_s=0.5))

        assert serve(schedule(*requests)).sends == [(1, 0.5), (0, 2.0)]

    def test_nothing_is_sent_after_the_longest_duration(self) -> None:
        requests = (
            request(0, 2, conversation_id=0, arrival_s=0.0),
            request(1, conversation_id=0, turn=1, think_s=2.5),
            request(2, arrival_s=4.0),
            request(3, arrival_s=4.25),
        )

        served = serve(schedule(*requests, max_duration_s=4.0))
        assert served.sends == [(0, 0.0), (2, 4.0)]

    def test_the_turns_after_a_failed_one_are_given_up_at_once(self) -> None:
        requests = (
            request(0, 2, conversation_id=0, arrival_s=1.0),
            request(1, conversation_id=0, turn=1, think_s=1.0),
            request(2, conversation_id=0, turn=2, think_s=1.0),
        )

        served = serve(schedule(*requests), failing={1})
        assert served.sends == [(0, 1.0), (1, 4.0)]
        assert given_up(served.records) == {2: 4.0}
        assert served.records[-1].scheduled_s == 4.0


class TestHistory:
    @pytest.mark.parametrize("users", [None, 1])
    def test_a_live_turn_brings_all_that_was_said(self, users: int | None) -> None:
        # 3 tokens and an answer of 5; 2 more and an answer of 7; 1 more: 3, 3 + 5 + 2, 10 + 7 + 1.
        turns = (
            request(0, 5, num_chars=12, conversation_id=0, arrival_s=None if users else 0.0),
            request(1, 7, num_chars=8, conversation_id=0, turn=1, is_live=True),
            request(2, 1, num_chars=4, conversation_id=0, turn=2, is_live=True),
        )

        served = serve(schedule(*turns, users=users))
        assert [r.num_prompt_tokens for r in served.records] == [3, 10, 18]

    def test_a_recorded_turn_brings_its_own_words_only(self) -> None:
        turns = [request(n, 5, num_chars=4 * (n + 1), conversation_id=0, turn=n) for n in range(3)]

        served = serve(schedule(*turns, users=1))
        assert [r.num_prompt_tokens for r in served.records] == [1, 2, 3]

    def test_conversations_do_not_hear_each_other(self) -> None:
        requests = [
            request(
                4 * c + n, 5, num_chars=4, conversation_id=c, turn=n, think_s=0.5, is_live=n > 0
            )
            for c in range(3)
            for n in range(3)
        ]

        served = serve(schedule(*requests, users=2))
        # 1; 1 + 5 + 1; 7 + 5 + 1.
        by_turn = {(r.conversation_id, r.turn): r.num_prompt_tokens for r in served.records}
        assert by_turn == {(c, n): (1, 7, 13)[n] for c in range(3) for n in range(3)}

    def test_an_empty_prompt_is_a_token_long(self) -> None:
        served = serve(schedule(request(0, num_chars=0), request(1, num_chars=5), users=1))

        assert [r.num_prompt_tokens for r in served.records] == [1, 2]


class TestReference:
    """Against a reference that follows one user at a time and has no notion of events."""

    @pytest.mark.parametrize("seed", range(60))
    def test_closed_loops(self, seed: int) -> None:
        rng = random.Random(seed)
        sent = self.random_schedule(rng)
        failing = {r.request_id for r in sent.requests if rng.random() < 0.1}

        served = serve(sent, failing)
        expected_sends, expected_given_up = self.follow_users(sent, failing)
        assert served.sends == expected_sends
        assert given_up(served.records) == expected_given_up

    def random_schedule(self, rng: random.Random) -> Schedule:
        """Draw conversations of 1 to 3 turns with round times, so that many things are due at once."""
        requests: list[ScheduledRequest] = []
        for conversation in range(rng.randint(1, 15)):
            num_turns = rng.randint(1, 3)
            is_alone = num_turns == 1 and rng.random() < 0.8
            requests += [
                request(
                    len(requests) + turn,
                    rng.randint(1, 4),
                    conversation_id=None if is_alone else conversation,
                    turn=turn,
                    think_s=rng.choice([0.0, 0.0, 0.5, 3.0]),
                )
                for turn in range(num_turns)
            ]
        limit_s = rng.choice([math.inf, 12.0])
        return schedule(*requests, users=rng.randint(1, 6), max_duration_s=limit_s)

    def follow_users(
        self, sent: Schedule, failing: Container[int]
    ) -> tuple[list[tuple[int, float]], dict[int, float]]:
        """Let whoever is free first take the next conversation and go through it to its end."""
        conversations: dict[str, list[ScheduledRequest]] = {}
        for r in sent.requests:
            key = f"alone {r.request_id}" if r.conversation_id is None else str(r.conversation_id)
            conversations.setdefault(key, []).append(r)
        assert sent.concurrency is not None
        free_s = [0.0] * sent.concurrency
        found: list[tuple[float, int, int]] = []
        given_up_s: dict[int, float] = {}
        for number, turns in enumerate(conversations.values()):
            if not free_s:
                break
            now_s, has_failed = min(free_s), False
            free_s.remove(now_s)
            for turn in turns:
                if has_failed:
                    given_up_s[turn.request_id] = now_s
                    continue
                now_s += turn.think_s
                if now_s > sent.max_duration_s:
                    break
                found.append((now_s, number, turn.request_id))
                has_failed = turn.request_id in failing
                now_s += 0.0 if has_failed else turn.max_tokens
            else:
                free_s.append(now_s)
        return [(request_id, time_s) for time_s, _, request_id in sorted(found)], given_up_s


class TestRealClient:
    """The real client sends the same requests in the same order, to a server that fails the same ones.

    Sends lie at least 0.1 s apart, or are due at the same moment.
    """

    TOKEN_S = 0.05

    def test_closed_loop(self) -> None:
        # 0.05 s a token. One user: 0 until 0.2 s, 1 from 0.5 to 0.6 s, 4 at 0.7 s fails, 6 at 1.1 s.
        # The other: 2 until 0.3 s, 3 from 0.9 to 1.0 s, and 7 would be sent at 2.0 s, too late.
        sent = schedule(
            request(0, 4, conversation_id=0),
            request(1, 2, conversation_id=0, turn=1, think_s=0.3, is_live=True),
            request(2, 6),
            request(3, 2, think_s=0.6),
            request(4, 2, conversation_id=1, think_s=0.1),
            request(5, 2, conversation_id=1, turn=1),
            request(6, 2, think_s=0.4),
            request(7, 2, think_s=1.0),
            users=2,
            max_duration_s=1.5,
        )

        self.assert_alike(sent, [0, 2, 1, 4, 3, 6], failing=4, given_up_id=5)

    def test_open_loop(self) -> None:
        # 0 until 0.2 s, so 1 is due at 0.5 s; 3 and 4 arrive together; 5 fails; 7 comes too late.
        sent = schedule(
            request(0, 2, conversation_id=0, arrival_s=0.1),
            request(1, 2, conversation_id=0, turn=1, think_s=0.3),
            request(2, 8, arrival_s=0.3),
            request(3, 2, arrival_s=0.8),
            request(4, 2, arrival_s=0.8),
            request(5, 2, conversation_id=1, arrival_s=1.0),
            request(6, 2, conversation_id=1, turn=1),
            request(7, 2, arrival_s=1.6),
            max_duration_s=1.5,
        )

        self.assert_alike(sent, [0, 2, 1, 3, 4, 5], failing=5, given_up_id=6)

    def assert_alike(
        self, sent: Schedule, expected: list[int], failing: int, given_up_id: int
    ) -> None:
        simulated = serve(sent, {failing}, self.TOKEN_S)
        truth = Truth(
            first_token_s=self.TOKEN_S,
            step_s=self.TOKEN_S,
            faults={expected.index(failing): "http_429"},
        )
        sent_really = Schedule("chat", sent.concurrency, sent.requests, (), 1.5, 10.0)
        with MockServer(truth) as server, LoadClient() as client:
            real = list(client.run(sent_really, sent.requests, server.base_url, "mock").records)

        assert [number for number, _ in simulated.sends] == expected
        sent_in_order = sorted(real, key=lambda record: record.sent_s)
        assert [r.request_id for r in sent_in_order if r.request_id != given_up_id] == expected
        assert list(given_up(simulated.records)) == list(given_up(real)) == [given_up_id]
        fields = ("turn", "conversation_id", "think_s", "num_completion_tokens", "error_kind")
        for a, b in zip(by_id(simulated.records), by_id(real), strict=True):
            assert [getattr(a, name) for name in fields] == [getattr(b, name) for name in fields]
            assert (a.scheduled_s is None) == (b.scheduled_s is None)
            assert b.sent_s == pytest.approx(a.sent_s, abs=0.09)


def by_id(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return sorted(records, key=lambda record: record.request_id)
