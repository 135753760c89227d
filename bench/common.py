"""What the benchmarks share: the measured model, a description of the machine, and markdown results."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-like model and of one batch."""

    layers: int = 8
    width: int = 4096
    heads: int = 32
    intermediate: int = 11008
    vocabulary: int = 32000
    sequence: int = 2048
    batch: int = 4

    @property
    def tokens(self) -> int:
        """Tokens in one batch."""
        return self.batch * self.sequence

    def describe(self) -> str:
        """Return the sizes as one line."""
        return (
            f"{self.layers} Llama-like blocks, width {self.width}, {self.heads} heads, "
            f"intermediate {self.intermediate}, vocabulary {self.vocabulary}; "
            f"sequence {self.sequence}, batch {self.batch}"
        )


TINY = Shape(layers=3, width=64, heads=4, intermediate=160, vocabulary=256, sequence=32, batch=2)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix each position with the ones before it."""
        batch, length, width = x.shape
        query, key, value = (
            project(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Block(nn.Module):
    """Attention, then a gated perceptron, each on a normalised residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.gate = nn.Linear(shape.width, shape.intermediate, bias=False)
        self.up = nn.Linear(shape.width, shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add what attention and the perceptron make of the stream to it."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A decoder-only transformer with an untied head; its forward returns the mean cross-entropy."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        angles = rotary_angles(shape)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of predicting ``targets`` from ``tokens``."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def rotary_angles(shape: Shape) -> Tensor:
    """Return the rotary angles, of shape ``(sequence, head size)``."""
    size = shape.width // shape.heads
    rates = 10000.0 ** (-torch.arange(0, size, 2) / size)
    return torch.outer(torch.arange(shape.sequence), rates).repeat(1, 2)


def make_model(shape: Shape, device: str, dtype: torch.dtype = torch.float32) -> Llama:
    """Return a model made on ``device`` with fixed random weights."""
    torch.manual_seed(0)
    with torch.device(device):
        return Llama(shape).to(dtype)


def make_batch(shape: Shape, device: str) -> tuple[Tensor, Tensor]:
    """Return fixed random tokens and targets."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.sequence + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def model_flops(shape: Shape) -> float:
    """Return the floating-point operations of one forward and backward, recomputation not counted.

    Six per token and parameter of a matrix product (the embedding is a look-up), and twelve per token, layer, width and
    attended position in attention, of which the causal mask leaves half.
    """
    block = 4 * shape.width**2 + 3 * shape.width * shape.intermediate
    parameters = shape.layers * block + shape.vocabulary * shape.width
    attention = 12 * shape.layers * shape.width * shape.sequence / 2
    return (6 * parameters + attention) * shape.tokens


def machine(device: str) -> str:
    """Return what the benchmark ran on: accelerator or processor, and cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processor = f"{cores} cores of {_processor_name()}"
    return f"1 x {torch.cuda.get_device_name()}, {processor}" if device.startswith("cuda") else processor


def _processor_name() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def command_line(module: str) -> str:
    """Return the command that runs this benchmark again, without folders of this machine."""
    arguments = [Path(each).name if each.startswith("/") else each for each in sys.argv[1:]]
    return shlex.join(["python", "-m", module, *arguments])


def default_device() -> str:
    """Return ``cuda`` where there is one, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], *, markdown: bool = False) -> str:
    """Return an aligned table; numbers are formatted by the caller."""
    align = ("left", *("right",) * (len(header) - 1))
    return tabulate(
        rows, headers=header, tablefmt="github" if markdown else "plain", colalign=align, disable_numparse=True
    )


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


@dataclasses.dataclass(frozen=True)
class Result:
    """What one benchmark found, ready to be printed or written."""

    title: str
    module: str
    device: str
    header: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    notes: tuple[str, ...] = ()

    def show(self, output: str | None = None) -> None:
        """Print the table and the notes; write them to a markdown file, too, where one is named."""
        print(table(self.header, self.rows))
        for note in self.notes:
            print(note)
        if output:
            self.write(output)

    def write(self, path: str | Path) -> None:
        """Write markdown: the table, how it was made, and the notes."""
        lines = [
            f"# {self.title}",
            "",
            table(self.header, self.rows, markdown=True),
            "",
            *(f"- {note}" for note in self.notes),
            f"- Machine: {machine(self.device)}; torch {torch.__version__}, Python {platform.python_version()}; "
            f"{datetime.datetime.now(datetime.UTC).date()}",
            f"- Command: `{command_line(self.module)}`",
            "",
        ]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("\n".join(lines), encoding="utf-8")
