"""Joining: where ``torch.distributed`` is initialised, ``prepare`` makes sure that all ranks share one model."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from protrain_compile.errors import OptionError
from protrain_compile.packing import Preparation
from protrain_compile.runtime.ranks import Ranks


def join_ranks(
    model: nn.Module, optimizer: Optimizer, preparation: Preparation, mesh: DeviceMesh | None
) -> Ranks | None:
    """Return the ranks that share ``model``; None without a process group, or with one rank. A collective call.

    Raises:
        OptionError: If ``mesh`` cannot be used.
        RankError: If ranks differ in what they gave to ``prepare``.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if mesh is not None:
            raise OptionError("mesh: torch.distributed is not initialised; start with torchrun, or leave it out")
        return None
    if dist.get_world_size() == 1:
        return None
    ranks = Ranks(preparation.device, mesh)
    ranks.agree(list(_lines(model, optimizer, preparation)), "what they gave to prepare")
    return ranks


def _lines(model: nn.Module, optimizer: Optimizer, preparation: Preparation) -> Iterator[str]:
    yield f"optimizer {type(optimizer).__name__} with {len(optimizer.param_groups)} param groups"
    yield f"gradient_accumulation_steps={preparation.micro_batches}"
    yield f"max_grad_norm={preparation.max_grad_norm}"
    yield f"device={preparation.device.type}"
    for name, parameter in model.named_parameters():
        trained = "trainable" if parameter.requires_grad else "frozen"
        yield f"{name}: {tuple(parameter.shape)} {parameter.dtype} {trained}"
    for name, buffer in model.named_buffers():
        yield f"{name}: {tuple(buffer.shape)} {buffer.dtype} buffer"
