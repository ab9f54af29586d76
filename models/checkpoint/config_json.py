"""`ModelConfig` as JSON and back, exactly; and the file that marks a saved checkpoint.

A saved checkpoint is a directory with this JSON and, from `models.checkpoint.orbax`, the arrays.
Records become objects with their class's name under "type", tuples become lists. Floats survive
because JSON writes the shortest text that reads back as the same float. Invariant: `decode(encode(
config)) == config`, and text that names another class or field is refused.
"""

import json
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from models import config as records
from models.config import ModelConfig

MARKER = "pallasite.json"
FORMAT = 1
CLASSES = {name: c for name, c in vars(records).items() if isinstance(c, type) and is_dataclass(c)}


def encode(value: Any) -> Any:
    """JSON values for a record, tuple or plain value."""
    if is_dataclass(value):
        inner = {field.name: encode(getattr(value, field.name)) for field in fields(value)}
        return {"type": type(value).__name__, **inner}
    return [encode(item) for item in value] if isinstance(value, tuple) else value


def decode(value: Any) -> Any:
    """The inverse of `encode`; ValueError for what it did not write."""
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    inner = {key: decode(item) for key, item in value.items() if key != "type"}
    record = CLASSES.get(value.get("type"))
    if record is None:
        raise ValueError(f"unknown record type {value.get('type')!r}; known: {', '.join(CLASSES)}")
    try:
        return record(**inner)
    except TypeError as error:
        raise ValueError(f"{record.__name__}: {error}") from error


@dataclass(frozen=True)
class Saved:
    """What stands beside saved parameters: `checksums` by file, relative to the directory."""

    config: ModelConfig
    dtype: str
    checksums: dict[str, str]


def write_saved(directory: Path, saved: Saved) -> None:
    value = {"format": FORMAT, **vars(saved), "config": encode(saved.config)}
    (directory / MARKER).write_text(json.dumps(value, indent=1, allow_nan=False))


def read_saved(directory: Path) -> Saved:
    """The marker of a directory written by `models.checkpoint.orbax.save`, without its arrays."""
    path = directory / MARKER
    if not path.is_file():
        raise ValueError(f"{directory} was not saved by Pallasite: it has no {MARKER}")
    try:
        value = json.loads(path.read_bytes())
        if value["format"] != FORMAT:
            raise ValueError(f"format {value['format']!r}, this version reads {FORMAT}")
        saved = Saved(decode(value["config"]), value["dtype"], dict(value["checksums"]))
        if not isinstance(saved.config, ModelConfig):
            raise ValueError("it holds no ModelConfig")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error!r}; save the model again") from error
    return saved
