"""The search space: which knobs may move over which values, and which vLLM options are fixed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from autotune.errors import invalid, suggestion
from autotune.paths import user_path
from autotune.serving.config import MAX_NUM_SPECULATIVE_TOKENS, Flag
from autotune.shipped import shipped_files
from autotune.strict import StrictModel, load_yaml, validate

KNOBS = (
    "num_speculative_tokens",
    "tree_width",
    "weights",
    "kv_cache_dtype",
    "max_num_seqs",
    "max_num_batched_tokens",
)
"""The knobs with a meaning of their own; any other parameter is a vLLM option, dashed."""

_ALLOWED = {"weights": ("as_is", "fp8"), "kv_cache_dtype": ("auto", "fp8")}
_RESERVED = {
    "model": "give it with --model or in the profile",
    "host": "servers under test listen on loopback",
    "port": "a free port is chosen for every launch",
    "served-model-name": "it identifies the server under test",
    "speculative-config": "it is built from num_speculative_tokens, tree_width and the drafter",
    "quantization": "use the parameter `weights`",
    "config": "put its content under `fixed`",
}
MAX_VALUES = 256


class Values(StrictModel):
    """The values of one parameter: exactly one of the three ways to write them."""

    choices: tuple[str | bool | int | float, ...] | None = Field(default=None, min_length=1)
    range: tuple[int, int] | None = None
    powers_of_two: tuple[int, int] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Values:
        given = [n for n in ("choices", "range", "powers_of_two") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ValueError("exactly one of `choices`, `range` and `powers_of_two` must be given")
        low, high = self.range or self.powers_of_two or (0, 0)
        if low > high:
            raise ValueError(
                f"the first bound must not be above the second, but got [{low}, {high}]"
            )
        if self.powers_of_two and low < 1:
            raise ValueError(f"powers of two start at 1, but got [{low}, {high}]")
        if len(self.as_list()) > MAX_VALUES:
            raise ValueError(
                f"at most {MAX_VALUES} values may be given, but got {len(self.as_list())}"
            )
        if not self.as_list():
            raise ValueError(f"there is no power of two in [{low}, {high}]")
        return self

    def as_list(self) -> list[Any]:
        """Return the values in the order given, or ascending for ranges."""
        if self.choices is not None:
            return list(dict.fromkeys(self.choices))
        if self.range is not None:
            low, high = self.range
            return list(range(low, min(high, low + MAX_VALUES) + 1))
        assert self.powers_of_two is not None  # the validator demands one of the three
        low, high = self.powers_of_two
        return [2**e for e in range(63) if low <= 2**e <= high]


class SearchSpace(StrictModel):
    """A whole search-space file."""

    version: Literal[1]
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    parameters: Annotated[dict[str, Values], Field(min_length=1)]
    fixed: dict[str, Flag] = Field(default_factory=dict)
    beyond_trained_depth: bool = Field(
        default=False, description="search K past what the drafter was trained for"
    )

    @field_validator("parameters")
    @classmethod
    def _known_parameters(cls, parameters: dict[str, Values]) -> dict[str, Values]:
        named: dict[str, Values] = {}
        for written, values in parameters.items():
            _check_name(written)
            knob = written.replace("-", "_")
            name = knob if knob in KNOBS else written
            if name in named:
                raise ValueError(f"{name!r} stands twice, once with dashes")
            _check_values(name, values.as_list())
            named[name] = values
        return named

    @field_validator("fixed")
    @classmethod
    def _known_fixed(cls, fixed: dict[str, Flag]) -> dict[str, Flag]:
        for name, value in fixed.items():
            _check_name(name)
            if name.replace("-", "_") in KNOBS:
                _check_values(name.replace("-", "_"), [value])
        return fixed

    @model_validator(mode="after")
    def _not_both(self) -> SearchSpace:
        searched = {name.replace("_", "-") for name in self.parameters}
        for name in self.fixed:
            if name.replace("_", "-") in searched:
                raise ValueError(f"{name!r} stands under both `parameters` and `fixed`")
        return self

    def values_of(self, knob: str) -> list[Any] | None:
        """Return the values of a knob or option; None where the space does not speak of it."""
        if knob in self.parameters:
            return self.parameters[knob].as_list()
        for name, value in self.fixed.items():
            if name.replace("-", "_") == knob.replace("-", "_"):
                return [value]
        return None

    @property
    def searched_flags(self) -> dict[str, list[Any]]:
        """vLLM options that are searched, by dashed name."""
        return {n: v.as_list() for n, v in self.parameters.items() if n not in KNOBS}

    @property
    def fixed_flags(self) -> dict[str, Flag]:
        """vLLM options that are fixed and are no knobs."""
        return {n: v for n, v in self.fixed.items() if n.replace("-", "_") not in KNOBS}


def load_space(name_or_path: str) -> SearchSpace:
    """Load a search space by the name of a shipped one, or by path.

    Raises:
        InputError: there is no such space, or the file breaks a rule.
    """
    path = user_path(name_or_path, "--space")
    if path.suffix in {".yaml", ".yml"} or path.exists():
        return validate(SearchSpace, load_yaml(path, "search space"), path)
    shipped = shipped_files("search_spaces")
    if name_or_path not in shipped:
        raise invalid(
            "must be the path of a YAML file or the name of a shipped search space",
            where="--space",
            got=name_or_path,
            next_step=suggestion(name_or_path, shipped),
        )
    path = shipped[name_or_path]
    return validate(SearchSpace, load_yaml(path, "search space"), path)


def _check_name(name: str) -> None:
    dashed = name.replace("_", "-")
    if dashed in _RESERVED or dashed.split(".")[0] == "speculative-config":
        reason = _RESERVED.get(dashed, _RESERVED["speculative-config"])
        raise ValueError(f"{name!r} may not be set here: {reason}")
    if name.replace("-", "_") in KNOBS:
        return
    if "_" in name.split(".")[0]:
        raise ValueError(
            f"unknown parameter {name!r}. {suggestion(name, KNOBS)} vLLM options are written with "
            f"dashes: {dashed!r}."
        )


def _check_values(name: str, values: list[Any]) -> None:
    if name == "num_speculative_tokens":
        for value in values:
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not is_whole or not 0 <= value <= MAX_NUM_SPECULATIVE_TOKENS:
                raise ValueError(
                    f"num_speculative_tokens must be whole numbers from 0 to "
                    f"{MAX_NUM_SPECULATIVE_TOKENS}, but got {value!r}"
                )
    elif name in _ALLOWED:
        for value in values:
            if value not in _ALLOWED[name]:
                raise ValueError(
                    f"{name} must be one of {', '.join(_ALLOWED[name])}, but got {value!r}"
                )
    elif name in KNOBS:
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be whole numbers from 1, but got {value!r}")
