"""A tiny model for tests: 2 layers, width 64, 4 query and 2 key/value heads, spread-out logits; and
a tokenizer of as many tokens."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp

from models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, NormSpec, RopeSpec
from models.model import ModelParams, declare
from models.params import flatten, init, unflatten

VOCAB = 97
SPECIAL = VOCAB - 1  # the id of <special>


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
    """Random weights, scaled up so that logits differ clearly and, what attention adds most of all,
    depend on the whole history."""
    leaves = flatten(init(declare(config), jax.random.key(seed), dtype))
    for path, x in leaves.items():
        if x.ndim > 1:
            leaves[path] = x * (4 if path.endswith("wo_DA") else 2)
    return unflatten(declare(config), leaves)


def write_tokenizer(directory: Path) -> None:
    """Files of a tokenizer with one token per printable character, and one special token."""
    characters = [*map(chr, range(33, 127)), "Ġ", "Ċ"]  # the last two: space and newline
    assert len(characters) == SPECIAL
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": SPECIAL, "content": "<special>", "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        ],
        "pre_tokenizer": byte_level | {"trim_offsets": True},
        "decoder": byte_level | {"trim_offsets": True},
        "model": {"type": "BPE", "vocab": {c: i for i, c in enumerate(characters)}, "merges": []},
    }
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    template = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}:"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
