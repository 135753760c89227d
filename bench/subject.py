"""Models that are trained under a cap of the device's memory, and what is measured and predicted of a step.

A ``Subject`` is a prepared model; a ``Run`` is a subject compiled for one ``Configuration``, whose plan can be changed.
Their libraries are imported when they are used: reading results needs none of them.
"""

from __future__ import annotations

import dataclasses
import gc
import re
import time
from typing import Any

import torch
from torch import nn

from bench import common
from bench.part_times import part_times
from bench.states import SIZES, fill

SEQUENCE = 1024
WARMUP = 1
"""Steps after the first of a plan, before those that are timed."""
PATTERN = re.compile(
    r"(\w+):(\d+):(\d+(?:\.\d+)?)(\+clip)?(?:=([a-z_]+(?:(?:\*\d+)?,[a-z_]+)*(?:\*\d+)?))?(?:@(?:p(\d+))?,?(?:b(\d+))?)?"
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

    def measure(self, configuration: Configuration, *, parts: bool) -> dict[str, Any]:
        """Train under the cap; return what was measured and predicted, of every part as well if wanted."""
        return Run(self, configuration).measure(str(configuration), parts=parts)

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
        if self.on_gpu:  # the first run of a kernel may try variants on copies of its arguments
            torch.cuda.reset_peak_memory_stats()
        self.schedule = protrain.schedule(compiled)
        self.part = self.schedule.parts[0]
        planned = self.part.graph.planned(self.part.schedule)
        self.other_bytes = planned.budget.other_bytes if planned is not None else 0

    def measure(self, name: str, *, parts: bool = False) -> dict[str, Any]:
        """Return what was measured and predicted of the plan in use, of every part as well if wanted."""
        seconds = self.step.measure()
        found = {
            "configuration": name,
            "step_ms": seconds * 1e3,
            "tokens_s": self.configuration.batch * SEQUENCE / seconds,
            "peak_bytes": torch.cuda.max_memory_allocated() if self.on_gpu else 0,
            "reserved_bytes": torch.cuda.max_memory_reserved() if self.on_gpu else 0,
            "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0) if self.on_gpu else 0,
        }
        times, peaks = part_times(self.step) if self.on_gpu and parts else ({}, [])
        spent = {"train_s": time.perf_counter() - self.begun}
        predicted = _predict(self.part.schedule, *self.shape_and_plan(), times)
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
        outputs = self.compiled(input_ids=tokens, labels=tokens)
        outputs.loss.backward()  # the logits are held until it is over, as plans assume
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measure(self) -> float:
        """Return the seconds of a step, the mean over the timed ones."""
        for _ in range(WARMUP):
            self()
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(self.configuration.steps):
            self()
        synchronize(self.device)
        return (time.perf_counter() - start) / self.configuration.steps


def synchronize(device: str) -> None:
    """Wait for a GPU."""
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


def fresh() -> None:
    """Forget what was compiled."""
    torch._dynamo.reset()
    gc.collect()
