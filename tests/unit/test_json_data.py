from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from protrain_compile import json_data
from protrain_compile.errors import ProfileError


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int
    rate: float = 1.0


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["a", "b"]
    inner: Inner
    rates: Mapping[str, float]
    several: tuple[Inner, ...] = ()
    maybe: Inner | None = None
    sure: bool = False


GOOD: dict[str, Any] = {"name": "n", "kind": "a", "inner": {"size": 3}, "rates": {"x": 2}}


def test_round_trip() -> None:
    data = Outer("n", "b", Inner(3, 0.5), {"x": 2.0}, (Inner(1), Inner(2)), Inner(9), True)
    assert json_data.from_json(Outer, json_data.to_json(data), "outer") == data


def test_defaults_and_whole_numbers_as_numbers() -> None:
    read = json_data.from_plain(Outer, GOOD, "outer")
    assert read == Outer("n", "a", Inner(3), {"x": 2.0})
    assert isinstance(read.rates["x"], float)


def test_none_is_left_out() -> None:
    assert "maybe" not in json.loads(json_data.to_json(Outer("n", "a", Inner(1), {})))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 1}, "outer.name must be a string, got 1"),
        ({"kind": "c"}, "outer.kind must be one of a, b, got 'c'"),
        ({"inner": 4}, "outer.inner must be a JSON object, got 4"),
        ({"inner": {}}, "outer.inner lacks the fields size"),
        ({"inner": {"size": 1.5}}, "outer.inner.size must be a whole number, got 1.5"),
        ({"inner": {"size": True}}, "outer.inner.size must be a whole number, got True"),
        ({"inner": {"size": 1, "sise": 2}}, "outer.inner has unknown fields sise; the fields are size, rate"),
        ({"rates": {"x": "fast"}}, "outer.rates.x must be a number, got 'fast'"),
        ({"rates": [1]}, "outer.rates must be a JSON object"),
        ({"several": {"size": 1}}, "outer.several must be a list"),
        ({"several": [{"size": 1}, {"size": "2"}]}, r"outer.several\[1\].size must be a whole number"),
        ({"maybe": {"size": None}}, "outer.maybe.size must be a whole number"),
        ({"sure": 1}, "outer.sure must be true or false"),
    ],
)
def test_a_message_names_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        json_data.from_plain(Outer, {**GOOD, **change}, "outer")


@pytest.mark.parametrize("text", ["Infinity", "NaN"])
def test_infinity_is_refused(text: str) -> None:
    with pytest.raises(ProfileError, match=r"inner.rate must be finite"):
        json_data.from_json(Inner, f'{{"size": 1, "rate": {text}}}', "inner")
    with pytest.raises(ValueError, match="JSON"):
        json_data.to_json(Inner(1, float(text.lower())))


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ProfileError, match=r"^thing (is not JSON|must be a JSON object)"):
        json_data.from_json(Inner, text, "thing")
