"""What a model family is to the loaders: how its config reads and where its tensors are.

A family is data: a function from a config file's fields to `ModelConfig`, and for each parameter
path of `models.model.declare(config)` (dotted, as `models.params.flatten` gives it) the stored
tensor and the few ways in which storage differs from use.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from models.checkpoint.tensors import TensorStore
from models.config import ModelConfig


@dataclass(frozen=True)
class Source:
    """One parameter's place in a checkpoint. Steps in order, on the stored array:

    transpose        swap its two axes (weights stored input axis first)
    rows             take [start, stop) of the first axis (fused projections)
    unpermute_heads  undo GGUF's interleaving of rotary pairs, given the number of heads
    add              add in float32 (norm scales stored as an offset from one)
    then reshape to the parameter's shape (sizes must agree) and cast to its dtype.
    """

    name: str
    transpose: bool = False
    rows: tuple[int, int] | None = None
    unpermute_heads: int | None = None
    add: float = 0.0


Sources = Mapping[str, Source]


@dataclass(frozen=True)
class Family:
    """`hf_ignored` and `gguf_ignored`: patterns (whole names) of stored tensors that no parameter
    needs. `hf_prefix` begins the names of `hf_sources`; where no name in a file begins with it, it
    stands in front of every one of them.
    """

    name: str
    model_types: tuple[str, ...]
    gguf_archs: tuple[str, ...]
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    config_from_gguf: Callable[[Mapping[str, Any], TensorStore], ModelConfig]
    hf_sources: Callable[[ModelConfig], Sources]
    gguf_sources: Callable[[ModelConfig], Sources]
    hf_ignored: tuple[re.Pattern, ...] = ()
    gguf_ignored: tuple[re.Pattern, ...] = ()
    hf_prefix: str = "model."
