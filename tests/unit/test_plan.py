"""The Plan: made, refused, fitted to blocks, and through JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protrain_compile import Plan, PlanError
from protrain_compile.plan import POLICIES

BLOCKS = ("layers.0", "layers.1", "layers.2")


@pytest.mark.parametrize("policy", POLICIES)
def test_uniform_fits_any_number_of_blocks(policy: str) -> None:
    plan = Plan.uniform(policy)
    assert plan.fit(BLOCKS) == Plan(policies=(policy,) * 3, blocks=BLOCKS)  # type: ignore[arg-type]
    assert plan.fit(()).policies == ()


def test_uniform_keeps_by_default() -> None:
    assert Plan.uniform().uniform_policy == "keep"


def test_fit_names_the_blocks_and_is_stable() -> None:
    fitted = Plan(policies=("keep", "recompute", "keep")).fit(BLOCKS)
    assert fitted.blocks == BLOCKS
    assert fitted.fit(BLOCKS) == fitted


def test_equal_plans_are_one_key() -> None:
    """Compiled graphs keep a schedule per plan."""
    assert len({Plan.uniform("keep").fit(BLOCKS), Plan(policies=("keep",) * 3).fit(BLOCKS)}) == 1


def test_lists_become_tuples() -> None:
    plan = Plan(policies=["keep"], blocks=["a"])  # type: ignore[arg-type]
    assert hash(plan) == hash(Plan(policies=("keep",), blocks=("a",)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policies": ("keep",), "uniform_policy": "keep"}, "either policies"),
        ({"policies": ("keep", "burn")}, "unknown policy 'burn'; the policies are keep, recompute"),
        ({"uniform_policy": "burn"}, "unknown policy 'burn'"),
        ({"policies": ("keep",), "blocks": ("a", "b")}, "blocks, when given, names each entry"),
        ({"uniform_policy": "keep", "blocks": ("a",)}, "blocks, when given, names each entry"),
    ],
)
def test_malformed_plans_are_refused_where_made(fields: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(**fields)  # type: ignore[arg-type]


def test_a_plan_of_another_length_says_what_differs() -> None:
    with pytest.raises(PlanError, match=r"2 block policies, but this graph has 3 blocks \(layers\.0 to layers\.2\)"):
        Plan(policies=("keep", "keep")).fit(BLOCKS)
    with pytest.raises(PlanError, match="this graph has 0 blocks; give one policy per block"):
        Plan(policies=("keep", "keep")).fit(())


def test_a_plan_for_other_blocks_names_the_first_difference() -> None:
    plan = Plan(policies=("keep",) * 3, blocks=("layers.0", "h.1", "layers.2"))
    with pytest.raises(PlanError, match=r"block 1 = 'h\.1', but this graph's block 1 is 'layers\.1'"):
        plan.fit(BLOCKS)


@pytest.mark.parametrize(
    "plan",
    [
        Plan.uniform("recompute"),
        Plan(policies=()),
        Plan(policies=("keep", "recompute")),
        Plan(policies=("keep",), blocks=("h.0",)),
    ],
)
def test_json_round_trip(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_mapping(json.loads(plan.to_json())) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "plan is not JSON"),
        ("[]", "must be a JSON object with the fields policies, uniform_policy, blocks"),
        ('"keep"', "must be a JSON object"),
        ("null", "must be a JSON object"),
        ('{"polices": ["keep"]}', "unknown fields polices; the fields are"),
        ('{"policies": "keep"}', "policies must be a list of strings"),
        ('{"policies": ["keep", 3]}', "policies must be a list of strings"),
        ('{"policies": ["keep"], "blocks": [1]}', "blocks must be a list of strings"),
        ('{"uniform_policy": ["keep"]}', "unknown policy"),
        ('{"uniform_policy": 3}', "unknown policy 3"),
    ],
)
def test_bad_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


def test_a_mapping_with_unknown_keys_of_mixed_types_is_refused() -> None:
    with pytest.raises(PlanError, match="unknown fields"):
        Plan.from_mapping({"policies": ["keep"], 3: "x", "other": 1})


def test_open_policies_are_the_planners() -> None:
    """A plan of residency alone; what fits it without planning keeps everything."""
    plan = Plan(uniform_residency="offloaded")
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.policies is None
    assert plan.fit(("a", "b")).policies == ("keep", "keep")


@pytest.mark.parametrize("name", ["policies", "residency", "sharding", "blocks"])
@pytest.mark.parametrize("value", ["keep", 3])
def test_what_is_no_list_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(PlanError, match=rf"plan: {name}={value!r}: give a list of names"):
        Plan(**{name: value})


def test_a_policy_in_place_of_a_plan_is_met_with_how_to_write_it() -> None:
    with pytest.raises(PlanError, match=r"not JSON.*Plan\.uniform\('recompute'\)"):
        Plan.from_json("recompute")
    with pytest.raises(PlanError, match="not JSON"):
        Plan.from_json(None)  # type: ignore[arg-type]


def test_what_concerns_chunks() -> None:
    assert not Plan.uniform("keep", loss="sliced").concerns_chunks
    for given in ({"residency": "split"}, {"sharding": "states"}):
        assert Plan.uniform("keep", **given).concerns_chunks  # type: ignore[arg-type]
    assert Plan(buffers=3).concerns_chunks
    assert Plan(chunk_bytes=100).concerns_chunks
