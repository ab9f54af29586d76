"""A checkpoint's tensors become the declared parameter tree.

In: a `TensorStore`, a declaration, the `Source` of each parameter. Out: the tree with arrays in its
leaves. Tensors are read, converted and placed one at a time, the largest first, so that the host
copy of one never stands on top of a whole model. Invariant: every declared parameter is assigned
once, from a tensor of its shape, and every stored tensor is used or named by an ignored pattern;
anything else is refused before the first tensor is read.
"""

import math
import re
import sys
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from tqdm import tqdm

from models.checkpoint.host_memory import HostRegion
from models.checkpoint.tensors import TensorStore
from models.families.family import Source, Sources
from models.params import Param, flatten, size_bytes, unflatten

PROGRESS_FROM_BYTES = 100 << 20
NAMES_SHOWN = 10


def float_dtype(dtype: Any) -> jnp.dtype:
    """float32 or bfloat16, by name or as a dtype."""
    try:
        found = jnp.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"dtype {dtype!r} is unknown; use float32 or bfloat16") from error
    if found not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f"dtype {found.name} is not supported; use float32 or bfloat16")
    return found


def load_params(
    store: TensorStore,
    declaration: Any,
    sources: Sources,
    dtype: Any,
    *,
    ignored: Iterable[re.Pattern] = (),
    shardings: Any = None,
    progress: bool = True,
) -> Any:
    """The declaration's tree with an array in each leaf, on the device or in `shardings`."""
    params, dtype = flatten(declaration), float_dtype(dtype)
    _check(store, params, sources, tuple(ignored))
    placement = {} if shardings is None else flatten(shardings)
    by_tensor: dict[str, list[str]] = {}
    for path in params:
        by_tensor.setdefault(sources[path].name, []).append(path)
    leaves: dict[str, jax.Array] = {}
    total_bytes = size_bytes(declaration, dtype)
    on_cpu = shardings is None and jax.default_backend() == "cpu"
    region = HostRegion(total_bytes, len(params)) if on_cpu else None
    with tqdm(
        total=total_bytes,
        desc="loading",
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=not progress or total_bytes < PROGRESS_FROM_BYTES,
    ) as bar:
        for name in sorted(by_tensor, key=lambda n: (-math.prod(store.shape(n)), n)):
            stored = store.read(name)
            for path in by_tensor[name]:
                param = params[path]
                host = apply_source(sources[path], stored, param, param.resolve_dtype(dtype))
                if region is not None:
                    host = region.put(host)  # the array takes it over
                leaf = jax.device_put(host, placement.get(path))
                leaves[path] = leaf.block_until_ready()
                bar.update(leaf.nbytes)
                del host
            del stored
    return unflatten(declaration, leaves)


def apply_source(source: Source, stored: np.ndarray, param: Param, dtype: Any) -> np.ndarray:
    """The steps of `Source`, in its order."""
    x = stored
    if source.transpose:
        x = rearrange(x, "i o -> o i")
    if source.rows is not None:
        x = x[slice(*source.rows)].copy()  # a view would keep the other rows alive with it
    if source.unpermute_heads is not None:
        x = rearrange(x, "(n r two) ... -> (n two r) ...", n=source.unpermute_heads, two=2)
    if source.add:
        x = x.astype(np.float32) + np.float32(source.add)
    return x.astype(dtype, copy=False).reshape(param.shape)


def _check(
    store: TensorStore, params: dict[str, Param], sources: Sources, ignored: tuple[re.Pattern, ...]
) -> None:
    """Everything that can be wrong with names and shapes, in one message."""
    names = set(store.names())
    missing = sorted({sources[path].name for path in params} - names)
    used = {sources[path].name for path in params}
    unused = sorted(name for name in names - used if not any(p.fullmatch(name) for p in ignored))
    misshapen = [
        f"{store.where(sources[path].name)} has shape {store.shape(sources[path].name)}, {path} "
        f"needs {param.shape}"
        for path, param in params.items()
        if sources[path].name in names
        and not _fits(sources[path], store.shape(sources[path].name), param)
    ]
    misshapen += _partly_used(store, params, sources)
    problems = [
        f"{len(found)} {what}: {', '.join(found[:NAMES_SHOWN])}"
        + (", ..." if len(found) > NAMES_SHOWN else "")
        for what, found in (
            ("tensors are missing", missing),
            ("tensors belong to no parameter", unused),
            ("tensors have wrong shapes", misshapen),
        )
        if found
    ]
    if problems:
        raise ValueError(
            f"{store.path} does not match its config: {'; '.join(problems)}. "
            "The weights and the config must come from one and the same model"
        )


def _partly_used(store: TensorStore, params: dict[str, Param], sources: Sources) -> list[str]:
    """Fused tensors with rows that no parameter takes."""
    rows: dict[str, int] = {}
    for source in (sources[path] for path in params):
        if source.rows is not None and source.name in store.names():
            rows[source.name] = rows.get(source.name, 0) + source.rows[1] - source.rows[0]
    transposed = {sources[path].name for path in params if sources[path].transpose}
    found = {name: (store.shape(name) or (0,))[-1 if name in transposed else 0] for name in rows}
    return [
        f"{store.where(name)} has {found[name]} rows, the parameters take {taken}"
        for name, taken in rows.items()
        if found[name] != taken
    ]


def _fits(source: Source, stored: tuple[int, ...], param: Param) -> bool:
    """Whether the stored shape, after the steps of `source`, is the parameter's: as declared, or
    with heads and head width in one axis, as checkpoints keep them."""
    shape = list(stored)
    if source.transpose:
        if len(shape) != 2:
            return False
        shape.reverse()
    if source.rows is not None:
        start, stop = source.rows
        if not shape or not 0 <= start < stop <= shape[0]:
            return False
        shape[0] = stop - start
    joined: list[int] = []
    for letter, size in zip(param.dims, param.shape, strict=True):
        if letter == "H" and joined:
            joined[-1] *= size
        else:
            joined.append(size)
    return shape in (joined, list(param.shape))
