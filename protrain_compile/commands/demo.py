"""``protrain demo``."""

from __future__ import annotations

import argparse
from typing import Any

from protrain_compile.demo.run import run
from protrain_compile.demo.settings import add_arguments, read_settings

DESCRIPTION = """\
Train a byte-level GPT with torch.compile(model, backend="protrain"): prints the schedule that runs, the loss on
text the model has not seen, and some text that the model makes up. The defaults take about two minutes on two CPU
cores, and seconds on a GPU."""


def add(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("demo", help="train a small GPT and print the schedule", description=DESCRIPTION)
    add_arguments(parser)
    parser.set_defaults(parser=parser, execute=execute)


def execute(parsed: argparse.Namespace) -> int:
    """Carry the command out; return the exit status."""
    return run(read_settings(parsed))
