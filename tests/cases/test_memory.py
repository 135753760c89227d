"""Memory of a whole training step: what is alive at every operation is what the schedule's liveness says, in bytes."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from support import light
from support.compare import alternating, compile_model, finer, turns
from support.memory import watching_swaps
from support.models import GPT, Llama, tokens
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

import protrain_compile
from protrain_compile import Plan
from protrain_compile.artefacts import Artefact
from protrain_compile.liveness import schedule_liveness
from protrain_compile.report.model_schedule import Part
from protrain_compile.schedule import operation_of


class Watch:
    """Remembers every storage that an artefact returns, and counts the bytes of those that live."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: Sequence[Tensor]) -> None:
        self.held = {tensor.untyped_storage().data_ptr() for tensor in held}
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.seen: list[int] = []
        call = Artefact.__call__

        def watched(artefact: Artefact, boxed: list[Any], **keywords: Any) -> Sequence[Any]:
            self.seen.append(self.live_bytes())
            results = call(artefact, boxed, **keywords)
            self.remember(results)
            return results

        monkeypatch.setattr(Artefact, "__call__", watched)

    def swaps(self) -> contextlib.AbstractContextManager[None]:
        """Watch the operations on swapped values, too."""
        return watching_swaps(lambda: self.seen.append(self.live_bytes()), self.remember)

    def remember(self, values: Sequence[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage.data_ptr() not in self.held:
                    self.storages[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())

    def live_bytes(self) -> int:
        self.storages = {key: (ref, size) for key, (ref, size) in self.storages.items() if not ref.expired()}
        return sum(size for _, size in self.storages.values())

    def take(self) -> list[int]:
        """Return the bytes alive when the second, third, ... operation began, and now."""
        seen = [*self.seen[1:], self.live_bytes()]
        self.seen.clear()
        return seen


def predicted(part: Part, name: str) -> list[int]:
    found = schedule_liveness(part.schedule)[name]
    nodes = part.schedule.graphs[name].graph.nodes
    return [found.live_bytes[node] - found.held_bytes for node in nodes if operation_of(node) is not None]


def from_the_first_artefact(part: Part) -> list[fx.Node]:
    """Return the operations of the backward from its first artefact on."""
    operations = [node for node in part.schedule.graphs["backward"].graph.nodes if operation_of(node) is not None]
    return list(itertools.dropwhile(lambda node: not isinstance(node.target, Artefact), operations))


class NormedGPT(light.GPT):
    """Its buffers are graph outputs too."""

    def __init__(self) -> None:
        super().__init__(3)
        for block in self.blocks:
            block.norm = nn.BatchNorm1d(17)


MODELS = {
    "gpt": lambda: GPT(3),
    "llama": lambda: Llama(3),
    "dropout": lambda: light.GPT(3, dropout=0.2),
}


@pytest.mark.parametrize("kind", MODELS)
def test_every_operation_of_a_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[kind]()
    compiled = compile_model(model)
    batch = tokens()
    compiled(batch).backward()
    watch = Watch(monkeypatch, [*model.parameters(), *model.buffers(), batch])
    (part,) = protrain_compile.schedule(compiled).parts
    mixed = (alternating(3), turns(3), finer(3))
    for plan in (Plan.uniform(), Plan.uniform("recompute"), Plan.uniform("swap"), *mixed):
        protrain_compile.schedule(compiled).use(plan)
        (part,) = protrain_compile.schedule(compiled).parts
        model.zero_grad()
        gc.collect()
        assert watch.take() == [0]
        with watch.swaps():
            loss = compiled(batch)
        assert watch.take() == predicted(part, "forward")
        # The loss itself stays; the gradients leave the graph and stay too. Neither is given to the backward graph.
        kept_by_caller = loss.untyped_storage().nbytes()
        with watch.swaps():
            loss.backward()
        expected = predicted(part, "backward")
        reloads = len(expected) - len(from_the_first_artefact(part))
        # Until its first artefact has run, the graph holds the tangent, which is as large and which nobody watches.
        assert watch.take() == expected[:reloads] + [size + kept_by_caller for size in expected[reloads:]]
        del loss


def test_nothing_outlives_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = NormedGPT()
    compiled = compile_model(model)
    compiled(tokens()).backward()
    watch = Watch(monkeypatch, [*model.parameters(), *model.buffers()])
    for plan in (Plan.uniform(), Plan.uniform("recompute"), Plan.uniform("swap")):
        protrain_compile.schedule(compiled).use(plan)
        for _ in range(2):
            model.zero_grad()
            loss = compiled(tokens())
            loss.backward()
            del loss
            model.zero_grad()
            gc.collect()
            assert watch.live_bytes() == 0
        loss = compiled(tokens())
        del loss
        gc.collect()
        assert watch.live_bytes() == 0, "an abandoned forward left memory"


def test_recompute_and_swap_keep_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between forward and backward, recompute holds block inputs, and swap nothing, where keep holds everything."""
    model = light.GPT(6)
    compiled = compile_model(model)
    compiled(tokens())
    watch = Watch(monkeypatch, [*model.parameters()])
    alive = {}
    for policy in ("keep", "recompute", "swap"):
        protrain_compile.schedule(compiled).use(Plan.uniform(policy))
        loss = compiled(tokens())
        alive[policy] = watch.take()[-1]
        del loss
    assert alive["swap"] < alive["recompute"] < 0.35 * alive["keep"]


def test_retain_graph_keeps_everything_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    model = light.GPT(3)
    compiled = compile_model(model)
    loss = compiled(tokens())
    loss.backward()
    watch = Watch(monkeypatch, [*model.parameters()])
    loss = compiled(tokens())
    before = watch.live_bytes()
    loss.backward(retain_graph=True)
    model.zero_grad()
    assert watch.live_bytes() == before
    loss.backward()
    model.zero_grad()
    assert watch.live_bytes() == loss.untyped_storage().nbytes()
