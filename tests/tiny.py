"""A tiny model for tests: 2 layers, width 64, 4 query and 2 key/value heads, spread-out logits."""

import jax
import jax.numpy as jnp

from models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, NormSpec, RopeSpec
from models.model import ModelParams, declare
from models.params import init

VOCAB = 97


def tiny_config(*, num_layers: int = 2, max_position: int = 512, **attention) -> ModelConfig:
    """`attention` overrides fields of `AttentionSpec`."""
    fields = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "scale": 0.25,
        "rope": RopeSpec(theta=10_000.0, rotary_dim=16, max_position=max_position),
    } | attention
    layer = LayerSpec(mixer=AttentionSpec(**fields), mlp=MlpSpec(width=96))
    return ModelConfig(
        family="tiny",
        vocab_size=VOCAB,
        width=64,
        layers=(layer,) * num_layers,
        norm=NormSpec("rms", 1e-6),
        max_position=max_position,
        tied_embeddings=False,
    )


def tiny_params(config: ModelConfig, seed: int = 0, dtype=jnp.float32) -> ModelParams:
    """Random weights, scaled up so that logits differ clearly and depend on the whole history."""
    params = init(declare(config), jax.random.key(seed), dtype)
    return jax.tree.map(lambda x: x * 2 if x.ndim > 1 else x, params)
