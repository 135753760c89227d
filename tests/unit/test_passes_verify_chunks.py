"""Every movement node of a schedule matters: take one away, or write it twice, and the verifier says what is wrong."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import protrain_compile as protrain
from passes.verify_chunks import verify_chunks
from protrain_compile import ops
from protrain_compile.backend import protrain as backend
from protrain_compile.errors import VerifierError
from protrain_compile.schedule import Schedule


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width: int = 8, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    residency = ("persistent", "offloaded", "offloaded", "split", "offloaded", "offloaded")
    plan = protrain.Plan(policies=("recompute", "keep") * 3, residency=residency, buffers=3, chunk_bytes=1024)
    model = Model()
    model, _ = protrain.prepare(model, torch.optim.AdamW(model.parameters()), plan=plan, device="cpu")
    compiled = torch.compile(model, backend=backend, options={"compile": "eager", "schedule": "off"})
    compiled(torch.randn(2, 8))
    return protrain.schedule(compiled).parts[0].schedule


def mutant(schedule: Schedule) -> Schedule:
    return dataclasses.replace(schedule, graphs={name: copy.deepcopy(g) for name, g in schedule.graphs.items()})


def nodes(schedule: Schedule, graph: str, *targets: object) -> list[str]:
    return [node.name for node in schedule.graphs[graph].graph.nodes if node.target in targets]


def find(schedule: Schedule, graph: str, name: str) -> fx.Node:
    return next(node for node in schedule.graphs[graph].graph.nodes if node.name == name)


def test_the_schedule_itself_is_clean_and_moves_chunks(schedule: Schedule) -> None:
    verify_chunks(schedule, "")
    assert len(nodes(schedule, "forward", ops.prefetch)) == 5
    assert len(nodes(schedule, "backward", ops.offload)) == 5
    assert len(nodes(schedule, "backward", ops.update)) == 6


@pytest.mark.parametrize("graph", ["forward", "backward"])
def test_every_missing_prefetch_release_offload_and_update_is_found(schedule: Schedule, graph: str) -> None:
    names = nodes(schedule, graph, ops.prefetch, ops.release, ops.offload, ops.update, ops.collect)
    for name in names:
        broken = mutant(schedule)
        node = find(broken, graph, name)
        node.graph.erase_node(node)
        if node.target is ops.release and not stays_again(schedule, graph, name):
            # Harmless: nothing uses the buffer after this stay in this graph; the next starts from its own contract.
            verify_chunks(broken, "")
            continue
        with pytest.raises(VerifierError, match="chunk"):
            verify_chunks(broken, "")


def stays_again(schedule: Schedule, graph: str, name: str) -> bool:
    """Whether the buffer that ``name`` frees is used again later in its graph."""
    release = find(schedule, graph, name)
    later = False
    for node in schedule.graphs[graph].graph.nodes:
        if later and node.kwargs.get("buffer") == release.kwargs["buffer"]:
            return True
        later = later or node is release
    return False


@pytest.mark.parametrize("graph", ["forward", "backward"])
def test_every_repeated_release_offload_update_and_collect_is_found(schedule: Schedule, graph: str) -> None:
    for name in nodes(schedule, graph, ops.release, ops.offload, ops.update, ops.collect):
        broken = mutant(schedule)
        node = find(broken, graph, name)
        with node.graph.inserting_after(node):
            node.graph.node_copy(node)
        with pytest.raises(VerifierError, match="chunk"):
            verify_chunks(broken, "")


def test_a_prefetch_before_its_buffer_is_free_is_found(schedule: Schedule) -> None:
    broken = mutant(schedule)
    late = find(broken, "forward", nodes(schedule, "forward", ops.prefetch)[-1])
    early = find(broken, "forward", nodes(schedule, "forward", ops.wait)[0])
    same = next(n for n in late.graph.nodes if n.target is ops.wait and n.kwargs["buffer"] == late.kwargs["buffer"])
    (same if same is not early else early).append(late)
    with pytest.raises(VerifierError, match="while chunk"):
        verify_chunks(broken, "")


def test_a_use_after_release_is_found(schedule: Schedule) -> None:
    broken = mutant(schedule)
    release = find(broken, "forward", nodes(schedule, "forward", ops.release)[0])
    wait = next(n for n in release.graph.nodes if n.target is ops.wait and n.kwargs["chunk"] == release.kwargs["chunk"])
    last_view = list(wait.users)[-1]
    last_view.append(release)
    with pytest.raises(VerifierError, match="after its chunk has left"):
        verify_chunks(broken, "")


def test_a_wait_on_another_buffer_is_found(schedule: Schedule) -> None:
    broken = mutant(schedule)
    wait = find(broken, "forward", nodes(schedule, "forward", ops.wait)[0])
    wait.kwargs = {**wait.kwargs, "buffer": 99}
    with pytest.raises(VerifierError, match="nothing brought into buffer 99"):
        verify_chunks(broken, "")
