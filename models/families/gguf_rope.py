"""Rotary settings out of a GGUF file.

Scaling stands in metadata (none, linear, yarn), or as one divisor per pair in the tensor
`rope_freqs.weight` (Llama 3.1 and later), or as two sets of divisors, for prompts below and above
the original length, in `rope_factors_short.weight` and `rope_factors_long.weight` (Phi-3). Divisors
are what longrope's factors are, so both become a longrope spec that loses nothing.
"""

import math
from typing import Protocol

from models.checkpoint.tensors import TensorStore
from models.config import RopeSpec

# Settings of rope.scaling that change the maths, and the values under which they do not.
_NEUTRAL = {"yarn_ext_factor": (1.0, -1.0), "yarn_log_multiplier": (0.0,), "alpha": (0.0,)}


class Reader(Protocol):
    name: str

    def value(self, key: str, default=None): ...

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int: ...

    def number(self, key: str, default: float | None = None) -> float: ...


def gguf_rope(
    read: Reader, head_dim: int, *, store: TensorStore | None = None, theta: float | None = None
) -> RopeSpec:
    """The model's rotation. With a `theta` of its own a rotation is unscaled (local layers)."""
    rotary_dim = read.integer("rope.dimension_count", head_dim)
    max_position = read.integer("context_length")
    if theta is not None:
        return RopeSpec(theta=theta, rotary_dim=rotary_dim, max_position=max_position)
    for key, neutral in _NEUTRAL.items():
        value = read.value(f"rope.scaling.{key}", neutral[0])
        if value not in neutral:
            raise ValueError(f"{read.name}.rope.scaling.{key} = {value} is not supported")
    kind, factor = _kind(read)
    basis = {
        "theta": read.number("rope.freq_base", 10_000.0),
        "rotary_dim": rotary_dim,
        "max_position": max_position,
    }
    original = read.integer("rope.scaling.original_context_length", max_position)
    magnitude = read.number("rope.scaling.attn_factor", 1.0)
    divisors = _divisors(read, rotary_dim // 2, store)
    if divisors is not None:
        if kind == "yarn" or (kind == "longrope" and factor != 1):
            raise ValueError(
                f"{read.name}: rope scaling {kind!r} with factor {factor} and rotary divisors as "
                "well is not supported"
            )
        short, long = (tuple(d * factor for d in values) for values in divisors)
        return RopeSpec(
            **basis,
            kind="longrope",
            original_max_position=original,
            attention_factor=magnitude,
            short_factor=short,
            long_factor=long,
        )
    if kind == "longrope":
        raise ValueError(f"{read.name}: rope scaling 'longrope' without its tensors of factors")
    if kind == "yarn":
        magnitude *= read.number("rope.scaling.yarn_attn_factor", 1.0)
        return RopeSpec(
            **basis,
            kind="yarn",
            original_max_position=original,
            factor=factor,
            beta_fast=read.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=read.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=magnitude * (0.1 * math.log(factor) + 1 if factor > 1 else 1.0),
        )
    if magnitude != 1.0:
        raise ValueError(f"{read.name}.rope.scaling.attn_factor = {magnitude} is not supported")
    return RopeSpec(**basis, kind=kind, factor=factor)


def _kind(read: Reader) -> tuple[str, float]:
    """(default, linear, yarn or longrope; factor). A factor without a type is a linear one."""
    factor = read.number("rope.scaling.factor", read.number("rope.scale_linear", 0.0)) or 1.0
    kind = read.value("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ValueError(f"{read.name}.rope.scaling.type = {kind!r} is not supported")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return "default", 1.0
    return kind, factor


def _divisors(
    read: Reader, pairs: int, store: TensorStore | None
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """(below, above the original length), one per pair."""
    names = set() if store is None else set(store.names())
    if "rope_freqs.weight" in names:
        found = ("rope_freqs.weight",) * 2
    else:
        found = ("rope_factors_short.weight", "rope_factors_long.weight")
        missing = [name for name in found if name not in names]
        if len(missing) == 2:
            return None
        if missing:
            raise ValueError(f"{read.name}: the file lacks {missing[0]} beside its other half")
    return tuple(_positive(store, name, pairs) for name in found)


def _positive(store: TensorStore, name: str, pairs: int) -> tuple[float, ...]:
    if store.shape(name) != (pairs,):
        raise ValueError(f"{store.where(name)} has shape {store.shape(name)}, it needs ({pairs},)")
    values = tuple(store.read(name).tolist())
    if not all(math.isfinite(v) and v > 0 for v in values):
        raise ValueError(f"{store.where(name)} must hold positive numbers, got {min(values)}")
    return values
