"""The `protrain` command."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from protrain_compile import __version__
from protrain_compile.demo.run import run
from protrain_compile.demo.settings import add_arguments, read_settings
from protrain_compile.errors import OptionError, ProtrainError

DEMO_DESCRIPTION = """\
Train a byte-level GPT with torch.compile(model, backend="protrain"): prints the schedule that runs, the loss on
text the model has not seen, and some text that the model makes up. The defaults take about two minutes on two CPU
cores, and seconds on a GPU."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parsed = _parser().parse_args(arguments)
    command: argparse.ArgumentParser = parsed.parser
    _prepare_output()
    try:
        return run(read_settings(parsed))
    except OptionError as error:
        command.error(str(error))
    except ProtrainError as error:
        print(f"protrain: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # what a shell reports for an interrupted command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="protrain", description="A torch.compile backend that plans the memory of transformer training."
    )
    parser.add_argument("--version", action="version", version=f"protrain {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo = commands.add_parser("demo", help="train a small GPT and print the schedule", description=DEMO_DESCRIPTION)
    add_arguments(demo)
    demo.set_defaults(parser=demo)
    return parser


def _prepare_output() -> None:
    """Keep lines in order with the progress bar in a log, and print generated text whatever the terminal's encoding."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, errors="replace")
