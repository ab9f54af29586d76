"""Load a model by path: open the checkpoint, find its family, assemble its parameters.

In: a directory in Hugging Face's layout, a GGUF file or a directory written by
`models.checkpoint.orbax`; a dtype. Out: (ModelConfig, ModelParams), with the tree, shapes and
dtypes of `declare(config)`. Invariant: a checkpoint that does not hold exactly the model that its
config describes is refused with one ValueError.
"""

import re
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoint.assemble import float_dtype, load_params
from models.checkpoint.config_json import MARKER, read_saved
from models.checkpoint.safetensors import open_safetensors
from models.checkpoint.tensors import TensorStore
from models.config import ModelConfig
from models.families import family_of_gguf, family_of_hf, read_fields
from models.families.family import Sources
from models.model import ModelParams, declare


def load_model(
    path: str | Path, dtype: Any, *, progress: bool = True, shardings: Any = None
) -> tuple[ModelConfig, ModelParams]:
    """`dtype` is "float32" or "bfloat16"; `shardings` is a tree like the parameters', each leaf a
    `jax.sharding.Sharding` or None."""
    path, dtype = Path(path), float_dtype(dtype)
    if (path / MARKER).is_file():
        # Imported here: orbax takes a second to import, which no other checkpoint needs.
        from models.checkpoint.orbax import restore

        return restore(path, dtype=dtype, shardings=shardings)
    opened = _open(path)
    if opened.config.tied_embeddings:
        _warn_of_other_head(opened.store, opened.sources["embed_VD"].name)
    params = load_params(
        opened.store,
        declare(opened.config),
        opened.sources,
        dtype,
        ignored=opened.ignored,
        shardings=shardings,
        progress=progress,
    )
    return opened.config, params


def read_config(path: str | Path) -> ModelConfig:
    """The config alone, without reading a weight."""
    path = Path(path)
    return read_saved(path).config if (path / MARKER).is_file() else _open(path).config


@dataclass(frozen=True)
class _Opened:
    config: ModelConfig
    store: TensorStore
    sources: Sources
    ignored: tuple[re.Pattern, ...]


def _open(path: Path) -> _Opened:
    if path.is_file():
        return _open_gguf_model(path)
    if path.is_dir():
        return _open_directory(path)
    raise ValueError(f"there is no model directory and no .gguf file at {path}; check the path")


def _open_gguf_model(path: Path) -> _Opened:
    # Imported here: what runs random weights needs no reader of GGUF.
    from models.checkpoint.gguf import open_gguf

    file = open_gguf(path)
    try:
        family = family_of_gguf(file.fields.get("general.architecture"))
        config = family.config_from_gguf(file.fields, file)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return _Opened(config, file, family.gguf_sources(config), family.gguf_ignored)


def _open_directory(path: Path) -> _Opened:
    if not (path / "config.json").is_file():
        found = ", ".join(sorted(p.name for p in path.glob("*.gguf"))[:3])
        raise ValueError(
            f"{path} has no config.json; point to "
            + (f"one of its files ({found})" if found else "a model's own directory")
        )
    fields, store = read_fields(path), open_safetensors(path)
    try:
        family = family_of_hf(fields)
        num_layers = fields.get("num_hidden_layers", fields.get("n_layer", 0))
        if isinstance(num_layers, int) and num_layers > len(store.names()):
            raise ValueError(
                f"config.json: {num_layers} layers, but there are {len(store.names())} tensors"
            )
        config = family.config_from_hf(fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not any(name.startswith(family.hf_prefix) for name in store.names()):
        store = _Prefixed(store, family.hf_prefix)
    return _Opened(config, store, family.hf_sources(config), family.hf_ignored)


@dataclass(frozen=True)
class _Prefixed:
    """A store of a bare base model, whose names lack the prefix that the family's have."""

    store: TensorStore
    prefix: str

    @property
    def path(self) -> Path:
        return self.store.path

    def names(self) -> Collection[str]:
        return [self.prefix + name for name in self.store.names()]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.store.shape(name.removeprefix(self.prefix))

    def read(self, name: str) -> np.ndarray:
        return self.store.read(name.removeprefix(self.prefix))

    def where(self, name: str) -> str:
        return self.store.where(name.removeprefix(self.prefix))


def _warn_of_other_head(store: TensorStore, embedding: str, head: str = "lm_head.weight") -> None:
    """The rule for tied embeddings: the embedding counts; another matrix is reported."""
    if head not in store.names() or embedding not in store.names():
        return
    if store.shape(head) != store.shape(embedding) or not np.array_equal(
        store.read(head), store.read(embedding)
    ):
        warnings.warn(
            f"{store.where(head)} differs from the embedding, but config.json ties the two: the "
            "embedding is used; set tie_word_embeddings to false to use the stored matrix",
            stacklevel=2,
        )
