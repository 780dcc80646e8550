"""The prompts that the gate asks: the profile's own, made greedy and short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.traffic.schedule import Schedule, ScheduledRequest

_KEPT_FIELDS = frozenset({"messages", "prompt", "chat_template_kwargs"})
"""Fields of a request's body that shape its prompt.

The others are left out: sampling, because the gate is greedy, and constrained output or a bias,
because they change which token is chosen, but not the log-probabilities that it is judged by.
"""


@dataclass(frozen=True)
class QualityPrompt:
    """One question put to both servers."""

    body: Mapping[str, Any]
    """The part of the request's body that makes the prompt: `messages` or `prompt`."""
    max_tokens: int

    @classmethod
    def of_messages(
        cls, messages: Sequence[Mapping[str, str]], endpoint_kind: str, max_tokens: int
    ) -> QualityPrompt:
        """Ask chat messages at either endpoint; completions get their texts, without roles."""
        if endpoint_kind == "chat":
            return cls({"messages": [dict(message) for message in messages]}, max_tokens)
        return cls({"prompt": "\n\n".join(m["content"] for m in messages)}, max_tokens)


def quality_prompts(
    schedule: Schedule, num_prompts: int, max_tokens: int
) -> tuple[QualityPrompt, ...]:
    """Take the schedule's first distinct prompts, which hold its mixture of classes.

    Args:
        schedule: what is measured; its warm-up is left out.
        num_prompts: at most so many; a schedule with fewer gives all it has.
        max_tokens: limit of an answer, where the request's own is not lower.
    """
    chosen: dict[str, ScheduledRequest] = {}
    for request in schedule.requests:
        is_complete = not (request.is_live and request.turn > 0)
        if is_complete and len(chosen) < num_prompts:
            chosen.setdefault(request.prompt.prompt_id, request)
    return tuple(
        QualityPrompt(
            {k: v for k, v in r.body(schedule.endpoint).items() if k in _KEPT_FIELDS},
            min(max_tokens, r.max_tokens),
        )
        for r in chosen.values()
    )
