"""A view or cast of a parameter passes from no segment to another: its chunk may have left the buffer."""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import nn
from torch.nn import functional as F

import protrain_compile as protrain
from protrain_compile.backend import protrain as backend


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, mixer: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x @ mixer)))


class SharedView(nn.Module):
    """Every block multiplies by one transposed parameter, transposed once before the first block."""

    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.mixer = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixer = self.mixer.t()
        for block in self.blocks:
            x = block(x, mixer)
        return x.square().mean()


def test_segments_make_parameter_views_themselves() -> None:
    model = SharedView()
    compiled = torch.compile(model, backend=backend, options={"compile": "eager", "schedule": "off"})
    compiled(torch.randn(3, 16)).backward()
    program = protrain.schedule(compiled).parts[0].graph.program
    parameters = {node for node, source in zip(program.primals, program.inputs, strict=True) if source.trainable}
    assert len(program.block_names) == 4
    for segment in program.segments:
        crossing = [node for node in segment.inputs if node.op != "placeholder"]
        assert not any(parameters.issuperset(node.all_input_nodes) for node in crossing if node.all_input_nodes)
        if segment.stage.kind == "block":
            assert "parameter" in [
                role
                for node, role in zip(segment.inputs, segment.input_roles, strict=True)
                if node.meta["val"].shape == (16, 16)
            ]


def test_a_shared_view_is_right_while_its_chunk_comes_and_goes() -> None:
    torch.manual_seed(0)
    model = SharedView()
    reference = copy.deepcopy(model)
    plan = dataclasses.replace(protrain.Plan.uniform("recompute", "offloaded"), chunk_bytes=4096, buffers=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = protrain.prepare(model, optimizer, plan=plan, device="cpu")
    compiled = torch.compile(model, backend=backend, options={"compile": "eager", "schedule": "off"})
    for _ in range(4):
        x = torch.randn(3, 16)
        for loss, stepped in ((compiled(x), optimizer), (reference(x), expected)):
            loss.backward()
            stepped.step()
            stepped.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-5, atol=1e-6)
