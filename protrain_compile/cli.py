"""The `protrain` command."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from protrain_compile import __version__
from protrain_compile.commands import demo, plan, profile
from protrain_compile.errors import OptionError, ProtrainError

COMMANDS = (demo, plan, profile)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parsed = _parser().parse_args(arguments)
    command: argparse.ArgumentParser = parsed.parser
    _prepare_output()
    try:
        status: int = parsed.execute(parsed)
        return status
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
    for command in COMMANDS:
        command.add(commands)
    return parser


def _prepare_output() -> None:
    """Keep lines in order with the progress bar in a log, and print generated text whatever the terminal's encoding."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, errors="replace")
