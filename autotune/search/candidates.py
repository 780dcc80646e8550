"""The distinct, launchable configs of a space, listed before any GPU time is spent.

What cannot be launched, or would be the same as another candidate, goes out here, and the plan
says how many went out for which reason.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import InputError
from autotune.search.space import KNOBS, SearchSpace
from autotune.serving.capabilities import Capabilities, Fixed
from autotune.serving.config import ServingConfig
from autotune.serving.models import DrafterInfo
from autotune.serving.token_budget import tokens_per_step

MAX_COMBINATIONS = 500_000
DEFAULT_MAX_NUM_SEQS = 256
"""vLLM's smallest default of `max_num_seqs` over all devices."""
DEFAULT_NUM_SPECULATIVE_TOKENS = 7
"""K of the published P-EAGLE recipes, for a head that does not state its trained depth."""

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

    @property
    def standing_knobs(self) -> tuple[str, ...]:
        """Knobs that have one value in all candidates, and so need no mention."""
        return tuple(d.name for d in self.dimensions if len(d.values) == 1)

    @property
    def named_knobs(self) -> tuple[str, ...]:
        """What else sets candidates apart: the drafter, and options that are searched."""
        return tuple(d.name for d in self.dimensions if d.name not in KNOBS and len(d.values) > 1)

    def by_digest(self) -> dict[str, Candidate]:
        return {candidate.config.digest: candidate for candidate in self.items}

    def nearest(self, params: Mapping[str, Any], excluded: set[str]) -> Candidate | None:
        """Return the candidate closest to `params` that is not excluded; None when all are."""
        open_items = [c for c in self.items if c.config.digest not in excluded]
        return min(open_items, key=lambda c: self._distance(c.params, params), default=None)

    def _distance(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
        """Sum over dimensions: steps apart on a line of values, scaled to 0..1."""
        total = 0.0
        for dimension in self.dimensions:
            places = {_key(value): i for i, value in enumerate(dimension.values)}
            span = max(len(dimension.values) - 1, 1)
            gap = places[_key(a[dimension.name])] - places[_key(b[dimension.name])]
            total += abs(gap) / span
        return total


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
) -> Candidates:
    """List the distinct, launchable configs of `space`.

    Args:
        space: the user's search space.
        capable: which knobs live here.
        model: the target, as the server will be told.
        drafters: the heads to search over.
        concurrency: most requests in flight, where the profile says it.

    Raises:
        InputError: nothing is left, or far too much.
    """
    heads = {head.name: head for head in drafters}
    fixed: list[Fixed] = []
    dimensions = _dimensions(space, capable, list(heads), fixed)
    num_combinations = 1
    for dimension in dimensions:
        num_combinations *= len(dimension.values)
    if num_combinations > MAX_COMBINATIONS:
        raise InputError(
            f"the search space {space.name!r} has {num_combinations:,} combinations; at most "
            f"{MAX_COMBINATIONS:,} are supported. Take out values or parameters."
        )
    found: dict[ServingConfig, Candidate] = {}
    removed: Counter[str] = Counter(_beyond_cap(space, capable))
    for values in itertools.product(*(d.values for d in dimensions)):
        params = dict(zip((d.name for d in dimensions), values, strict=True))
        reason = _why_not(params, heads, space, concurrency)
        config = None if reason else _config(params, heads, space, model)
        if config is None or config in found:
            removed[reason or "the same as another candidate (drafter knobs at K = 0)"] += 1
            continue
        found[config] = Candidate(config, params)
    if not found:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in removed.items())
        raise InputError(f"the search space {space.name!r} leaves nothing to launch: {reasons}.")
    anchors = _anchors(found, dimensions, heads)
    return Candidates(
        tuple(found.values()),
        tuple(_still_moving(dimensions, list(found.values()))),
        tuple(fixed),
        num_combinations,
        dict(removed),
        *anchors,
    )


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


def _why_not(
    params: Params, heads: Mapping[str, DrafterInfo], space: SearchSpace, concurrency: int | None
) -> str | None:
    """Say why a combination is not worth a launch; None when it is."""
    k, width = params["num_speculative_tokens"], params["tree_width"]
    seqs, budget = params["max_num_seqs"], params["max_num_batched_tokens"]
    if k and k % width:
        return "tree_width does not divide the number of draft tokens"
    if seqs and budget and budget < seqs:
        return "max_num_batched_tokens below max_num_seqs, which vLLM refuses"
    if concurrency is None:
        return None
    is_choice = len(space.values_of("max_num_seqs") or []) > 1
    if is_choice and seqs and concurrency <= DEFAULT_MAX_NUM_SEQS and seqs >= concurrency:
        return "max_num_seqs at or above the offered concurrency, the same as the default"
    head = _head(params, heads)
    cost = tokens_per_step(k, is_parallel=head is not None and head.is_parallel)
    if budget and budget < cost * min(concurrency, seqs or concurrency):
        return "max_num_batched_tokens starves decoding at the offered concurrency"
    return None


def _head(params: Params, heads: Mapping[str, DrafterInfo]) -> DrafterInfo | None:
    """Return the drafter of a combination; None at K = 0."""
    if not params["num_speculative_tokens"]:
        return None
    return heads[params.get("drafter") or next(iter(heads))]


def _config(
    params: Params, heads: Mapping[str, DrafterInfo], space: SearchSpace, model: str
) -> ServingConfig:
    k, head = params["num_speculative_tokens"], _head(params, heads)
    flags = {**space.fixed_flags, **{name: params[name] for name in space.searched_flags}}
    return ServingConfig(
        model=model,
        drafter=head.serve_as if head else None,
        num_speculative_tokens=k,
        parallel_drafting=bool(head and head.is_parallel),
        tree_width=params["tree_width"] if k else 1,
        weights=params["weights"],
        kv_cache_dtype=params["kv_cache_dtype"],
        max_num_seqs=params["max_num_seqs"],
        max_num_batched_tokens=params["max_num_batched_tokens"],
        flags=tuple(sorted(flags.items())),
    )


def _anchors(
    found: Mapping[ServingConfig, Candidate],
    dimensions: list[Dimension],
    heads: Mapping[str, DrafterInfo],
) -> tuple[Candidate, Candidate, Candidate]:
    """Pick the three configs that every study measures first."""
    plain = {d.name: _plain_value(d) for d in dimensions}
    items = list(found.values())
    depths = sorted({c.config.num_speculative_tokens for c in items} - {0})

    def at(k: int) -> Candidate:
        wanted = {**plain, "num_speculative_tokens": k}
        same = [c for c in items if c.config.num_speculative_tokens == k]
        return max(same or items, key=lambda c: sum(c.params[n] == v for n, v in wanted.items()))

    baseline = at(0)
    if not depths:
        return baseline, baseline, baseline
    trained = [head.trained_depth for head in heads.values() if head.trained_depth]
    usual = trained[0] if trained else DEFAULT_NUM_SPECULATIVE_TOKENS
    return baseline, at(_closest(depths, usual)), at(_closest(depths, 3))


_PLAIN = {"tree_width": 1, "weights": "as_is", "kv_cache_dtype": "auto"}


def _plain_value(dimension: Dimension) -> Any:
    """Return a knob's value before anybody tunes it: its default, failing that the first one."""
    plain = _PLAIN.get(dimension.name)
    return plain if plain in dimension.values else dimension.values[0]


def _closest(values: list[int], wanted: int) -> int:
    """Return the value nearest to `wanted`, the smaller one of two."""
    return min(values, key=lambda value: (abs(value - wanted), value))
