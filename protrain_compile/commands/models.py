"""What MODEL means on the command line, and building it without memory.

=================================  ============================================================================
MODEL                              built as
=================================  ============================================================================
``path/to/config.json``            the Hugging Face model of that configuration; a folder that holds one, too
``llama:hidden_size=3200,...``     the Hugging Face architecture with these sizes, others as it has by default
``package.module:function``        what the function returns: a model, or a model and its example inputs
=================================  ============================================================================

A Hugging Face model is called with ``input_ids`` and ``labels``. A function may take ``batch`` and ``seq``; where it
returns no inputs, its model is called with token numbers of shape (batch, seq) and must return the loss. Of inputs that
it returns without having taken ``batch`` or ``seq``, these are not known. Everything is built on ``meta``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protrain_compile.commands.trace import Inputs
from protrain_compile.errors import OptionError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model that can be built.

    Attributes:
        name: What the user called it.
        build: Returns the model on ``meta`` and its inputs, for a batch, a sequence, a dtype (None leaves it to the
            model) and a number of blocks (None for all).
        depth: How many blocks it has, where a model of fewer has equal ones; None where that is not known.
        own_sizes: Returns which of ``batch`` and ``seq`` its own inputs decide.
    """

    name: str
    build: Callable[[int, int, torch.dtype | None, int | None], tuple[nn.Module, Inputs]]
    depth: int | None = None
    own_sizes: Callable[[], frozenset[str]] = frozenset

    def sizes(self, batch: int | None, seq: int | None, defaults: tuple[int, int]) -> tuple[int, int]:
        """Return the batch and the sequence to build it for: as given, else the defaults.

        Raises:
            OptionError: If one is given that its own inputs decide.
        """
        own = self.own_sizes()
        for name, value in (("batch", batch), ("seq", seq)):
            if value is not None and name in own:
                raise OptionError(f"--{name} {value}: {self.name} returns its own inputs; let it take `{name}`")
        return batch or defaults[0], seq or defaults[1]


def resolve(model: str) -> ModelSource:
    """Return the model that MODEL stands for.

    Raises:
        OptionError: If it stands for none; the message says what was looked for.
    """
    path = Path(model)
    if path.is_dir() or path.suffix == ".json":
        return from_config(_config_of_file(path / "config.json" if path.is_dir() else path), model)
    head, colon, tail = model.partition(":")
    if colon and "=" not in tail and tail:
        return _from_function(head, tail, model)
    return from_config(_config_of_sizes(head, tail), model)


# ---- Hugging Face ----------------------------------------------------------------------------------------------


def from_config(config: Any, name: str) -> ModelSource:
    """Return the model of a Hugging Face configuration that is trained on tokens and labels."""
    model_class = _model_class(config)
    config.use_cache = False

    def build(batch: int, seq: int, dtype: torch.dtype | None, blocks: int | None) -> tuple[nn.Module, Inputs]:
        longest = getattr(config, "max_position_embeddings", None)
        if isinstance(longest, int) and seq > longest:
            raise OptionError(f"--seq {seq}: {name} has max_position_embeddings={longest}; use less, or raise it")
        wanted = copy.deepcopy(config)
        if blocks is not None:
            wanted.num_hidden_layers = blocks
        with torch.device("meta"):
            model = model_class._from_config(wanted, dtype=dtype or torch.bfloat16).train()
        if not _is_known_loss(model):
            model.loss_type = "ForCausalLM"  # else the choice of the loss logs, which breaks the graph
        ids = torch.zeros(batch, seq, dtype=torch.int64)
        return model, Inputs.of({"input_ids": ids, "labels": ids})

    return ModelSource(name, build, _repeated_blocks(config))


def _is_known_loss(model: Any) -> bool:
    from transformers.loss.loss_utils import LOSS_MAPPING

    return getattr(model, "loss_type", None) in LOSS_MAPPING


def _repeated_blocks(config: Any) -> int | None:
    """Return the number of blocks of a configuration without settings for single layers."""
    depth = getattr(config, "num_hidden_layers", None)
    kinds = getattr(config, "layer_types", None)
    single = kinds is not None and len(set(kinds)) > 1
    return depth if isinstance(depth, int) and not single and not getattr(config, "is_encoder_decoder", False) else None


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise OptionError(
            "MODEL is a Hugging Face model, which needs transformers: pip install transformers, or give a "
            "`module:function` that returns a model"
        ) from error
    return transformers


def _config_of_file(path: Path) -> Any:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON ({error})"
        raise OptionError(f"MODEL {path}: {reason}; give a Hugging Face config.json") from error
    if not isinstance(fields, Mapping) or "model_type" not in fields:
        raise OptionError(f"MODEL {path}: no `model_type` in it; give a Hugging Face config.json")
    return _config(fields["model_type"], {k: v for k, v in fields.items() if k != "model_type"}, str(path))


def _config_of_sizes(architecture: str, sizes: str) -> Any:
    fields: dict[str, Any] = {}
    for part in filter(None, sizes.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise OptionError(f"MODEL: {part!r} is no size; write {architecture}:name=value,name=value")
        fields[key.strip()] = _value(value.strip())
    return _config(architecture, fields, architecture)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _config(model_type: str, fields: Mapping[str, Any], where: str) -> Any:
    transformers = _transformers()
    if model_type not in transformers.CONFIG_MAPPING:
        raise OptionError(
            f"MODEL {where}: {model_type!r} is no architecture of transformers {transformers.__version__}; give a "
            "config.json, an architecture with sizes (llama:hidden_size=3200,num_hidden_layers=26), or module:function"
        )
    plain = transformers.AutoConfig.for_model(model_type)
    unknown = [name for name in fields if where == model_type and not hasattr(plain, name)]
    if unknown:
        raise OptionError(f"MODEL: {model_type} has no size {', '.join(unknown)}")
    try:
        return transformers.AutoConfig.for_model(model_type, **fields)
    except Exception as error:
        raise OptionError(f"MODEL {where}: {error}") from error


def _model_class(config: Any) -> Any:
    """Return the class that the configuration names, else the one for masked or causal language modelling."""
    transformers = _transformers()
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    for kind in ("MASKED_LM", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM"):
        found = getattr(transformers, f"MODEL_FOR_{kind}_MAPPING", {})
        if type(config) in found:
            return found[type(config)]
    raise OptionError(
        f"MODEL: {config.model_type} is no language model; give a `module:function` that returns a model and its inputs"
    )


# ---- functions -------------------------------------------------------------------------------------------------


def _from_function(module: str, function: str, name: str) -> ModelSource:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise OptionError(f"MODEL {name}: {error}") from error
    if not callable(found):
        raise OptionError(f"MODEL {name}: not a function; it must return a model, or a model and its inputs")

    taken = set(inspect.signature(found).parameters)

    def call(**sizes: int) -> Any:
        with torch.device("meta"):
            return found(**{key: value for key, value in sizes.items() if key in taken})

    @functools.cache
    def own_sizes() -> frozenset[str]:
        return frozenset({"batch", "seq"} - taken if isinstance(call(batch=1, seq=8), tuple) else ())

    def build(batch: int, seq: int, dtype: torch.dtype | None, blocks: int | None) -> tuple[nn.Module, Inputs]:
        made = call(batch=batch, seq=seq)
        model, inputs = made if isinstance(made, tuple) else (made, torch.zeros(batch, seq, dtype=torch.int64))
        if not isinstance(model, nn.Module):
            raise OptionError(f"MODEL {name}: returned a {type(model).__name__} instead of a torch.nn.Module")
        return model if dtype is None else model.to(dtype), Inputs.of(inputs)

    return ModelSource(name, build, own_sizes=own_sizes)
