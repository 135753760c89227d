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
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench import common
from bench.part_times import part_times, parts_table
from bench.states import SIZES, fill

SEQUENCE = 1024
WARMUP = 2
PATTERN = re.compile(
    r"(\w+):(\d+):(\d+(?:\.\d+)?)(\+clip)?(?:=([a-z_]+(?:(?:\*\d+)?,[a-z_]+)*(?:\*\d+)?))?(?:@(?:p(\d+))?,?(?:b(\d+))?)?"
)
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


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What one process measures.

    Attributes:
        model: Name of a model (see ``make_model``).
        batch: Sequences a step.
        cap_gib: Device memory that may be used.
        clip: Whether gradients are clipped.
        policies: Policies by hand, as in ``swap*3,keep*4``; one name alone is every block's. None for searched ones.
        persistent: How many chunks are persistent; None for the search's residency.
        buffers: How many chunk buffers; None for the search's.
        steps: Timed steps.
    """

    model: str
    batch: int
    cap_gib: float
    clip: bool = False
    policies: str | None = None
    persistent: int | None = None
    buffers: int | None = None
    steps: int = 6

    @classmethod
    def parse(cls, text: str, steps: int = 6) -> Configuration:
        """Return the configuration that ``text`` stands for.

        Raises:
            ValueError: If it stands for none.
        """
        match = PATTERN.fullmatch(text)
        if match is None or match[1] not in MODELS or text.endswith(("@", ",")):
            raise ValueError(
                f"{text!r} is not MODEL:BATCH:CAP[+clip][=POLICY[*N],...][@pN,bN] with one of the models "
                f"{', '.join(MODELS)}"
            )
        persistent, buffers = (int(each) if each else None for each in match.group(6, 7))
        return cls(match[1], int(match[2]), float(match[3]), bool(match[4]), match[5], persistent, buffers, steps)

    def __str__(self) -> str:
        """Return the text that stands for it."""
        policies = f"={self.policies}" if self.policies else ""
        counts = (("p", self.persistent), ("b", self.buffers))
        by_hand = ",".join(f"{letter}{count}" for letter, count in counts if count is not None)
        start = f"{self.model}:{self.batch}:{self.cap_gib:g}{'+clip' if self.clip else ''}"
        return start + policies + (f"@{by_hand}" if by_hand else "")

    @property
    def prepared_like(self) -> tuple[Any, ...]:
        """What configurations must share to be measured on one prepared model."""
        return self.model, self.clip, self.persistent


MODELS = {
    "llama": "Llama 3.43B: 26 blocks of width 3200",
    "gpt2": "GPT-2 1.5B: 48 blocks of width 1600, tied head",
    "mistral": "Mistral-shaped, 14 blocks of width 4096, 8 key/value heads",
    "tiny": "Llama-shaped, 4 blocks of width 64, for trying this program out",
}


def make_model(name: str) -> Any:
    """Return a Hugging Face model of random structure-true weights on the meta device."""
    import transformers

    if name == "gpt2":
        sizes = {"n_embd": 1600, "n_layer": 48, "n_head": 25}
        dropouts = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        config: Any = transformers.GPT2Config(use_cache=False, **sizes, **dropouts)
        kind: Any = transformers.GPT2LMHeadModel
    elif name == "mistral":
        sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 14}
        config = transformers.MistralConfig(vocab_size=32000, use_cache=False, sliding_window=None, **sizes)
        kind = transformers.MistralForCausalLM
    else:
        size = SIZES["tiny" if name == "tiny" else "3b"]
        config = transformers.LlamaConfig(vocab_size=32000, max_position_embeddings=4096, use_cache=False, **size)
        kind = transformers.LlamaForCausalLM
    with torch.device("meta"):
        model = kind(config).to(torch.bfloat16).train()
    model.loss_type = "ForCausalLM"  # else GPT-2's choice of the loss logs, which breaks the graph
    return model


def hand_plan(configuration: Configuration, model: nn.Module) -> Any:
    """Return the plan by hand, the search filling its gaps; None where all is searched."""
    import protrain_compile as protrain

    residency = None
    if configuration.persistent is not None:
        offloaded = count_chunks(model) - configuration.persistent
        residency = ("persistent",) * configuration.persistent + ("offloaded",) * offloaded
    rest: Any = {"residency": residency, "buffers": configuration.buffers}
    groups = [group.partition("*") for group in (configuration.policies or "").split(",") if group]
    if len(groups) == 1 and not groups[0][2]:
        return protrain.Plan(uniform_policy=groups[0][0], **rest)
    policies = tuple(name for name, _, count in groups for _ in range(int(count or 1)))
    plan = protrain.Plan(policies=policies or None, **rest)
    return None if plan == protrain.Plan() else plan


def count_chunks(model: nn.Module) -> int:
    """Return how many chunks packing makes of a model whose blocks are numbered in its parameters' names."""
    from passes.pack_chunks import pack_chunks
    from protrain_compile.chunks import ParameterSpec

    specs, uses = [], dict[int, list[int]]()
    for index, (name, parameter) in enumerate(model.named_parameters()):
        specs.append(ParameterSpec(name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad))
        block = re.search(r"\.(?:h|layers)\.(\d+)\.", name)
        embeds = re.search(r"embed|wte|wpe", name) is not None
        uses.setdefault(int(block[1]) if block else (-1 if embeds else 10**6), []).append(index)
    return len(pack_chunks(specs, [uses[key] for key in sorted(uses)]).chunks)


class Subject:
    """A prepared model, whose chunks lie where the first configuration's plan puts them."""

    def __init__(self, configuration: Configuration) -> None:
        import protrain_compile as protrain

        self.name, self.prepared_like = configuration.model, configuration.prepared_like
        self.device = common.default_device()
        limit_memory(configuration)
        model = make_model(configuration.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        clip = 1.0 if configuration.clip else None
        self.model, self.optimizer = protrain.prepare(
            model, optimizer, device=self.device, init=fill, max_grad_norm=clip
        )
        self.managed: Any = self.optimizer._managed  # type: ignore[attr-defined]

    def measure(self, configuration: Configuration) -> dict[str, Any]:
        """Train under the cap; return what was measured and predicted."""
        return Run(self, configuration).measure(str(configuration))

    def close(self) -> None:
        """Give back what the chunks hold."""
        self.managed.close()


class Run:
    """A subject compiled for one configuration, and planned.

    Args:
        subject: The prepared model.
        configuration: What to run; its cap limits this process.
        budget_gib: The planner's budget; None for the cap.
    """

    def __init__(self, subject: Subject, configuration: Configuration, budget_gib: float | None = None) -> None:
        import protrain_compile as protrain
        from protrain_compile.backend import protrain as backend

        self.subject, self.configuration, self.begun = subject, configuration, time.perf_counter()
        self.on_gpu = subject.device.startswith("cuda")
        options = {
            "schedule": "off",
            "plan": hand_plan(configuration, subject.model),
            "memory_budget": limit_memory(configuration) if budget_gib is None else int(budget_gib * 2**30),
        }
        given = {name: value for name, value in options.items() if value is not None}
        compiled: Any = torch.compile(subject.model, backend=backend, options=given)
        self.step = Step(configuration, compiled, subject.optimizer, subject.device)
        self.step()
        self.schedule = protrain.schedule(compiled)
        self.part = self.schedule.parts[0]
        planned = self.part.graph.planned(self.part.schedule)
        self.other_bytes = planned.budget.other_bytes if planned is not None else 0

    def measure(self, name: str) -> dict[str, Any]:
        """Return what was measured and predicted of the plan in use."""
        seconds = self.step.measure()
        found = {
            "configuration": name,
            "step_ms": seconds * 1e3,
            "tokens_s": self.configuration.batch * SEQUENCE / seconds,
            "peak_bytes": torch.cuda.max_memory_allocated() if self.on_gpu else 0,
            "reserved_bytes": torch.cuda.max_memory_reserved() if self.on_gpu else 0,
            "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) if self.on_gpu else 0,
        }
        parts, peaks = part_times(self.step) if self.on_gpu else ({}, [])
        spent = {"train_s": time.perf_counter() - self.begun}
        predicted = _predict(self.part.schedule, *self.shape_and_plan(), parts)
        return {**found, "other_bytes": self.other_bytes, "peaks": peaks, **spent, **predicted}

    def shape_and_plan(self) -> tuple[Any, Any]:
        """Return the StepShape of what runs, and its plan in full."""
        from protrain_compile.packing import training_of
        from protrain_compile.shape_reader import step_shape

        schedule, managed = self.part.schedule, self.subject.managed
        chunks = schedule.chunks
        places = {i: chunks.layout.chunks[c].slots[slot].parameter for i, (c, slot) in chunks.place_of.items()}
        training = training_of(chunks.layout, places, managed.specs, managed.preparation, managed.book)
        residency, buffers = chunks.residency, chunks.buffers
        plan = dataclasses.replace(schedule.plan, residency=residency, uniform_residency=None, buffers=buffers)
        return step_shape(schedule.program, training, plan.loss), plan

    def use(self, plan: Any) -> None:
        """Go on with another plan of the same chunks, under the same cap."""
        self.begun = time.perf_counter()
        self.schedule.use(plan)
        limit_memory(self.configuration)


def limit_memory(configuration: Configuration) -> int:
    """Let this process use no more of the device than the cap; return it in bytes."""
    cap = int(configuration.cap_gib * 2**30)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / torch.cuda.mem_get_info()[1]))
        torch.cuda.reset_peak_memory_stats()
    return cap


class Step:
    """One step of training on random tokens."""

    def __init__(self, configuration: Configuration, compiled: Any, optimizer: Any, device: str) -> None:
        self.configuration, self.compiled, self.optimizer, self.device = configuration, compiled, optimizer, device
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self) -> None:
        """Run it."""
        size = (self.configuration.batch, SEQUENCE)
        tokens = torch.randint(0, 32000, size, generator=self.generator).to(self.device)
        self.compiled(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measure(self) -> float:
        """Return the seconds of a step, the mean over the timed ones."""
        for _ in range(WARMUP):
            self()
        _synchronize(self.device)
        start = time.perf_counter()
        for _ in range(self.configuration.steps):
            self()
        _synchronize(self.device)
        return (time.perf_counter() - start) / self.configuration.steps


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _predict(schedule: Any, shape: Any, plan: Any, parts: dict[str, Any]) -> dict[str, Any]:
    from protrain_compile.cost_model import simulate
    from protrain_compile.profiler.measure import profile_program
    from protrain_compile.report.plan_table import policies_text

    profile = profile_program(schedule.program, schedule.artefacts)
    prediction = dataclasses.asdict(dataclasses.replace(simulate(shape, profile, plan), operations=()))
    for template, costs in zip(schedule.program.templates, profile.templates, strict=True):
        for role, cost in costs.parts.items():
            if f"{template.name}_{role}" in parts:
                parts[f"{template.name}_{role}"]["profiled_ms"] = cost.ms
    residency = plan.residency
    short = {
        "persistent": residency.count("persistent"),
        "split": residency.count("split"),
        "chunks": len(residency),
        "buffers": plan.buffers,
        "policies": policies_text(plan.policies),
        "loss": plan.loss,
    }
    whole = {"whole_plan": plan.to_json(), "shape": shape.to_json(), "profile": profile.to_json(), "parts": parts}
    return {"prediction": prediction, "plan": short, **whole}


def run_child(configuration: Configuration, timeout_s: float) -> dict[str, Any]:
    """Measure in a child process; a failed one says why in ``error``."""
    fields = json.dumps(dataclasses.asdict(configuration))
    command = [sys.executable, "-m", "bench.accuracy", "--job", fields]
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
    """

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared
        self.subject: Subject | None = None

    def run(self, configuration: Configuration) -> dict[str, Any]:
        """Measure; a failed one says why in ``error``."""
        try:
            if self.subject is not None and self.subject.prepared_like != configuration.prepared_like:
                self.close()
            if self.subject is None:
                self.subject = Subject(configuration)
            return self.subject.measure(configuration)
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


def fresh() -> None:
    """Forget what was compiled."""
    torch._dynamo.reset()
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
    parser.add_argument("--parts", action="store_true", help="show every part's time in training")
    parser.add_argument("--json", help="write everything measured here")
    parser.add_argument("--read", help="show results that --json wrote, instead of measuring")
    parser.add_argument("--output", help="write a markdown result here")
    parser.add_argument("--plot", help="draw predicted against measured here, as SVG")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.job:
        configuration = Configuration(**json.loads(given.job))
        print("RESULT " + json.dumps(Subject(configuration).measure(configuration)), flush=True)
        return 0
    try:
        wanted = [Configuration.parse(text, given.steps) for text in given.configurations]
    except ValueError as error:
        parser.error(str(error))
    if bool(wanted) == bool(given.read):
        parser.error("give configurations to measure, or --read FILE")
    results: list[dict[str, Any]] = json.loads(Path(given.read).read_text(encoding="utf-8")) if given.read else []
    here = Here(shared=given.shared) if given.here or given.shared else None
    for configuration in wanted:
        results.append(here.run(configuration) if here is not None else run_child(configuration, given.timeout))
        print("  ".join(describe(results[-1])), *results[-1].get("error", ()), sep="\n  ", flush=True)
        if given.json:
            Path(given.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
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
