"""Parameters, declared once.

A module declares its parameters by building its own pytree dataclass with a `Param` in each leaf.
Everything else derives from that tree: abstract shapes, initial values, logical axes, byte counts,
and the checks of a checkpoint loader. Invariant: a tree of arrays handed to `forward` has exactly
the structure, shapes and dtypes of `abstract(declaration, dtype)`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models.dims import LOGICAL_AXES
from sharding.axes import Rules, named_sharding


@dataclass(frozen=True)
class Param:
    """One parameter: `dims` are letters of `models.dims`, one per axis of `shape`.

    Weights are stored output axes first (`wq_NHD`, contracted axis last), the order of checkpoint
    files and the fastest one for XLA's CPU backend; other backends choose their own layout.
    `dtype` None means the dtype the model is loaded in; norms and sinks stay float32.
    """

    dims: str
    shape: tuple[int, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"
    dtype: str | None = None

    def __post_init__(self) -> None:
        assert len(self.dims) == len(self.shape), (self.dims, self.shape)

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axis names, for sharding rules."""
        return tuple(LOGICAL_AXES.get(letter) for letter in self.dims)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def resolve_dtype(self, dtype: Any) -> jnp.dtype:
        return jnp.dtype(self.dtype or dtype)


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path, e.g. `layers.0.mixer.wq_NHD`. Absent (None) leaves do not appear."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def unflatten(declaration: Any, leaves: Mapping[str, Any]) -> Any:
    """The inverse of `flatten`; ValueError names the paths that are missing or unknown."""
    paths = list(flatten(declaration))
    missing = sorted(set(paths) - set(leaves))
    unknown = sorted(set(leaves) - set(paths))
    if missing or unknown:
        raise ValueError(f"parameters missing: {missing or 'none'}; unknown: {unknown or 'none'}")
    return jax.tree.unflatten(jax.tree.structure(declaration), [leaves[p] for p in paths])


def abstract(declaration: Any, dtype: Any) -> Any:
    """Tree of `jax.ShapeDtypeStruct`."""
    return jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.resolve_dtype(dtype)), declaration
    )


def init(declaration: Any, key: jax.Array, dtype: Any) -> Any:
    """Random weights: normal with standard deviation 1/sqrt(contracted width), ones or zeros."""
    leaves, treedef = jax.tree.flatten(declaration)
    keys = jax.random.split(key, len(leaves))

    def make(p: Param, k: jax.Array) -> jax.Array:
        if p.init == "normal":
            std = 1.0 / math.sqrt(p.shape[-1])
            return (jax.random.normal(k, p.shape, jnp.float32) * std).astype(p.resolve_dtype(dtype))
        return (jnp.ones if p.init == "ones" else jnp.zeros)(p.shape, p.resolve_dtype(dtype))

    return jax.tree.unflatten(treedef, [make(p, k) for p, k in zip(leaves, keys, strict=True)])


def shardings(declaration: Any, mesh: Mesh, rules: Rules) -> Any:
    """Tree of `NamedSharding`, from each parameter's logical axes."""
    return jax.tree.map(lambda p: named_sharding(p.axes, p.shape, mesh, rules), declaration)


def num_params(declaration: Any) -> int:
    return sum(p.size for p in jax.tree.leaves(declaration))


def size_bytes(declaration: Any, dtype: Any) -> int:
    return sum(
        p.size * np.dtype(p.resolve_dtype(dtype)).itemsize for p in jax.tree.leaves(declaration)
    )
