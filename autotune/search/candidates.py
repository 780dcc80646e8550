"""The distinct, launchable configs of a space, listed before any GPU time is spent.

What cannot be launched, or would be the same as another candidate, goes out here, and the plan
says how many went out for which reason.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.errors import InputError
from autotune.search.space import KNOBS, SearchSpace
from autotune.serving.capabilities import TRAINED_DEPTH_SLACK, Capabilities, Fixed
from autotune.serving.config import ServingConfig
from autotune.serving.memory import MemoryModel
from autotune.serving.models import DrafterInfo
from autotune.serving.token_budget import graph_ceiling, tokens_per_step

MAX_COMBINATIONS = 500_000
DEFAULT_MAX_NUM_SEQS = 128
"""Default of `max_num_seqs` where sizes are not known: the smallest of vLLM's API server, that on CPU
(`engine/arg_utils.py`, 0.32). On GPUs it is 256 or 1024."""
DEFAULT_NUM_SPECULATIVE_TOKENS = 7
"""K of the published P-EAGLE recipes, for a head that does not state its trained depth."""

SAME = "the same as another candidate (drafter knobs at K = 0)"
SAME_SEQS = "max_num_seqs at or above the offered concurrency, the same as the default"
SAME_BUDGET = "max_num_batched_tokens beyond what the offered requests can use, the same as less"
NO_DIVISOR = "tree_width does not divide the number of draft tokens"
REFUSED = "max_num_batched_tokens below max_num_seqs, which vLLM refuses"
STARVED = "max_num_batched_tokens starves decoding at the offered concurrency"
NO_GRAPHS = "max-cudagraph-capture-size below K + 1, which vLLM refuses"

Params = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """One launchable config and the point of the space it stands for."""

    config: ServingConfig
    params: Mapping[str, Any]
    """Value by dimension, as Optuna stores it."""


@dataclass(frozen=True)
class Dimension:
    """One knob that moves."""

    name: str
    values: tuple[Any, ...]

    @property
    def is_ordered(self) -> bool:
        """Whether the values are consecutive whole numbers, which a sampler may treat as a line."""
        first = self.values[0]
        if not isinstance(first, int) or isinstance(first, bool):
            return False
        return list(self.values) == list(range(first, first + len(self.values)))


@dataclass(frozen=True)
class Candidates:
    """All candidates of a study, with the account of what was left out."""

    items: tuple[Candidate, ...]
    dimensions: tuple[Dimension, ...]
    fixed: tuple[Fixed, ...]
    num_combinations: int
    removed: Mapping[str, int]
    """How many combinations went out, by reason."""
    baseline: Candidate
    """No speculation, everything else at its default."""
    default: Candidate
    """What a user gets who turns the drafter on and touches nothing else."""
    starter: Candidate
    """A small K, which is the best guess before anything is measured."""
    deepest: Candidate
    """A K at or near the largest, whose launch tells the acceptance at every position; the default where that
    is within reach of the cap."""

    @property
    def standing_knobs(self) -> tuple[str, ...]:
        """Knobs that have one value in all candidates, and so need no mention."""
        return tuple(d.name for d in self.dimensions if len(d.values) == 1)

    @property
    def named_knobs(self) -> tuple[str, ...]:
        """What else sets candidates apart: the drafter, and options that are searched."""
        return tuple(d.name for d in self.dimensions if d.name not in KNOBS and len(d.values) > 1)

    def by_digest(self) -> Mapping[str, Candidate]:
        return self._by_digest

    def nearest(self, params: Mapping[str, Any], excluded: Collection[str]) -> Candidate | None:
        """Return the candidate closest to `params` that is not excluded; None when all are.

        The distance is the sum over dimensions of the steps apart on the line of values, scaled to 0..1. Of
        equally close ones it is the first.

        Args:
            params: value by dimension.
            excluded: digests of configs.
        """
        row = [places[_key(params[d.name])] for d, places in self._lines]
        distances = np.abs(self._places - np.array(row)) @ self._step_sizes
        position = self._position
        gone = [position[digest] for digest in excluded if digest in position]
        if len(gone) == len(self.items):
            return None
        distances[gone] = np.iinfo(np.int64).max
        return self.items[int(np.argmin(distances))]

    @cached_property
    def _by_digest(self) -> dict[str, Candidate]:
        return {candidate.config.digest: candidate for candidate in self.items}

    @cached_property
    def _position(self) -> dict[str, int]:
        return {digest: i for i, digest in enumerate(self._by_digest)}

    @cached_property
    def _lines(self) -> list[tuple[Dimension, dict[tuple[str, Any], int]]]:
        """Every dimension with the place of each of its values."""
        return [(d, {_key(value): i for i, value in enumerate(d.values)}) for d in self.dimensions]

    @cached_property
    def _places(self) -> npt.NDArray[np.int64]:
        """Place of each candidate (rows) on each dimension's line (columns)."""
        rows = [[places[_key(c.params[d.name])] for d, places in self._lines] for c in self.items]
        return np.array(rows, dtype=np.int64).reshape(len(self.items), len(self.dimensions))

    @cached_property
    def _step_sizes(self) -> npt.NDArray[np.int64]:
        """Size of a step on each line, in whole numbers so that equal distances compare as equal."""
        spans = [max(len(d.values) - 1, 1) for d in self.dimensions]
        whole = math.lcm(*spans)
        return np.array([whole // span for span in spans], dtype=np.int64)


def _key(value: Any) -> tuple[str, Any]:
    """Tell 1 from True, which Python holds to be equal."""
    return type(value).__name__, value


def enumerate_candidates(
    space: SearchSpace,
    capable: Capabilities,
    model: str,
    drafters: Iterable[DrafterInfo],
    *,
    concurrency: int | None,
    longest_request_tokens: int | None = None,
    memory: MemoryModel | None = None,
) -> Candidates:
    """List the distinct, launchable configs of `space`.

    Args:
        space: the user's search space.
        capable: which knobs live here.
        model: the target, as the server will be told.
        drafters: the heads to search over.
        concurrency: most requests in flight, where the profile says it.
        longest_request_tokens: longest prompt plus its output, where it is known.
        memory: forecasts what fits; None where sizes are not known, and then nothing goes out for memory.

    Raises:
        InputError: nothing is left, or far too much.
    """
    heads = {head.name: head for head in drafters}
    fixed: list[Fixed] = []
    dimensions = _dimensions(space, capable, list(heads), fixed)
    num_combinations = math.prod(len(dimension.values) for dimension in dimensions)
    if num_combinations > MAX_COMBINATIONS:
        raise InputError(
            f"the search space {space.name!r} has {num_combinations:,} combinations; at most "
            f"{MAX_COMBINATIONS:,} are supported. Take out values or parameters."
        )
    sieve = _Sieve(concurrency, longest_request_tokens, memory)
    removed: Counter[str] = Counter(_beyond_cap(space, capable))
    kept: dict[int, Candidate] = {}
    doubtful: dict[int, tuple[Candidate, str]] = {}
    names = [dimension.name for dimension in dimensions]
    make = _ConfigMaker(space, model, heads)
    for number, values in enumerate(itertools.product(*(d.values for d in dimensions))):
        params = dict(zip(names, values, strict=True))
        if params["num_speculative_tokens"] % params["tree_width"]:
            removed[NO_DIVISOR] += 1
            continue
        config = make(params)
        reason = sieve.why_not(config)
        if reason is None:
            kept[number] = Candidate(config, params)
            continue
        removed[reason] += 1
        if sieve.is_doubtful(config, reason):
            doubtful[number] = (Candidate(config, params), reason)
    if not kept and not doubtful:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in removed.items())
        raise InputError(f"the search space {space.name!r} leaves nothing to launch: {reasons}.")
    everything = {**kept, **{number: candidate for number, (candidate, _) in doubtful.items()}}
    anchors = _anchors(dict(sorted(everything.items())), dimensions, heads)
    for number in anchors:
        if number in doubtful:
            # What every study compares with is worth a launch that may fail.
            kept[number], reason = doubtful.pop(number)
            removed[reason] -= 1
    items = [candidate for _, candidate in sorted(kept.items())]
    baseline, default, starter, deepest = (kept[number] for number in anchors)
    return Candidates(
        items=tuple(items),
        dimensions=tuple(_still_moving(dimensions, items)),
        fixed=tuple(fixed),
        num_combinations=num_combinations,
        removed={reason: count for reason, count in removed.items() if count},
        baseline=baseline,
        default=default,
        starter=starter,
        deepest=deepest,
    )


def largest_depth(space: SearchSpace, capable: Capabilities) -> int:
    """Return the largest K that a search of `space` can come to, before anything else is left out."""
    depths = space.values_of("num_speculative_tokens") or [0]
    if "num_speculative_tokens" in capable.fixed:
        return 0
    return max((k for k in depths if k <= capable.max_num_speculative_tokens), default=0)


class _ConfigMaker:
    """Turns points of the space into configs."""

    def __init__(self, space: SearchSpace, model: str, heads: Mapping[str, DrafterInfo]) -> None:
        self._model = model
        self._heads = heads
        self._served_as = {name: head.serve_as for name, head in heads.items()}
        self._fixed_flags = space.fixed_flags
        self._searched_flags = tuple(space.searched_flags)

    def __call__(self, params: Params) -> ServingConfig:
        k = params["num_speculative_tokens"]
        name = (params.get("drafter") or next(iter(self._heads))) if k else None
        flags = {**self._fixed_flags, **{flag: params[flag] for flag in self._searched_flags}}
        return ServingConfig(
            model=self._model,
            drafter=self._served_as[name] if name is not None else None,
            num_speculative_tokens=k,
            parallel_drafting=name is not None and self._heads[name].is_parallel,
            tree_width=params["tree_width"] if k else 1,
            weights=params["weights"],
            kv_cache_dtype=params["kv_cache_dtype"],
            max_num_seqs=params["max_num_seqs"],
            max_num_batched_tokens=params["max_num_batched_tokens"],
            flags=tuple(sorted(flags.items())),
        )


class _Sieve:
    """Says why a config is not worth a launch, knowing those that it let through before."""

    def __init__(
        self,
        concurrency: int | None,
        longest_request_tokens: int | None,
        memory: MemoryModel | None,
    ) -> None:
        self._concurrency = concurrency
        self._longest_tokens = longest_request_tokens
        self._memory = memory
        self._default_seqs = DEFAULT_MAX_NUM_SEQS if memory is None else memory.device.max_num_seqs
        self._default_budget = None if memory is None else memory.device.max_num_batched_tokens
        self._configs: set[ServingConfig] = set()
        self._by_use: set[ServingConfig] = set()

    def why_not(self, config: ServingConfig) -> str | None:
        """Return the reason to leave `config` out; None lets it through."""
        if config in self._configs:
            return SAME
        reason = self._why_not_launched(config)
        if reason is not None:
            return reason
        by_seqs = self._with_used_seqs(config)
        by_use = self._with_used_budget(by_seqs)
        if by_use in self._by_use:
            return SAME_BUDGET if by_use != by_seqs else SAME_SEQS
        self._configs.add(config)
        self._by_use.add(by_use)
        return None

    def is_doubtful(self, config: ServingConfig, reason: str) -> bool:
        """Whether `config` went out for caution alone: it may fit the memory after all."""
        if self._memory is None or config in self._configs:
            return False
        is_refused_for_memory = reason == self._memory.why_not(config)
        return is_refused_for_memory and self._memory.why_not(config, is_cautious=False) is None

    def _why_not_launched(self, config: ServingConfig) -> str | None:
        seqs, budget = config.max_num_seqs, config.max_num_batched_tokens
        if seqs and budget and budget < seqs:
            return REFUSED
        offered = self._concurrency or 1
        if budget and budget < _tokens_per_step(config) * min(offered, seqs or offered):
            return STARVED
        if self._memory is None:
            return None
        if self._memory.device.has_graphs:
            ceiling = graph_ceiling(config, self._concurrency)
            if 0 < ceiling <= config.num_speculative_tokens:
                return NO_GRAPHS
        return self._memory.why_not(config)

    def _with_used_seqs(self, config: ServingConfig) -> ServingConfig:
        """Write the same number for all values of `max_num_seqs` that hold nobody back."""
        seqs = config.max_num_seqs or self._default_seqs
        if self._concurrency is None or seqs < self._concurrency:
            return config
        return replace(config, max_num_seqs=self._concurrency)

    def _with_used_budget(self, config: ServingConfig) -> ServingConfig:
        """Write the same number for all budgets that every step fits into.

        The fullest step decodes for all users and takes in all their prompts. Where the KV cache is what
        holds requests back, budgets still differ: a larger one leaves less memory for it.
        """
        if self._concurrency is None or self._longest_tokens is None:
            return config
        most = self._concurrency * (_tokens_per_step(config) + self._longest_tokens)
        budget = config.max_num_batched_tokens or self._default_budget
        if budget is None or budget < most or self._is_short_of_kv(config):
            return config
        return replace(config, max_num_batched_tokens=most)

    def _is_short_of_kv(self, config: ServingConfig) -> bool:
        if self._memory is None or self._concurrency is None or self._longest_tokens is None:
            return False
        longest = self._longest_tokens + config.num_speculative_tokens
        return self._memory.estimate(config).kv_tokens < self._concurrency * longest


def _tokens_per_step(config: ServingConfig) -> int:
    return tokens_per_step(config.num_speculative_tokens, is_parallel=config.parallel_drafting)


def _dimensions(
    space: SearchSpace, capable: Capabilities, drafters: list[str], fixed: list[Fixed]
) -> list[Dimension]:
    """List every knob with its values; a knob that cannot move gets one value and a reason."""
    dimensions = []
    depths = space.values_of("num_speculative_tokens") or [0]
    dead = capable.fixed.get("num_speculative_tokens")
    depths = [0] if dead else [k for k in depths if k <= capable.max_num_speculative_tokens]
    if dead:
        fixed.append(dead)
    # No speculation is always measured: without it nobody can say what speculation is worth.
    dimensions.append(Dimension("num_speculative_tokens", tuple(dict.fromkeys([0, *depths]))))
    if len(drafters) > 1:
        dimensions.append(Dimension("drafter", tuple(drafters)))
    for knob, default in (("tree_width", 1), ("weights", "as_is"), ("kv_cache_dtype", "auto")):
        values = space.values_of(knob) or [default]
        if not capable.is_live(knob):
            if values != [capable.fixed[knob].value]:
                fixed.append(capable.fixed[knob])
            values = [capable.fixed[knob].value]
        elif len(values) > 1 and default not in values:
            values = [default, *values]
        dimensions.append(Dimension(knob, tuple(values)))
    for knob in ("max_num_seqs", "max_num_batched_tokens"):
        listed = space.values_of(knob)
        # None is the engine's own default, which must stay in reach unless the user fixed the knob.
        values = [None] if listed is None else listed if len(listed) == 1 else [None, *listed]
        dimensions.append(Dimension(knob, tuple(values)))
    dimensions += [Dimension(name, tuple(values)) for name, values in space.searched_flags.items()]
    return dimensions


def _still_moving(dimensions: list[Dimension], items: list[Candidate]) -> list[Dimension]:
    """Take out of every dimension the values that no candidate is left with."""
    left = {d.name: {_key(c.params[d.name]) for c in items} for d in dimensions}
    return [
        Dimension(d.name, tuple(v for v in d.values if _key(v) in left[d.name]))
        for d in dimensions
    ]


def _beyond_cap(space: SearchSpace, capable: Capabilities) -> dict[str, int]:
    depths = space.values_of("num_speculative_tokens") or []
    beyond = [k for k in depths if k > capable.max_num_speculative_tokens]
    if not beyond or "num_speculative_tokens" in capable.fixed:
        return {}
    cap = capable.max_num_speculative_tokens
    return {f"K above {cap}, past the drafter's trained depth (values of K)": len(beyond)}


def _anchors(
    items: Mapping[int, Candidate],
    dimensions: list[Dimension],
    heads: Mapping[str, DrafterInfo],
) -> tuple[int, int, int, int]:
    """Pick baseline, default, starter and deepest, which every study measures first, by their numbers."""
    plain = {d.name: _plain_value(d) for d in dimensions}
    del plain["num_speculative_tokens"]
    by_depth: dict[int, int] = {}
    matches: dict[int, int] = {}
    for number, candidate in items.items():
        k = candidate.config.num_speculative_tokens
        count = sum(candidate.params[name] == value for name, value in plain.items())
        if k not in by_depth or count > matches[k]:
            by_depth[k], matches[k] = number, count
    depths = sorted(set(by_depth) - {0})
    if not depths:
        return (by_depth[0],) * 4
    trained = [head.trained_depth for head in heads.values() if head.trained_depth]
    usual = trained[0] if trained else DEFAULT_NUM_SPECULATIVE_TOKENS
    default = _closest(depths, usual)
    # A launch at K tells of all positions up to K, so where plain configs fit, the deepest of them is it.
    most = max(matches[k] for k in depths)
    deepest = max(k for k in depths if matches[k] == most)
    if deepest <= default + TRAINED_DEPTH_SLACK and trained:
        deepest = default
    baseline = by_depth[0] if 0 in by_depth else by_depth[depths[0]]
    return baseline, by_depth[default], by_depth[_closest(depths, 3)], by_depth[deepest]


_PLAIN = {"tree_width": 1, "weights": "as_is", "kv_cache_dtype": "auto"}


def _plain_value(dimension: Dimension) -> Any:
    """Return a knob's value before anybody tunes it: its default, failing that the first one."""
    plain = _PLAIN.get(dimension.name)
    return plain if plain in dimension.values else dimension.values[0]


def _closest(values: list[int], wanted: int) -> int:
    """Return the value nearest to `wanted`, the smaller one of two."""
    return min(values, key=lambda value: (abs(value - wanted), value))
