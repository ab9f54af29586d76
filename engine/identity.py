"""What an engine is, so that a saved state or a record is not used with another one.

In: sizes, capacities, step model, parameters. Out: a small JSON object. Invariant: equal objects
mean equal shapes, equal settings, an equal network and (but for collisions) equal weights.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp

from engine.config import EngineConfig
from engine.sampling_rows import SamplingLimits
from models.params import flatten


def identity(
    config: EngineConfig, limits: SamplingLimits, model: Any, params: Any
) -> dict[str, Any]:
    sums = {name: int(_bit_sum(leaf)) for name, leaf in flatten(params).items()}
    return {
        "engine": asdict(config),
        "limits": asdict(limits),
        "model": _digest(repr(model)),
        "weights": _digest(json.dumps(sums, sort_keys=True)),
    }


def differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What differs, in words, e.g. `engine.num_pages is 30 there and 40 here`."""
    found = []
    for part in ("engine", "limits"):
        there, ours = dict(saved[part]), here[part]
        for name in sorted(there | ours):
            if there.get(name) != ours.get(name):
                found.append(f"{part}.{name} is {there.get(name)} there and {ours.get(name)} here")
    if saved["model"] != here["model"]:
        found.append("the network, its dtype or its attention implementation differs")
    elif saved["weights"] != here["weights"]:
        found.append("the weights differ")
    return found


@jax.jit
def _bit_sum(x: jax.Array) -> jax.Array:
    """Sum of the elements' bits, modulo 2**32: one reading of the array, no copy."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return jnp.sum(x.astype(jnp.uint32), dtype=jnp.uint32)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
