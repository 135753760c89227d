"""Predicted against measured: step time and peak memory of prepared models under device memory caps.

A configuration is ``MODEL:BATCH:CAP``, the cap in GiB, with ``+clip`` to clip gradients. Without more, the plan is the
searched one. By hand, and the rest searched: ``=recompute`` the policy of all blocks, ``=swap*3,recompute*19,keep*4``
those of groups of blocks in order, ``@p7`` 7 chunks persistent at the front and the others offloaded, ``@b4`` or
``@p7,b4`` chunk buffers::

    python -m bench.accuracy llama:16:24 llama:16:24+clip llama:16:24=recompute@p7,b4 gpt2:8:16 --plot accuracy.svg

Every configuration is a process of its own, or with ``--here`` one after the other in one; its result is printed at
once. ``--shared`` prepares a model once for the configurations of it that follow each other: their chunks stay as the
first one's plan put them, as they do when sizes change. The prediction is ``cost_model.simulate`` on the shape and the
plan that ran, with templates and machine profiled on the device. ``--read FILE`` shows and draws what ``--json FILE``
wrote, without a GPU; ``--parts`` shows, for every part, its mean time in training beside the profiled one.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import common
from bench.part_times import parts_table
from bench.subject import MODELS, Configuration, Subject, fresh

HEADER = (
    "configuration",
    "plan",
    "step ms",
    "predicted",
    "off",
    "peak GiB",
    "predicted",
    "off",
    "reserved",
    "tokens/s",
)


class Recorder:
    """Prints results as they come, and writes all of them where wanted.

    Args:
        describe: Returns the table row of a result.
        path: Of the JSON file, which ``bench.accuracy --read`` reads; None for none.
    """

    def __init__(self, describe: Callable[[dict[str, Any]], Sequence[str]], path: str | None) -> None:
        self.found: list[dict[str, Any]] = []
        self._describe, self._path = describe, path

    def keep(self, result: dict[str, Any]) -> None:
        """Take one more."""
        self.found.append(result)
        print("  ".join(self._describe(result)), *result.get("error", ()), sep="\n  ", flush=True)
        if self._path:
            Path(self._path).write_text(json.dumps(self.found, indent=1), encoding="utf-8")


def run_child(configuration: Configuration, timeout_s: float, *, parts: bool) -> dict[str, Any]:
    """Measure in a child process; a failed one says why in ``error``."""
    fields = json.dumps(dataclasses.asdict(configuration))
    command = [sys.executable, "-m", "bench.accuracy", "--job", fields, *(["--parts"] if parts else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"configuration": str(configuration), "error": [f"took more than {timeout_s:.0f} s"]}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        error = done.stderr.strip().splitlines()[-12:] or ["no output"]
        return {"configuration": str(configuration), "error": error}
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


class Here:
    """Measures in this process, which compiles alike parts once.

    Args:
        shared: Whether configurations that allow it are measured on one prepared model.
        parts: Whether every part is measured.
    """

    def __init__(self, *, shared: bool, parts: bool) -> None:
        self.shared, self.parts = shared, parts
        self.subject: Subject | None = None

    def run(self, configuration: Configuration) -> dict[str, Any]:
        """Measure; a failed one says why in ``error``."""
        try:
            if self.subject is not None and self.subject.prepared_like != configuration.prepared_like:
                self.close()
            if self.subject is None:
                self.subject = Subject(configuration)
            return self.subject.measure(configuration, parts=self.parts)
        except Exception as error:
            found = {"configuration": str(configuration), "error": traceback.format_exception(error)[-12:]}
            self.close()
            return found
        finally:
            if not self.shared:
                self.close()
            fresh()

    def close(self) -> None:
        """Drop the model."""
        if self.subject is not None:
            self.subject.close()
        self.subject = None
        gc.collect()


def predicted_peak(result: dict[str, Any]) -> int:
    """Return the predicted peak, and what others hold beside the step: the workspaces of libraries."""
    return int(result["prediction"]["peak_bytes"]) + int(result["other_bytes"])


def off(predicted: float, measured: float) -> float:
    """Return how far a prediction is above what was measured, relative to it; 0 where nothing was measured."""
    return predicted / measured - 1 if measured else 0.0


def describe(result: dict[str, Any]) -> tuple[str, ...]:
    """Return the table row of one result."""
    if "error" in result:
        return (result["configuration"], "failed", *[""] * (len(HEADER) - 2))
    plan, predicted = result["plan"], result["prediction"]
    kinds = "{persistent}/{chunks} persistent, {buffers} buffers; {policies}; loss {loss}"
    return (
        result["configuration"],
        kinds.format(**plan),
        f"{result['step_ms']:,.0f}",
        f"{predicted['step_ms']:,.0f}",
        f"{off(predicted['step_ms'], result['step_ms']):+.1%}",
        f"{result['peak_bytes'] / 2**30:.2f}",
        f"{predicted_peak(result) / 2**30:.2f}",
        f"{off(predicted_peak(result), result['peak_bytes']):+.1%}",
        f"{result['reserved_bytes'] / 2**30:.2f}",
        f"{result['tokens_s']:,.0f}",
    )


def summary(results: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return medians and worst errors as sentences."""
    good = [each for each in results if "error" not in each]
    if not good:
        return ("nothing was measured",)
    times = [off(each["prediction"]["step_ms"], each["step_ms"]) for each in good]
    peaks = [off(predicted_peak(each), each["peak_bytes"]) for each in good]
    middle = common.median([abs(each) for each in times])
    return (
        f"step time: median error {middle:.1%}, worst {max(times, key=abs):+.1%}, of {len(good)} configurations",
        f"peak memory: median {common.median(peaks):+.1%}, from {min(peaks):+.1%} to {max(peaks):+.1%}",
    )


def plot(results: Sequence[dict[str, Any]], path: str) -> None:
    """Draw predicted against measured, for time and for memory."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    panels: Any = (
        ("step_ms", lambda each: each["prediction"]["step_ms"], 1.0, "step time, ms", 0.03),
        ("peak_bytes", predicted_peak, 2.0**30, "peak memory, GiB", 0.05),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(11, 5))
    for axis, (name, predict, unit, title, allowed) in zip(axes, panels, strict=True):
        for model in dict.fromkeys(each["configuration"].partition(":")[0] for each in results):
            mine = [each for each in results if each["configuration"].startswith(f"{model}:") and "error" not in each]
            measured = [each[name] / unit for each in mine]
            axis.scatter(measured, [predict(each) / unit for each in mine], label=model)
        most = max([axis.get_xlim()[1], axis.get_ylim()[1]])
        axis.plot([0, most], [0, most], color="black", linewidth=0.8)
        axis.fill_between([0, most], [0, most * (1 - allowed)], [0, most * (1 + allowed)], alpha=0.15)
        axis.set(title=f"{title} (band: {allowed:.0%})", xlabel="measured", ylabel="predicted", xlim=0, ylim=0)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the configurations one after another, or read results; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configurations", nargs="*", help="MODEL:BATCH:CAP[+clip][=POLICY[*N],...][@pN,bN]")
    parser.add_argument("--steps", type=int, default=6, help="timed steps")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one configuration")
    parser.add_argument("--here", action="store_true", help="all in this process, which takes less time")
    parser.add_argument("--shared", action="store_true", help="--here, each model prepared once where possible")
    parser.add_argument("--parts", action="store_true", help="measure and show every part's time in training")
    parser.add_argument("--json", help="write everything measured here")
    parser.add_argument("--read", help="show results that --json wrote, instead of measuring")
    parser.add_argument("--output", help="write a markdown result here")
    parser.add_argument("--plot", help="draw predicted against measured here, as SVG")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.job:
        configuration = Configuration(**json.loads(given.job))
        print("RESULT " + json.dumps(Subject(configuration).measure(configuration, parts=given.parts)), flush=True)
        return 0
    try:
        wanted = [Configuration.parse(text, given.steps) for text in given.configurations]
    except ValueError as error:
        parser.error(str(error))
    if bool(wanted) == bool(given.read):
        parser.error("give configurations to measure, or --read FILE")
    results: list[dict[str, Any]] = json.loads(Path(given.read).read_text(encoding="utf-8")) if given.read else []
    recorder = Recorder(describe, given.json)
    here = Here(shared=given.shared, parts=given.parts) if given.here or given.shared else None
    for configuration in wanted:
        recorder.keep(
            here.run(configuration) if here is not None else run_child(configuration, given.timeout, parts=given.parts)
        )
    results += recorder.found
    _report(given, results)
    return int(any("error" in each for each in results))


def _report(given: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    print(common.table(HEADER, [describe(each) for each in results]))
    print("\n".join(summary(results)))
    if given.parts:
        for result in results:
            print("", result["configuration"], parts_table(result.get("parts", {})), sep="\n")
    if given.plot:
        plot(results, given.plot)
    if given.output:
        rows = tuple(describe(each) for each in results)
        used = {each["configuration"].partition(":")[0] for each in results}
        notes = (*summary(results), *(f"{name}: {what}" for name, what in MODELS.items() if name in used))
        title = "Predicted against measured"
        common.Result(title, "bench.accuracy", common.default_device(), HEADER, rows, notes).write(given.output)


if __name__ == "__main__":
    sys.exit(main())
