"""Profiles on disk, one JSON file each, named by everything that they depend on.

The folder is ``$XDG_CACHE_HOME/protrain/profiles``, by default under ``~/.cache``. A file is written under another
name and then renamed, so that a reader sees all of it or nothing. One that cannot be read is measured anew; a folder
that cannot be written is no error.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

import protrain_compile
from protrain_compile import compat, json_data
from protrain_compile.errors import ProfileError
from protrain_compile.options import CompileMode
from protrain_compile.profiler.hardware import device_bytes, device_name
from protrain_compile.program import Template, fake_value
from protrain_compile.row_loop import RowLoop
from protrain_compile.sizes import hint
from protrain_compile.updates.threads import update_threads

log = logging.getLogger("protrain_compile.profiler")

T = TypeVar("T")


def cache_folder() -> Path:
    """Return where profiles are kept; it may not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "protrain" / "profiles"


def cached(
    cls: type[T],
    key: str,
    measure: Callable[[], T],
    *,
    refresh: bool = False,
    worth_keeping: Callable[[T], bool] = lambda _: True,
) -> T:
    """Return the ``cls`` that is kept under ``key``, or else what ``measure`` returns, which is then kept.

    Args:
        cls: A frozen dataclass.
        key: A name for a file, without folder or suffix.
        measure: Makes a new one.
        refresh: Measure even if there is one.
        worth_keeping: Whether what was measured is kept.
    """
    path = cache_folder() / f"{key}.json"
    found = None if refresh else _read(cls, path)
    if found is None:
        found = measure()
        if worth_keeping(found):
            _write(path, json_data.to_json(found))
    return found


def hardware_key(device: torch.device) -> str:
    """Return the key of the HardwareProfile of ``device``, for the host threads that this process updates with."""
    return f"hardware-{_digest([_environment(device), update_threads()])}"


def template_key(template: Template, mode: CompileMode, device: torch.device, *, nodes: bool, launch_us: float) -> str:
    """Return the key of a TemplateProfile.

    Args:
        template: The template; the names of its nodes do not matter.
        mode: How its parts are compiled.
        device: Where it runs.
        nodes: Whether the profile holds its nodes.
        launch_us: The machine's, in which launches are counted.
    """
    settings = compat.inductor_settings() if mode == "inductor" else ""
    assert template.parts is not None
    parts = {role: graph_text(module) for role, module in template.parts.graphs().items()}
    held = sorted(template.parts.held_tangents)
    graph = [template.input_roles, template.num_outputs, parts, held, graph_text(template.joint)]
    return f"template-{_digest([_environment(device), mode, settings, nodes, launch_us, graph])}"


def graph_text(module: fx.GraphModule) -> list[str]:
    """Return a line for every node: operation, arguments, and the size, stride, type and device of its value.

    Nodes are numbered; a symbolic size counts as the number that it was traced with.
    """
    numbers = {node: _Number(i) for i, node in enumerate(module.graph.nodes)}
    lines = []
    for node in module.graph.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)
        target = node.target if node.op != "placeholder" else ""
        lines.append(f"{node.op} {target} {arguments} {_value_text(fake_value(node))} {node.meta.get('recompute')}")
        if node.op == "get_attr":
            held = getattr(module, str(node.target), None)
            lines += graph_text(held) if isinstance(held, fx.GraphModule) else []
        if isinstance(node.target, RowLoop):
            lines += graph_text(node.target.slice_graph)
    return lines


class _Number(int):
    """A node's place in its graph; shown as no other number is."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _value_text(value: Any) -> str:
    if isinstance(value, Tensor):
        sizes, strides = ([hint(n) for n in each] for each in (value.shape, value.stride()))
        return f"{value.dtype} {sizes} {strides} {value.device}"
    if isinstance(value, list | tuple):
        return ", ".join(_value_text(each) for each in value)
    return str(hint(value)) if isinstance(value, torch.SymInt) else str(value)


def _environment(device: torch.device) -> dict[str, Any]:
    """Return what every measurement on ``device`` depends on."""
    cores = len(os.sched_getaffinity(0))
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return {
        "package": protrain_compile.__version__,
        "method": _method(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": str(torch.version.cuda),
        "driver": compat.cuda_driver_version(),
        "device": [device.type, device_name(device), device_bytes(device)],
        "host": [cores, threads],
        "arithmetic": compat.arithmetic_settings(),
    }


@functools.cache
def _method() -> str:
    """Return what tells apart ways to measure: the text of the modules that do it."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))]
    return _digest(texts)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _read(cls: type[T], path: Path) -> T | None:
    try:
        return json_data.from_json(cls, path.read_text(encoding="utf-8"), "profile")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ProfileError) as error:
        log.warning("%s is measured anew: its file %s cannot be used (%s)", cls.__name__, path, error)
        return None


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        log.info("a profile is not kept: %s", error)
