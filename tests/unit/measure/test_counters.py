"""Reading vLLM's counters out of the text of its /metrics."""

from __future__ import annotations

import pytest

from autotune.measure.counters import parse_counters
from autotune.measure.records import ServerCounters

# Cut from the answer of vLLM 0.32; histograms shortened.
PLAIN = """\
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython",major="3",minor="11",patchlevel="7",version="3.11.7"} 1.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="autotune-1"} 3.0
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="autotune-1"} 2048.0
# HELP vllm:prefix_cache_queries_created Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_created gauge
vllm:prefix_cache_queries_created{engine="0",model_name="autotune-1"} 1.7960684963652802e+09
# HELP vllm:prefix_cache_hits_total Prefix cache hits, in terms of number of cached tokens.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="autotune-1"} 512.0
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="autotune-1"} 2.0
# HELP vllm:num_preemptions_created Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="autotune-1"} 1.7960684963652647e+09
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="autotune-1"} 2.5e+06
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="autotune-1"} 640.0
# HELP vllm:generation_tokens_created Number of generation tokens processed.
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{engine="0",model_name="autotune-1"} 1.7960684963652496e+09
# HELP vllm:request_success_total Count of successfully processed requests.
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="autotune-1"} 4.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="autotune-1"} 8.0
# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="autotune-1"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="autotune-1"} 12.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="autotune-1"} 12.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="autotune-1"} 0.75
"""

SPECULATIVE = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7960684963653085e+09
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 1100.0
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 275.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
"""
# Eleven positions, so that order by text ("10" before "2") would show.
PER_POSITION = [70.0, 50.0, 40.0, 30.0, 25.0, 20.0, 15.0, 10.0, 8.0, 5.0, 2.0]


def speculative(engine: str = "0") -> str:
    rows = [
        "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        f'{{engine="0",model_name="m",position="{position}"}} {count}\n'
        for position, count in reversed(list(enumerate(PER_POSITION)))
    ]
    return (SPECULATIVE + "".join(rows)).replace('engine="0"', f'engine="{engine}"')


def test_a_server_without_speculation() -> None:
    assert parse_counters(PLAIN) == ServerCounters(
        num_preemptions=2.0,
        num_prompt_tokens=2_500_000.0,
        num_generation_tokens=640.0,
        num_prefix_cache_queries=2048.0,
        num_prefix_cache_hits=512.0,
        has_speculation=False,
    )


def test_a_server_with_speculation() -> None:
    found = parse_counters(PLAIN + speculative())
    assert found.has_speculation
    assert found.num_drafts == 100
    assert found.num_draft_tokens == 1100
    assert found.num_accepted_tokens == 275
    assert found.num_accepted_tokens_per_pos == tuple(PER_POSITION)
    assert found.acceptance_length == pytest.approx(3.75)  # 1 + 275 / 100
    assert found.num_generation_tokens == 640


def test_engines_of_one_server_are_summed() -> None:
    # Data parallel: the second engine's samples follow in the same family.
    rows = speculative("1").splitlines()
    second = "\n".join(row for row in rows if not row.startswith("#")) + "\n"
    found = parse_counters(speculative("0") + second)
    assert found.num_drafts == 200
    assert found.num_accepted_tokens_per_pos == tuple(2 * count for count in PER_POSITION)


def test_time_stamps_of_counters_are_no_counts() -> None:
    only_created = "\n".join(line for line in speculative().splitlines() if "_created" in line)
    assert parse_counters(only_created + "\n") == ServerCounters()


def test_counters_that_stand_at_zero_still_show_speculation() -> None:
    text = 'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 0.0\n'
    found = parse_counters("# TYPE vllm:spec_decode_num_drafts_total counter\n" + text)
    assert found.has_speculation
    assert found.acceptance_length is None


def test_an_empty_answer_counts_nothing() -> None:
    assert parse_counters("") == ServerCounters()
