"""``prepare``: take a model's parameters and its optimizer's states over, so that they need not fit on the device.

Nothing large is allocated here. Parameters are recorded and their storage on the device is empty from now on; the first
call of the compiled model packs them into chunks (see ``managed``), reading each original once and freeing it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from protrain_compile.byte_text import parse_size
from protrain_compile.chunks import ParameterSpec
from protrain_compile.errors import OptionError
from protrain_compile.guards import ManagedParameter
from protrain_compile.host_needs import host_needs
from protrain_compile.joining import join_ranks
from protrain_compile.managed import ManagedModel
from protrain_compile.materialize import materialize
from protrain_compile.optimizer import ManagedOptimizer, manage_optimizer, release_optimizer
from protrain_compile.options import parse_plan
from protrain_compile.packing import Preparation
from protrain_compile.plan import Plan
from protrain_compile.runtime.host_budget import HostBudget
from protrain_compile.update_book import UpdateBook
from protrain_compile.updates.definition import rule_of_group
from protrain_compile.updates.formats import StateFormat

Init = Callable[[nn.Module], None] | str | os.PathLike[str]


def prepare(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    memory_budget: int | str | None = None,
    host_memory_budget: int | str | None = None,
    gradient_accumulation_steps: int = 1,
    gradient_accumulation_dtype: torch.dtype = torch.float32,
    max_grad_norm: float | None = None,
    device: torch.device | str | None = None,
    plan: Plan | str | dict[str, Any] | None = None,
    init: Init | None = None,
    mesh: DeviceMesh | None = None,
) -> tuple[nn.Module, Optimizer]:
    """Take over a model's parameters and its optimizer's states; compile it with backend="protrain" afterwards.

    Args:
        model: On the CPU, on the device, or on ``meta`` (then pass ``init``). Not compiled yet.
        optimizer: ``torch.optim.Adam``, ``AdamW`` or ``SGD`` over its trainable parameters.
        memory_budget: Device bytes, as a number or such as "20GiB"; default: what is free.
        host_memory_budget: Host bytes; default: what the machine and the process's control groups leave.
        gradient_accumulation_steps: The most backwards before a ``step()``.
        gradient_accumulation_dtype: In which the gradients of several backwards add up; ``torch.bfloat16`` saves two
            bytes a parameter of a bf16 model, at the price of precision.
        max_grad_norm: Clip gradients to this norm in ``step()``; ``math.inf`` makes gradients wait for ``step()``
            (to be read or changed) without clipping.
        device: Where the model computes; default: where its parameters are, or the first accelerator if on the CPU.
        plan: A Plan (or its JSON) for residency and policies; default: planned.
        init: For a model on ``meta``: a function that is called with every module that owns such parameters, after its
            own were allocated on the host; or the path of a safetensors file (or a folder of them) to load by name.
        mesh: Where torch.distributed is initialised, the ranks that share the model; default: all of them. Two
            dimensions are hybrid sharding: the model is divided along the second and replicated along the first.

    With several ranks this is a collective call, as are reading a parameter, a gradient or an optimizer state: every
    rank does it, and each gets the whole. All ranks start from rank 0's parameters and buffers, as with DDP.

    Where the first call plans for a CUDA device it may profile the model, which begins PyTorch's peak statistics anew:
    ``torch.cuda.max_memory_allocated()`` then counts from the first call on.

    A model that was prepared and has not run yet (its first call was refused with a BudgetError, say) is prepared
    anew, with this or another optimizer over its parameters.

    Returns:
        The same model and the same optimizer object.

    Raises:
        OptionError: If an argument cannot be used; nothing is changed then (but what was prepared before is handed back
            where ``model`` or ``mesh`` is at fault). The message names the argument.
        HostMemoryError: If host memory will not suffice; nothing is changed then. The message names what is needed and
            what is available.
        RankError: If ranks differ in their models or arguments; the message shows the first difference.
    """
    _check_kinds(model, init)
    preparation = Preparation(
        device=_device(model, device),
        memory_budget=None if memory_budget is None else parse_size(memory_budget, "memory_budget"),
        host_budget=HostBudget.parse(host_memory_budget),
        micro_batches=_positive("gradient_accumulation_steps", gradient_accumulation_steps),
        max_grad_norm=_norm(max_grad_norm),
        plan=None if plan is None else parse_plan(plan),
        accumulation_dtype=_accumulation_dtype(model, gradient_accumulation_dtype),
    )
    _hand_back(model, optimizer)
    _check_arguments(model, optimizer)
    ranks = join_ranks(model, optimizer, preparation, mesh)
    preparation = dataclasses.replace(preparation, ranks=ranks)
    named = list(model.named_parameters())
    book = UpdateBook(optimizer, _groups(named, optimizer), [parameter.dtype for _, parameter in named])
    _require_host_memory(named, preparation, book)
    materialize(model, init)
    if ranks is not None:
        ranks.from_first([*model.named_parameters(), *model.named_buffers()])
    for index, (_, parameter) in enumerate(named):
        book.give(index, optimizer.state.get(parameter, {}), None)
    _move_buffers(model, preparation.device)
    managed = ManagedModel(named, book, preparation)
    manage_optimizer(optimizer, managed, {id(parameter): index for index, (_, parameter) in enumerate(named)})
    _watch_state_dicts(model)
    return model, optimizer


def _hand_back(model: nn.Module, optimizer: Optimizer) -> None:
    """Undo an earlier ``prepare`` of a model that has not run: parameters and optimizer are as they were.

    Raises:
        OptionError: If another optimizer that is given now cannot be used; nothing is undone then.
    """
    parameters = list(model.parameters())
    homes = {p._home for p in parameters if isinstance(p, ManagedParameter)}
    managed = homes.pop() if len(homes) == 1 else None
    if isinstance(managed, ManagedModel) and managed.layout is None and len(managed.specs) == len(parameters):
        if optimizer is not managed.book.optimizer:
            _check_not_prepared(optimizer)
            _check_optimizer(model, optimizer)
        release_optimizer(managed)
        managed.hand_back()


def _check_kinds(model: Any, init: Any) -> None:
    if not isinstance(model, nn.Module):
        raise OptionError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not (init is None or callable(init) or isinstance(init, str | os.PathLike)):
        raise OptionError(f"init={init!r}: give a function of a module, or the path of safetensors")


def _check_arguments(model: nn.Module, optimizer: Optimizer) -> None:
    if hasattr(model, "_orig_mod"):
        raise OptionError(
            "model is compiled already: call prepare first, then torch.compile (what was compiled is model._orig_mod)"
        )
    _check_not_prepared(optimizer, *model.parameters())
    _check_optimizer(model, optimizer)
    _check_model(model)


def _check_not_prepared(*held: Any) -> None:
    if any(isinstance(each, ManagedOptimizer | ManagedParameter) for each in held):
        raise OptionError(
            "model or optimizer is prepared already, and the model has run (or the optimizer is another model's): "
            "call prepare once"
        )


def _check_optimizer(model: nn.Module, optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise OptionError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    for group in optimizer.param_groups:
        rule_of_group(type(optimizer), group)
    own = {id(parameter) for parameter in model.parameters()}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not held <= own:
        raise OptionError("optimizer holds parameters that are not the model's; give each model its own optimizer")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in held:
            raise OptionError(
                f"optimizer lacks {name}, which requires a gradient: add it to a param group, or freeze it"
            )


def _check_model(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        _check_parameter(name, parameter)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise OptionError(f"model: {name} has sparse=True, whose gradients have no chunk; pass sparse=False")
    _check_memory(model)


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if type(parameter) is not nn.Parameter:
        raise OptionError(f"model: {name} is a {type(parameter).__name__}; only plain Parameters lie in chunks")
    if parameter.grad is not None:
        raise OptionError(f"model: {name} has a gradient already; call optimizer.zero_grad() before prepare")
    if parameter._backward_hooks:
        raise OptionError(
            f"model: {name} has a gradient hook (register_hook), which would see no gradient; use "
            "register_post_accumulate_grad_hook"
        )
    if parameter.requires_grad:
        try:
            StateFormat.of(parameter.dtype)
        except ValueError as error:
            raise OptionError(f"model: {name}: {error}") from error


def _check_memory(model: nn.Module) -> None:
    """Refuse Parameters that are tied by their memory: each would get a place of its own."""
    reached: tuple[int, str] = (0, "")
    ranges = sorted(
        (p.data_ptr(), name, p.nbytes) for name, p in model.named_parameters() if p.nbytes and not p.is_meta
    )
    for begin, name, size in ranges:
        if begin < reached[0]:
            raise OptionError(
                f"model: {reached[1]} and {name} are two Parameters in one piece of memory; let both names hold one "
                "Parameter"
            )
        reached = max(reached, (begin + size, name))


def _device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        chosen = _parsed_device(device)
    else:
        found = {parameter.device for parameter in model.parameters()} - {torch.device("meta")}
        if len(found) > 1:
            names = ", ".join(sorted(map(str, found)))
            raise OptionError(f"device: the model's parameters are on {names}; pass the device to compute on")
        chosen = found.pop() if found else torch.device("cpu")
        if chosen.type == "cpu" and torch.cuda.is_available():
            chosen = torch.device("cuda")
    if chosen.type not in ("cpu", "cuda"):
        raise OptionError(f"device={str(chosen)!r}: choose a CUDA device or the CPU")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"device={str(chosen)!r}: no CUDA device is available; choose 'cpu'")
    if chosen == torch.device("cuda"):
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def _parsed_device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"device={device!r}: {error}") from error


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name}={value!r}: give a whole number of at least 1")
    return int(value)


def _norm(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not value > 0:
        raise OptionError(f"max_grad_norm={value!r}: give a positive number, math.inf, or None")
    return float(value)


def _accumulation_dtype(model: nn.Module, dtype: Any) -> torch.dtype:
    if dtype == torch.float32:
        return torch.float32
    if dtype != torch.bfloat16:
        raise OptionError(f"gradient_accumulation_dtype={dtype!r}: choose torch.float32 or torch.bfloat16")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise OptionError(
                f"gradient_accumulation_dtype=torch.bfloat16: {name} is float16; leave it out, so that gradients "
                "add up in float32"
            )
    return torch.bfloat16


def _require_host_memory(named: list[tuple[str, nn.Parameter]], preparation: Preparation, book: UpdateBook) -> None:
    specs = [ParameterSpec.of(name, parameter) for name, parameter in named]
    unloaded = sum(parameter.nbytes for _, parameter in named if parameter.is_meta)
    preparation.host_budget.require(host_needs(specs, preparation, book, unloaded), "the prepared model")


def _groups(named: list[tuple[str, nn.Parameter]], optimizer: Optimizer) -> list[int | None]:
    number_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return [number_of[id(p)] if p.requires_grad else None for _, p in named]


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers, all or (if an error is raised) none; one that several modules share stays shared."""
    moved = {id(buffer): buffer.to(device) for buffer in model.buffers()}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved[id(buffer)]


def _watch_state_dicts(model: nn.Module) -> None:
    """Make state dicts hold plain host tensors; refuse ``load_state_dict(assign=True)``."""
    for module in model.modules():
        if _before_state_dict in module._state_dict_pre_hooks.values():
            continue  # it was prepared before
        module.register_state_dict_pre_hook(_before_state_dict)  # type: ignore[no-untyped-call]
        module.register_state_dict_post_hook(_after_state_dict)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_refuse_assign)  # type: ignore[no-untyped-call]


def _managers(module: nn.Module) -> set[ManagedModel]:
    # None for a copy of a prepared module, which has the hooks but ordinary parameters.
    homes = {p._home for p in module._parameters.values() if isinstance(p, ManagedParameter)}
    return {home for home in homes if isinstance(home, ManagedModel)}


def _before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    for managed in _managers(module):
        managed.snapshot_depth += 1


def _after_state_dict(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    for managed in _managers(module):
        managed.snapshot_depth -= 1


def _refuse_assign(module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
    if metadata.get("assign_to_params_buffers") and _managers(module):
        raise OptionError("load_state_dict: assign=True would replace managed parameters; leave it out")
