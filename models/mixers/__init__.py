"""Mixers: what mixes tokens inside a layer. A spec's type chooses the functions.

A mixer is one file with a parameter dataclass and three functions: `declare`, `cache` (what it
keeps per token) and `apply`. Adding one is adding a row here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from models.config import AttentionSpec
from models.kv_cache import PagedKVSpec
from models.mixers.attention import apply_attention, attention_cache, declare_attention


@dataclass(frozen=True)
class Mixer:
    """declare(spec, norm, width) -> params; cache(spec) -> cache declaration;
    apply(spec, norm, params, cache, x_TD, step) -> (out_TD, cache)."""

    declare: Callable[..., Any]
    cache: Callable[..., PagedKVSpec]
    apply: Callable[..., tuple]


MIXERS: dict[type, Mixer] = {
    AttentionSpec: Mixer(declare_attention, attention_cache, apply_attention),
}


def mixer_of(spec: Any) -> Mixer:
    return MIXERS[type(spec)]
