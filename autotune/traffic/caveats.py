"""What limits every conclusion that is drawn from a profile's traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autotune.traffic.profile import TrafficProfile
from autotune.traffic.schedule import PromptRealism, Schedule

ENOUGH_PROMPTS = 100
"""Distinct prompts of a class from which on repeats are no longer remarked on."""


def caveats(profile: TrafficProfile, schedule: Schedule) -> list[str]:
    """Say what a reader of any result must know, most weighty first; each one line, no full stop."""
    return [
        *_of_prompts(profile, schedule),
        *profile.thin_limits(schedule.num_requests_of_class),
        *_of_closed_loop(profile),
    ]


def _of_prompts(profile: TrafficProfile, schedule: Schedule) -> Iterator[str]:
    if schedule.prompt_realism is PromptRealism.PROXY:
        yield "proxy prompts: the prompts are not your users', and acceptance depends on what is said"
    elif schedule.prompt_realism is PromptRealism.RANDOM:
        yield "random prompts: figures under speculation say nothing about real traffic"
    for number, c in enumerate(profile.classes):
        if c.output.ignore_eos:
            yield (
                f"classes[{number}].output.ignore_eos: text past the model's own stop distorts "
                "acceptance"
            )
    # Of a conversation the beginning counts: that is what a cache knows it by.
    begun = [(r.class_name, r.prompt.messages) for r in schedule.requests if r.turn == 0]
    distinct = Counter(name for name, _ in set(begun))
    for name, count in Counter(name for name, _ in begun).items():
        if distinct[name] < min(count, ENOUGH_PROMPTS):
            yield (
                f"class {name!r} has {distinct[name]} different prompts for {count} requests: those "
                f"that come again are answered from the prefix cache; use {ENOUGH_PROMPTS} or more"
            )


def _of_closed_loop(profile: TrafficProfile) -> Iterator[str]:
    if not profile.is_closed_loop:
        return
    for number, c in enumerate(profile.classes):
        for key in c.slo:
            if key.startswith(("ttft", "e2el")):
                yield (
                    f"classes[{number}].slo.{key}: in closed loop a slow server is sent less, so "
                    "your users may wait longer than is measured; a load of the kind rate shows it"
                )
