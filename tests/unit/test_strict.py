"""Strict YAML and models: what is read, what is refused, and how a problem's place is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from autotune.errors import InputError
from autotune.strict import StrictModel, load_yaml, read_text, validate


class Small(StrictModel):
    kind: Literal["small"]
    size: int = 1


class Large(StrictModel):
    kind: Literal["large"]
    height: int = 2
    width: int = 3


class Shelf(StrictModel):
    name: str
    boxes: tuple[Annotated[Small | Large, Field(discriminator="kind")], ...] = ()
    labels: dict[str, int] = Field(default_factory=dict)


def write(folder: Path, text: str) -> Path:
    path = folder / "shelf.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problem(data: object) -> str:
    with pytest.raises(InputError) as caught:
        validate(Shelf, data, "shelf.yaml")
    return str(caught.value)


# --- models ---


def test_valid_data_becomes_a_model() -> None:
    shelf = validate(Shelf, {"name": "a", "boxes": [{"kind": "large", "height": 9}]}, "x")
    assert shelf == Shelf(name="a", boxes=(Large(kind="large", height=9),))


def test_models_cannot_be_changed() -> None:
    shelf = Shelf(name="a")
    with pytest.raises(ValidationError, match="frozen"):
        shelf.name = "b"  # type: ignore[misc]  # that is the point


def test_infinite_and_undefined_numbers_are_refused() -> None:
    class Scale(StrictModel):
        weight: float

    for value in (float("inf"), float("nan")):
        with pytest.raises(InputError, match=r"x: weight: .*finite"):
            validate(Scale, {"weight": value}, "x")


def test_a_missing_key_is_named() -> None:
    assert problem({}) == "shelf.yaml: name: the key is required."


def test_an_unknown_key_is_named_with_the_nearest_known_one() -> None:
    assert problem({"name": "a", "boxs": []}) == (
        "shelf.yaml: boxs: unknown key 'boxs'. Did you mean 'boxes'?"
    )


def test_an_unknown_key_without_a_near_one_gets_the_list() -> None:
    assert problem({"name": "a", "zzz": 1}) == (
        "shelf.yaml: zzz: unknown key 'zzz'. Valid: boxes, labels, name."
    )


def test_only_keys_of_the_kind_that_was_chosen_are_suggested() -> None:
    message = problem({"name": "a", "boxes": [{"kind": "large", "siz": 1}]})
    assert "unknown key 'siz'" in message
    assert "Valid: height, kind, width." in message
    message = problem({"name": "a", "boxes": [{"kind": "small", "siz": 1}]})
    assert "Did you mean 'size'?" in message


def test_a_place_is_written_as_it_is_found_in_the_file() -> None:
    # The kind that was chosen is no key on the way to the value.
    data = {"name": "a", "boxes": [{"kind": "small"}, {"kind": "large", "height": "tall"}]}
    message = problem(data)
    assert message.startswith("shelf.yaml: boxes[1].height: ")
    assert message.endswith("but got 'tall'.")


def test_the_place_inside_a_mapping_is_its_key() -> None:
    assert problem({"name": "a", "labels": {"left": "x"}}).startswith("shelf.yaml: labels.left: ")


def test_at_most_five_problems_are_told() -> None:
    message = problem({"name": "a", **{f"zz{i}": 1 for i in range(8)}})
    assert len(message.splitlines()) == 6
    assert message.splitlines()[5] == "... and 3 more problems of this kind."


def test_data_that_is_no_mapping_is_refused() -> None:
    assert problem(["a"]).startswith("shelf.yaml: ")


# --- YAML ---


def test_a_mapping_is_loaded_as_plain_data(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\nlist: [1, 2.5, true, null]\nnested: {a: {b: c}}\n")
    assert load_yaml(path, "shelf") == {
        "name": "a",
        "list": [1, 2.5, True, None],
        "nested": {"a": {"b": "c"}},
    }


@pytest.mark.parametrize(
    ("text", "place", "rule"),
    [
        ("a: [1\nb: 2\n", ":2:2: ", "not valid YAML"),
        ("a: 1\na: 2\n", ":2:1: ", "the key 'a' stands twice"),
        ("a: {b: 1, b: 2}\n", ":1:11: ", "the key 'b' stands twice"),
        ("a: 1\n'a': 2\n", ":2:1: ", "the key 'a' stands twice"),
        ("a: &x [1]\nb: *x\n", ":2:4: ", "aliases are not allowed"),
        ("a: *nowhere\n", ":1:4: ", "aliases are not allowed"),
        ("a: !!python/name:os.system x\n", ":1:4: ", "not valid YAML"),
        ("? [a]\n: b\n", ":1:3: ", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", ":2:1: ", "not valid YAML"),
        ("a: " + "{b: " * 60 + "1" + "}" * 60, ":1:", "nesting deeper than 50 levels"),
        ("a: " + "[" * 100_000, ":1:", "nesting deeper than 50 levels"),
        ("a: 2026-13-45\n", ": ", "not valid YAML"),
        ("a: " + "9" * 5000 + "\n", ": ", "not valid YAML"),
        ("a: \x07\n", ": ", "not valid YAML"),
        ("a: !!int\n", ":", "not valid YAML"),  # the tag promises what the value does not hold
        ("a: !!bool maybe\n", ":", "not valid YAML"),
        ("a: !!timestamp soon\n", ":", "not valid YAML"),
        ("", ": ", "must be a mapping of keys to values, but got 'NoneType'"),
        ("text\n", ": ", "must be a mapping of keys to values, but got 'str'"),
        ("2: a\n", ": ", "every key must be text, but got 2"),
        ("yes: a\n", ": ", "every key must be text, but got True"),
    ],
)
def test_bad_yaml_is_refused_with_its_place(
    tmp_path: Path, text: str, place: str, rule: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        load_yaml(path, "shelf")
    message = str(caught.value)
    assert message.startswith(f"{path}{place}")
    assert rule in message
    assert len(message) < 1000


def test_nesting_up_to_the_limit_is_read(tmp_path: Path) -> None:
    # 1 for the mapping and 48 for the lists make 49 levels, with the innermost 1 as the 50th.
    data = load_yaml(write(tmp_path, "a: " + "[" * 48 + "1" + "]" * 48), "shelf")
    for _ in range(48):
        (data["a"],) = data["a"]
    assert data == {"a": 1}


def test_many_keys_side_by_side_are_no_nesting(tmp_path: Path) -> None:
    text = "".join(f"k{i}: {{a: [1, 2]}}\n" for i in range(200))
    assert len(load_yaml(write(tmp_path, text), "shelf")) == 200


@given(st.binary(max_size=200))
def test_whatever_a_file_holds_it_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(data)
    try:
        assert isinstance(load_yaml(path, "shelf"), dict)
    except InputError as err:
        assert str(err).startswith(str(path))  # noqa: PT017  # both outcomes are right


@given(st.text(alphabet="ab:- \n[]{}&*!'\"#?|>,1.<~", max_size=60))
def test_whatever_yaml_a_file_holds_it_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        assert isinstance(load_yaml(path, "shelf"), dict)
    except InputError as err:
        assert str(err).startswith(str(path))  # noqa: PT017  # both outcomes are right


# --- text files ---


def test_text_is_read_as_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("größer\n".encode())
    assert read_text(path, "note") == "größer\n"


def test_the_role_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the search space must exist. Check the path."):
        load_yaml(tmp_path / "nope.yaml", "search space")
    with pytest.raises(InputError, match="the search space must be a file"):
        load_yaml(tmp_path, "search space")


def test_a_file_over_the_limit_is_refused_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 11, encoding="utf-8")
    assert read_text(path, "note", max_bytes=11) == "x" * 11
    with pytest.raises(InputError, match="must be at most 10 bytes, but got 11"):
        read_text(path, "note", max_bytes=10)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read every file")
def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x", encoding="utf-8")
    path.chmod(0)
    with pytest.raises(InputError, match="cannot be read"):
        read_text(path, "note")
