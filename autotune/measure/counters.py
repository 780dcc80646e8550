"""Read vLLM's counters out of the text that `/metrics` answers with."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from autotune.measure.records import ServerCounters

_FIELDS = {
    "vllm:spec_decode_num_drafts_total": "num_drafts",
    "vllm:spec_decode_num_draft_tokens_total": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "num_accepted_tokens",
    "vllm:num_preemptions_total": "num_preemptions",
    "vllm:prompt_tokens_total": "num_prompt_tokens",
    "vllm:generation_tokens_total": "num_generation_tokens",
    "vllm:prefix_cache_queries_total": "num_prefix_cache_queries",
    "vllm:prefix_cache_hits_total": "num_prefix_cache_hits",
}
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


def parse_counters(text: str) -> ServerCounters:
    """Sum the counters over the engines of one server.

    Args:
        text: the body of `/metrics`, in Prometheus text format.
    """
    sums: dict[str, float] = {}
    per_position: dict[int, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in _FIELDS:
                name = _FIELDS[sample.name]
                sums[name] = sums.get(name, 0.0) + sample.value
            elif sample.name == _PER_POSITION:
                position = int(sample.labels["position"])
                per_position[position] = per_position.get(position, 0.0) + sample.value
    return ServerCounters(
        **sums,  # the keys are the float fields listed in _FIELDS
        num_accepted_tokens_per_pos=tuple(per_position[i] for i in sorted(per_position)),
        has_speculation="num_drafts" in sums,
    )
