from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from protrain_compile import OptionError
from protrain_compile.demo import data
from protrain_compile.demo.data import batches, load_text, split_text

CPU = torch.device("cpu")


def draw(text: torch.Tensor, **changes: int) -> list[data.Batch]:
    arguments = {"count": 3, "batch": 4, "length": 5, "seed": 0} | changes
    return list(batches(text, **arguments, device=CPU))  # type: ignore[arg-type]


def test_python_topics_are_long_enough_to_train_on() -> None:
    text = load_text(None)
    assert len(text) > 100_000
    assert b"statement" in text


def test_file_is_read_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xff\x00abc")
    assert load_text(path) == b"\xff\x00abc"


@pytest.mark.parametrize("name", ["missing", "."])
def test_unreadable_file_names_the_argument(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match=r"--text: cannot read .*; give a text file"):
        load_text(tmp_path / name)


def test_python_without_topics_points_at_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(OptionError, match="--text FILE"):
        load_text(None)


def test_split_keeps_every_byte_once_and_validates_on_the_end() -> None:
    text = bytes(range(200))
    training, validation = split_text(text, 8)
    assert bytes(training.tolist()) + bytes(validation.tolist()) == text
    assert len(validation) == 20


def test_shortest_text_that_the_message_asks_for_is_enough() -> None:
    with pytest.raises(OptionError, match=r"has 50 bytes, but --seq 8 needs at least 90") as error:
        split_text(bytes(50), 8)
    assert "longer --text" in str(error.value)
    training, validation = split_text(bytes(90), 8)
    assert draw(training, length=8)
    assert draw(validation, length=8)


def test_one_byte_less_is_refused() -> None:
    with pytest.raises(OptionError):
        split_text(bytes(89), 8)


def test_targets_are_the_tokens_one_byte_later() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    for batch in draw(text):
        assert batch.tokens.shape == batch.targets.shape == (4, 5)
        assert batch.tokens.dtype == torch.long
        assert torch.equal(batch.targets, batch.tokens + 1)


def test_last_byte_can_be_a_target() -> None:
    text = torch.arange(6, dtype=torch.uint8)
    (batch,) = draw(text, count=1)
    assert batch.targets[:, -1].eq(5).all()


def test_seed_decides_the_batches() -> None:
    text = torch.randint(256, (1000,), dtype=torch.uint8)
    first, again, other = draw(text), draw(text), draw(text, seed=1)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0].tokens, first[1].tokens)
