"""A check whether a nested dict fits a schema, and its form for JSON. No library is needed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Maybe:
    """A schema for values that are None or fit the schema `of`."""

    of: Any


@dataclass(frozen=True)
class Many:
    """A schema for dicts with any string keys and values that fit the schema `of`."""

    of: Any


def conform(value: Any, schema: Any, name: str) -> None:
    """Raise ValueError naming the first entry of `value` that does not fit the schema. name: the value's own name, for
    the message.

    A schema is a type, `Maybe`, `Many`, a list or a dict. The type float accepts whole numbers, but not NaN or
    infinity; object accepts everything. A list with one schema describes lists of any length whose entries fit it. A
    dict of schemas describes dicts with exactly these keys.
    """
    if isinstance(schema, Maybe):
        if value is not None:
            conform(value, schema.of, name)
    elif isinstance(schema, Many):
        _require(isinstance(value, Mapping) and all(isinstance(key, str) for key in value), name, "a dict", value)
        for key, item in value.items():
            conform(item, schema.of, f"{name}.{key}")
    elif isinstance(schema, list):
        _require(isinstance(value, list), name, "a list", value)
        for index, item in enumerate(value):
            conform(item, schema[0], f"{name}[{index}]")
    elif isinstance(schema, dict):
        _require(isinstance(value, Mapping), name, "a dict", value)
        for key in [*schema, *value]:
            if key not in value:
                raise ValueError(f"{name}.{key} is missing")
            if key not in schema:
                raise ValueError(f"{name}.{key} is not known; {name} has {', '.join(schema)}")
        for key, inner in schema.items():
            conform(value[key], inner, f"{name}.{key}")
    elif schema is float:
        real = isinstance(value, int | float) and not isinstance(value, bool)
        _require(real and math.isfinite(value), name, "a finite number", value)
    elif schema is int:
        _require(isinstance(value, int) and not isinstance(value, bool), name, "a whole number", value)
    else:
        _require(isinstance(value, schema), name, schema.__name__, value)


def strict(value: Any) -> Any:
    """Return a copy of a nested value in which NaN and infinity are None, since JSON has neither, and all keys are
    strings."""
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _require(fits: bool, name: str, wanted: str, value: Any) -> None:
    if not fits:
        raise ValueError(f"{name} must be {wanted}, not {value!r}")
