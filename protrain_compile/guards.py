"""Guards: the doors through which eager code meets parameters and gradients (those of the step: ``update_guard``).

``ManagedParameter`` is what ``prepare`` makes of a Parameter. Its own storage is empty; the value lies in its *home*
(see ``homes``, ``managed``)::

    read      gathers a fresh copy, runs the function on it
    write     every gathered copy that the function changed goes back to its home
    view      becomes a ManagedAlias, which replays the view on a fresh copy at every access: writes through it arrive
    gradient  a result that would record a gradient raises: it would be lost

While Dynamo traces, a ManagedParameter is an ordinary Parameter.

Some functions of PyTorch ask no subclass and see the empty storage: ``torch.tensor(p)``, ``torch.as_tensor(p, dtype)``,
``torch.Tensor(p)``, ``other.data = p.data``, ``torch.func.vmap`` and ``grad`` of ``p``. Give them ``p.clone()``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext

from protrain_compile.errors import DoorError
from protrain_compile.homes import Home, ViewHome, read

VALUE_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Properties that read values; the others (but ``data``, handled apart) read metadata."""

PLAIN_METHODS = frozenset(
    (
        "size",
        "dim",
        "ndimension",
        "stride",
        "numel",
        "nelement",
        "element_size",
        "storage_offset",
        "get_device",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_inference",
        "_is_view",
        "is_same_size",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "has_names",
        "is_tensor",
        "is_storage",
        "__hash__",
        "__len__",
    )
)
"""Methods that read metadata only."""

ADDRESSES = frozenset(["data_ptr", "untyped_storage", "storage", "_typed_storage", "share_memory_", "set_", "resize_"])
"""Methods for which a value without a memory of its own has no answer."""


class ManagedParameter(nn.Parameter):
    """A Parameter whose value lies in a chunk; see the module docstring."""

    _home: Home
    _index: int

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let tracing through; serve eager access from the parameter's home."""
        if torch.compiler.is_dynamo_compiling():
            # Being traced. Inside torch.nn.functional Dynamo asks for overrides again, whatever is disabled: hand it
            # plain tensors.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*_as_plain(args), **_as_plain(kwargs or {}))
        if torch.compiler.is_compiling() or TracingContext.try_get() is not None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _eager_access(func, args, dict(kwargs or {}))

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient that waits for ``step()``, or None.

        Raises:
            DoorError: If it was used up in the backward already; the message names the argument to pass.
        """
        if torch.compiler.is_compiling() or TracingContext.try_get() is not None:
            return None
        return self._home.gradient(self._index)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._home.set_gradient(self._index, value)

    @grad.deleter
    def grad(self) -> None:
        self._home.set_gradient(self._index, None)

    def as_subclass(self, cls: type[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        """Return the value as a ``cls``: a copy (PyTorch asks nobody and would give the empty storage)."""
        return read(self).as_subclass(cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return an ordinary Parameter with the value."""
        copied = nn.Parameter(self._home.read(self._index), requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary Parameter with the value."""
        plain = nn.Parameter(self._home.read(self._index), requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        """Return name, shape and type, without fetching the value."""
        return f"ManagedParameter({self._home.name_of(self._index)}, shape={tuple(self.shape)}, dtype={self.dtype})"


class ManagedAlias(torch.Tensor):
    """A detached alias or view of a ManagedParameter, as ``p.data``, ``p.detach()`` and ``p[0]`` give."""

    _home: Home
    _index: int

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Serve eager access from the parameter's home."""
        return _eager_access(func, args, dict(kwargs or {}))

    def as_subclass(self, cls: type[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        """Return the value as a ``cls``: a copy."""
        return read(self).as_subclass(cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return an ordinary tensor with the value."""
        copied = self._home.read(self._index)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary tensor with the value."""
        return self._home.read(self._index).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        """Return what an ordinary tensor with the value prints."""
        return repr(self._home.read(self._index))


Managed = ManagedParameter | ManagedAlias


def _as_plain(value: Any) -> Any:
    """Return ``value`` with managed parameters as plain tensors, aliases of them."""
    if isinstance(value, ManagedParameter):
        return torch.ops.aten.alias.default(value)
    if isinstance(value, list | tuple):
        return type(value)(_as_plain(each) for each in value)
    if isinstance(value, dict):
        return {key: _as_plain(each) for key, each in value.items()}
    return value


def manage(parameter: nn.Parameter, home: Home, index: int) -> None:
    """Turn ``parameter`` into a ManagedParameter in place; the caller has emptied its storage."""
    parameter.__class__ = ManagedParameter
    assert isinstance(parameter, ManagedParameter)
    parameter._home = home
    parameter._index = index


def release(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Turn a ManagedParameter back into a plain one with ``value``; the inverse of ``manage``."""
    parameter.__class__ = nn.Parameter
    del parameter._home, parameter._index  # type: ignore[attr-defined]
    parameter.data = value


def _eager_access(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    first = args[0] if args else None
    if name in ("__get__", "__set__", "__delete__"):
        return _property_access(func, name, args)
    if name in PLAIN_METHODS:
        return _plain(func, args, kwargs)
    if func in (torch.autograd.grad, torch.autograd.backward):
        raise DoorError(
            f"torch.autograd.{name} for prepared parameters: their gradients go to their chunks, not through "
            "autograd; call loss.backward() without inputs=, and pass max_grad_norm (math.inf) to prepare to read "
            ".grad"
        )
    if isinstance(first, Managed):
        if name == "_has_compatible_shallow_copy_type":
            return True  # Module.to then sets .data, which says what is wrong, instead of making another Parameter
        if name == "detach":
            return _detached(first)
        if name in ("requires_grad_", "detach_"):
            wanted = name == "requires_grad_" and bool([*args[1:], *kwargs.values(), True][0])
            first._home.check_trainable(first._index, wanted)
            return first
        if name == "register_hook":
            raise DoorError(
                f"register_hook on {_name(first)}: its gradient goes to its chunk, not through autograd; use "
                "register_post_accumulate_grad_hook and change .grad there"
            )
        if name in ADDRESSES:
            raise DoorError(f"{name} of {_name(first)}: its value lies in a chunk; clone it for memory of its own")
    return _run(func, name, args, kwargs)


def _property_access(func: Any, kind: str, args: Sequence[Any]) -> Any:
    name = getattr(func.__self__, "__name__", "")
    tensor: Managed = args[0]
    if name == "data" and kind == "__get__":
        return _detached(tensor)
    if name == "data" and kind == "__set__":
        return _set_data(tensor, args[1])
    if name == "requires_grad" and kind == "__set__":
        return tensor._home.check_trainable(tensor._index, bool(args[1]))
    if kind != "__get__" or name not in VALUE_PROPERTIES:
        return _plain(func, args, {})
    return _run(func, name, args, {})


def _plain(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _name(tensor: Managed) -> str:
    return tensor._home.name_of(tensor._index)


def _set_data(tensor: Managed, value: torch.Tensor) -> None:
    if isinstance(value, Managed) and (value._home, value._index) == (tensor._home, tensor._index):
        return
    if value.dtype != tensor.dtype or value.device != tensor.device:
        raise DoorError(
            f"{_name(tensor)} is {tensor.dtype} on {tensor.device} and cannot become {value.dtype} on {value.device}: "
            "convert or move the model (model.to, half, cuda, cpu) before calling prepare, which takes device="
        )
    tensor._home.write(tensor._index, read(value) if isinstance(value, Managed) else value)


def _detached(tensor: Managed) -> torch.Tensor:
    """Return an alias without a gradient, as ``detach`` does in eager; a plain copy while a state dict is made."""
    if tensor._home.snapshots:
        return read(tensor)
    return _alias(torch.Tensor.detach, tensor, tensor._home, tensor._index)


def _alias(shape: Callable[[Any], torch.Tensor], tensor: Managed, home: Home, index: int) -> ManagedAlias:
    """Return an alias that looks like what ``shape`` makes of ``tensor``'s empty storage."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        alias = torch.Tensor._make_subclass(ManagedAlias, shape(tensor), False)
    assert isinstance(alias, ManagedAlias)
    alias._home, alias._index = home, index
    return alias


@dataclasses.dataclass
class _Copy:
    """A gathered copy of a managed tensor, and its version before the call."""

    tensor: Managed
    value: torch.Tensor
    version: int


def _run(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``func`` on gathered copies; write back what it changed; turn views of the copies into aliases."""
    copies: dict[tuple[int, int, bool], _Copy] = {}
    result = func(*_gathered(args, copies), **_gathered(kwargs, copies))
    for copy in copies.values():
        if copy.value._version != copy.version:
            copy.tensor._home.write(copy.tensor._index, copy.value.detach())
    if name in ("numpy", "__array__"):
        result.flags.writeable = False  # a write would not reach the parameter
    return _finished(result, func, name, (args, kwargs), list(copies.values()), ())


def _gathered(value: Any, copies: dict[tuple[int, int, bool], _Copy]) -> Any:
    if isinstance(value, Managed):
        records = torch.is_grad_enabled() and value.requires_grad
        key = (id(value._home), value._index, records)
        if key not in copies:
            copied = read(value).requires_grad_(records)
            copies[key] = _Copy(value, copied, copied._version)
        return copies[key].value
    if isinstance(value, list | tuple):
        items = [_gathered(each, copies) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _gathered(each, copies) for key, each in value.items()}
    return value


def _finished(result: Any, func: Any, name: str, given: Any, copies: list[_Copy], path: tuple[int, ...]) -> Any:
    if isinstance(result, list | tuple) and not hasattr(result, "_fields"):
        return type(result)(_finished(r, func, name, given, copies, (*path, i)) for i, r in enumerate(result))
    if not isinstance(result, torch.Tensor):
        return result
    for copy in copies:
        if result is copy.value:
            return copy.tensor
    recording = next((copy.tensor for copy in copies if copy.value.requires_grad), None)
    if recording is not None and result.requires_grad:
        raise DoorError(
            f"{name} reads {_name(recording)} outside of the compiled model while gradients are recorded, and its "
            "gradient would be lost: call the model that torch.compile(model, backend='protrain') returned, or read it "
            "under torch.no_grad()"
        )
    for copy in copies:
        if _shares_memory(result, copy.value) and not copy.tensor._home.snapshots:
            return _view(copy.tensor, result, func, given, path)
    return result


def _shares_memory(result: torch.Tensor, value: torch.Tensor) -> bool:
    if result.layout != torch.strided or value.layout != torch.strided:
        return False
    return bool(result.untyped_storage()._cdata == value.untyped_storage()._cdata)


def _view(tensor: Managed, result: torch.Tensor, func: Any, given: Any, path: tuple[int, ...]) -> ManagedAlias:
    def replay(value: torch.Tensor) -> torch.Tensor:
        args, kwargs = _replaced(given, tensor, value)
        with torch.no_grad():
            found = func(*args, **kwargs)
        for position in path:
            found = found[position]
        assert isinstance(found, torch.Tensor)
        return found

    empty = torch.empty(0, dtype=result.dtype, device=result.device)
    empty.set_(empty.untyped_storage(), 0, result.shape, result.stride())
    empty.untyped_storage().resize_(0)
    return _alias(lambda _: empty, tensor, ViewHome(tensor, replay), 0)


def _replaced(value: Any, tensor: Managed, by: torch.Tensor) -> Any:
    """Return ``value`` with ``tensor`` (and other tensors of its home and index) replaced."""
    if isinstance(value, Managed) and value._home is tensor._home and value._index == tensor._index:
        return by
    if isinstance(value, list | tuple):
        return type(value)(_replaced(each, tensor, by) for each in value)
    if isinstance(value, dict):
        return {key: _replaced(each, tensor, by) for key, each in value.items()}
    return value
