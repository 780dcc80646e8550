"""The classes of a drafted profile: what is sent, how long it is, and how it is sampled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autotune.traffic.fields import MAX_TOKENS
from autotune.traffic.importing.fit import Group, LogFit
from autotune.traffic.importing.inferred import Inferred, Quantiles
from autotune.traffic.importing.loads import MIN_REQUESTS
from autotune.traffic.importing.yaml_text import Value, YamlText, flow, scalar
from autotune.traffic.rows import plain_class_name
from autotune.traffic.tokens import CHARS_PER_TOKEN

MAX_DRAFTED_CLASSES = 12
MIN_CLASS_SHARE = 0.01
MIN_COVERED_SHARE = 0.5
"""Where fewer rows than that have a class's name, names say little about the traffic."""

MIN_ROWS_TO_HOLD_OUT = 200
MIN_ROWS_TO_TRUST = 100
"""As few prompts as still show how their acceptance varies; half of twice as many can be held out."""

MAX_TURNS = 8
MIN_RECORDED_RATIO = 0.9
DEFAULT_MAX_TOKENS = 512

_PROXIES = (("code", "demo/code"), ("math", "demo/maths"), ("summar", "demo/summarise"))
_DEFAULT_PROXY = "demo/chat"
_SAMPLING_LIMITS = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-9, 1.0),
    "top_k": (-1.0, 1e9),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-9, 2.0),
}
"""What a profile takes; a log may hold other values, which its server refused."""


class ClassDrafter:
    """Writes the list of classes."""

    def __init__(
        self,
        yaml: YamlText,
        fit: LogFit,
        log: Mapping[str, Value],
        *,
        has_turns: bool,
        is_replay: bool,
    ) -> None:
        """Take what the classes depend on.

        Args:
            yaml: where they are written.
            fit: what the log shows.
            log: the keys that name the log in the profile.
            has_turns: whether whole conversations are sent.
            is_replay: whether the trace itself brings lengths and shared blocks.
        """
        self._yaml = yaml
        self._fit = fit
        self._log = log
        self._has_turns = has_turns
        self._is_replay = is_replay

    def write(self) -> None:
        self._system_prompts()
        chosen = _chosen_classes(self._fit)
        total = sum(group.num_rows for group in chosen.values())
        for (category, group), name in zip(chosen.items(), _distinct_names(chosen), strict=True):
            self._yaml.line(f"- name: {scalar(name)}", depth=1)
            rows = f"{group.num_rows:,} of {self._fit.whole.num_rows:,} rows"
            self._yaml.line(f"weight: {max(group.num_rows / total, 0.0001):.4g}", rows, 2)
            if group.has_text:
                self._own_prompts(category if len(chosen) > 1 else None, group)
            else:
                self._proxy_prompts(name, group)
            if group.has_text or group.output_tokens is None:
                self._output(group)
            self._sampling(group)
        if total < self._fit.whole.num_rows:
            self._yaml.comment(_left_out(self._fit, chosen), 1)

    # What is said

    def _system_prompts(self) -> None:
        """Say what the prompts bring along, so that nobody adds a shared prefix to it."""
        found = self._fit.system_prompts
        if found is None:
            return
        system = found.value
        is_one = system.num_shared == 1
        which = (
            "the same system prompt" if is_one else f"one of {system.num_shared:,} system prompts"
        )
        self._yaml.comment(
            f"{system.shared_ratio:.0%} of {found.num_rows:,} requests begin with {which}, about "
            f"{system.num_chars // CHARS_PER_TOKEN:,} tokens, which the prompts hold already.",
            1,
        )

    def _own_prompts(self, category: str | None, group: Group) -> None:
        source = dict(self._log)
        if category is not None:
            source["category"] = category
        if group.num_with_text >= MIN_ROWS_TO_HOLD_OUT:
            source["holdout"] = 0.5
        rows = f"{group.num_with_text:,} rows with text"
        if group.num_with_text < MIN_ROWS_TO_TRUST:
            rows += f": few; {MIN_ROWS_TO_TRUST} show what your users see"
        self._yaml.line(f"prompts: {flow(source)}", rows, 2)
        if self._has_turns:
            self._turns()

    def _turns(self) -> None:
        sessions = self._fit.sessions
        assert sessions is not None  # without any, no conversations are sent
        turns = sessions.turns.value
        is_recorded = sessions.recorded_ratio >= MIN_RECORDED_RATIO
        settings = flow(
            {
                "max": min(MAX_TURNS, max(2, turns.p95)),
                "replay": "recorded" if is_recorded else "live",
            }
        )
        source = (
            f"p50 {turns.p50}, p95 {turns.p95}, max {turns.max} of {sessions.turns.num_rows:,}"
        )
        lacking = "" if is_recorded else "; the log has no answers"
        self._yaml.line(f"turns: {settings}", f"{source} conversations{lacking}", 2)

    def _proxy_prompts(self, name: str, group: Group) -> None:
        words = f"{name} {self._fit.path.name}".lower()
        builtin = next((proxy for sign, proxy in _PROXIES if sign in words), _DEFAULT_PROXY)
        self._yaml.line(
            f"prompts: {flow({'builtin': builtin})}",
            f"{group.num_with_text:,} of {group.num_rows:,} rows have text; results count as proxy",
            2,
        )
        if group.input_tokens is None:
            return
        shared_tokens = 0 if self._is_replay else self._shared_prefix(group.input_tokens)
        self._yaml.line("lengths:", depth=2)
        self._length("input", group.input_tokens, shared_tokens)
        if group.output_tokens is not None:
            self._length("output", group.output_tokens, 0)

    def _shared_prefix(self, lengths: Inferred[Quantiles]) -> int:
        """Write a prefix that shares as much as the blocks do; return its tokens.

        Real sharing is a tree of prefixes. One prefix a group of requests comes nearest: as many
        groups as there are first blocks to `MIN_REQUESTS` requests, and the share of tokens that hit.
        """
        blocks = self._fit.blocks
        if blocks is None or not blocks.value.hit_ratio:
            return 0
        hit_ratio = blocks.value.hit_ratio
        tokens = min(MAX_TOKENS, lengths.value.p50 - 1, round(hit_ratio * lengths.value.p50))
        groups = max(1, round(MIN_REQUESTS * blocks.value.num_first_blocks / blocks.num_rows))
        if tokens < 1:
            return 0
        self._yaml.line(
            f"shared_prefix: {flow({'tokens': tokens, 'groups': groups})}",
            f"{hit_ratio:.1%} of {blocks.value.num_blocks:,} blocks came before",
            2,
        )
        return tokens

    def _length(self, side: str, lengths: Inferred[Quantiles], less: int) -> None:
        p50, p95, most = (
            min(MAX_TOKENS, max(1, tokens - less))
            for tokens in (lengths.value.p50, lengths.value.p95, lengths.value.max)
        )
        distribution = flow({"dist": "lognormal", "p50": p50, "p95": p95, "max": most})
        sample = lengths.value.num_sampled
        of = f", a sample of {sample:,}" if sample < lengths.num_rows else ""
        beside = ", beside the prefix" if less else ""
        self._yaml.line(f"{side}: {distribution}", f"{lengths.num_rows:,} rows{of}{beside}", 3)

    # How it is answered

    def _output(self, group: Group) -> None:
        limits, outputs = group.max_tokens, group.output_tokens
        known = max((x.num_rows for x in (limits, outputs) if x is not None), default=0)
        if 2 * known < group.num_rows:
            self._yaml.line(
                f"output: {flow({'max_tokens': DEFAULT_MAX_TOKENS})}",
                "not in the log: a default",
                2,
            )
            return
        if limits is not None and 2 * limits.num_rows >= group.num_rows:
            default = int(limits.value.value)
            source = f"most common limit, of {limits.num_rows:,} rows"
        else:
            assert outputs is not None  # one of both is known of half the rows
            default = outputs.value.p95
            source = f"p95 of {outputs.num_rows:,} answers"
        tokens = min(MAX_TOKENS, max(1, default))
        settings = flow({"max_tokens": {"from": "data", "default": tokens}})
        self._yaml.line(f"output: {settings}", f"each row's own; {source}", 2)

    def _sampling(self, group: Group) -> None:
        settings: dict[str, Value] = {}
        sources = []
        for name, found in group.sampling.items():
            low, high = _SAMPLING_LIMITS.get(name, (1.0, 0.0))
            if low <= found.value.value <= high and 2 * found.num_rows >= group.num_rows:
                is_whole = name == "top_k"
                settings[name] = int(found.value.value) if is_whole else found.value.value
                sources.append(f"{name} as in {found.value.share:.0%} of {found.num_rows:,} rows")
        if "temperature" not in settings:
            settings["temperature"] = 0
            sources.append("temperature is not in the log: a default")
        self._yaml.line(f"sampling: {flow(settings)}", ", ".join(sources), 2)


def _chosen_classes(fit: LogFit) -> Mapping[str | None, Group]:
    """Return the classes that are drafted, the largest first; one without a name is all rows."""
    enough = MIN_CLASS_SHARE * fit.whole.num_rows
    by_size = sorted(fit.classes.items(), key=lambda item: -item[1].num_rows)
    large = [(name, group) for name, group in by_size if group.num_rows >= enough]
    chosen: dict[str | None, Group] = dict(large[:MAX_DRAFTED_CLASSES])
    covered = sum(group.num_rows for group in chosen.values())
    if covered < MIN_COVERED_SHARE * fit.whole.num_rows:
        return {None: fit.whole}
    return chosen


def _distinct_names(categories: Iterable[str | None]) -> list[str]:
    """Turn the log's names into ones that a class may have, no two alike."""
    names: list[str] = []
    for category in categories:
        plain = plain_class_name(category or "default")
        name, number = plain, 2
        while name in names:
            name, number = f"{plain}-{number}", number + 1
        names.append(name)
    return names


def _left_out(fit: LogFit, chosen: Mapping[str | None, Group]) -> str:
    num_rows = fit.whole.num_rows - sum(group.num_rows for group in chosen.values())
    others = [name for name in fit.classes if name not in chosen]
    unnamed = fit.whole.num_rows - sum(group.num_rows for group in fit.classes.values())
    parts = [f"in classes of few rows: {num_rows - unnamed:,}, in {len(others)}"] if others else []
    parts += [f"of no class: {unnamed:,}"] if unnamed else []
    return f"Rows left out: {num_rows:,} ({'; '.join(parts)})."
