"""What users see, to the letter. To accept a change: ``python tests/golden/regenerate.py``."""

from __future__ import annotations

import pytest
from golden.regenerate import FOLDER, GOLDEN

from protrain_compile import Plan


@pytest.mark.parametrize("name", GOLDEN)
def test_as_recorded(name: str) -> None:
    assert GOLDEN[name]() == (FOLDER / name).read_text(encoding="utf-8")


def test_every_file_is_made() -> None:
    found = {path.name for path in FOLDER.iterdir() if path.suffix in (".txt", ".json")}
    assert found == set(GOLDEN)


def test_the_recorded_plan_is_a_plan() -> None:
    """Plans that users saved stay readable."""
    plan = Plan.from_json((FOLDER / "plan.json").read_text(encoding="utf-8"))
    assert plan.policies == ("recompute", "recompute", "keep", "keep")
    assert plan.blocks == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
