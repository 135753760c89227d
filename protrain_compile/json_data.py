"""Frozen dataclasses as JSON, both ways, checked by their type hints.

Supported are str, int, float, bool, Literal, dataclasses, ``X | None``, ``tuple[X, ...]`` and ``Mapping[str, X]``. A
message names the field by its path, such as ``hardware.h2d.alone_gb_per_s``. Infinity and NaN are refused both ways.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from protrain_compile.errors import ProfileError

T = TypeVar("T")


def to_json(data: Any) -> str:
    """Return a dataclass as indented JSON text; fields that are None are left out."""
    return json.dumps(to_plain(data), indent=1, allow_nan=False)


def to_plain(data: Any) -> Any:
    """Return a dataclass as what the json module writes."""
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = ((field.name, getattr(data, field.name)) for field in dataclasses.fields(data))
        return {name: to_plain(value) for name, value in fields if value is not None}
    if isinstance(data, Mapping):
        return {str(key): to_plain(value) for key, value in data.items()}
    return [to_plain(each) for each in data] if isinstance(data, list | tuple) else data


def from_json(cls: type[T], text: str, what: str) -> T:
    """Return the ``cls`` that :func:`to_json` wrote; ``what`` it is begins every message.

    Raises:
        ProfileError: If ``text`` is not JSON, or a field is missing, unknown or of the wrong kind.
    """
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise ProfileError(f"{what} is not JSON: {error}") from error
    return from_plain(cls, plain, what)


def from_plain(cls: type[T], plain: Any, what: str) -> T:
    """Return the ``cls`` that a JSON object describes; see :func:`from_json`."""
    if not isinstance(plain, Mapping):
        raise ProfileError(f"{what} must be a JSON object, got {plain!r}")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(str(name) for name in plain if name not in fields)
    if unknown:
        raise ProfileError(f"{what} has unknown fields {', '.join(unknown)}; the fields are {', '.join(fields)}")
    no_default = dataclasses.MISSING
    required = (n for n, f in fields.items() if f.default is no_default and f.default_factory is no_default)
    missing = [name for name in required if name not in plain]
    if missing:
        raise ProfileError(f"{what} lacks the fields {', '.join(missing)}")
    hints = typing.get_type_hints(cls)
    return cls(**{name: _read(hints[name], value, f"{what}.{name}") for name, value in plain.items()})


def _read(hint: Any, value: Any, what: str) -> Any:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _read(parts[0], value, what)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ProfileError(f"{what} must be a list, got {value!r}")
        return tuple(_read(parts[0], each, f"{what}[{i}]") for i, each in enumerate(value))
    if origin is not None and issubclass(origin if isinstance(origin, type) else object, Mapping):
        if not isinstance(value, Mapping):
            raise ProfileError(f"{what} must be a JSON object, got {value!r}")
        return {_read(parts[0], key, what): _read(parts[1], each, f"{what}.{key}") for key, each in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast("type[Any]", hint), value, what)
    if origin is typing.Literal:
        if value not in parts:
            raise ProfileError(f"{what} must be one of {', '.join(map(str, parts))}, got {value!r}")
        return value
    return _read_scalar(hint, value, what)


def _read_scalar(hint: type, value: Any, what: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        names = {float: "a number", int: "a whole number", str: "a string", bool: "true or false"}
        raise ProfileError(f"{what} must be {names[hint]}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ProfileError(f"{what} must be finite, got {value!r}")
    return value
