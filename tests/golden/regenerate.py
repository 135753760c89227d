"""The golden texts: how they are made, and a command that writes them anew.

    python tests/golden/regenerate.py

Look at the difference before committing it: these files are what users see.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER.parent)]

from support.capture import compiled, mixed  # noqa: E402

from protrain_compile import ModelSchedule, cli  # noqa: E402


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TinyGPT(nn.Module):
    """Fixed here, so that changes of shared test models do not change these files."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


@functools.cache
def schedule(*, inference: bool = False) -> ModelSchedule:
    """Return the schedule of a model that has run once."""
    with torch.set_grad_enabled(not inference):
        return compiled(TinyGPT(), torch.zeros(2, 8, dtype=torch.int64))[1]


def printed(plan: str, *, inference: bool = False) -> str:
    """Return the printed schedule under the plan that ``plan`` stands for, with the time masked."""
    found = schedule(inference=inference)
    found.use(mixed(plan))
    return re.sub(r"built in \d+\.\d s", "built in ... s", found.render()) + "\n"


def plan_json() -> str:
    """Return the JSON of a plan in use."""
    schedule().use(mixed("rrkk"))
    return schedule().plan.to_json() + "\n"


def planned(*arguments: str) -> str:
    """Return what ``protrain plan`` prints for a small model."""
    sizes = "n_embd=1024,n_layer=6,n_head=16,vocab_size=50257,attn_pdrop=0,embd_pdrop=0,resid_pdrop=0"
    with contextlib.redirect_stdout(io.StringIO()) as written:
        cli.main(["plan", f"gpt2:{sizes}", "--batch", "8", "--seq", "512", *arguments])
    return written.getvalue()


GOLDEN: dict[str, Callable[[], str]] = {
    "keep.txt": lambda: printed("kkkk"),
    "recompute.txt": lambda: printed("rrrr"),
    "mixed.txt": lambda: printed("krrk"),
    "swap.txt": lambda: printed("sksk"),
    "swap_products.txt": lambda: printed("xwxk"),
    "finer.txt": lambda: printed("rwwk"),
    "inference.txt": lambda: printed("kkkk", inference=True),
    "plan.json": plan_json,
    "plan_budget.txt": lambda: planned("--memory-budget", "1.5GiB"),
    "plan_refused.txt": lambda: planned("--memory-budget", "800MiB"),
    "plan_ranks.txt": lambda: planned("--ranks", "8"),
}
"""What each file holds."""


if __name__ == "__main__":
    for name, make in GOLDEN.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")
        sys.stdout.write(f"wrote {name}\n")
