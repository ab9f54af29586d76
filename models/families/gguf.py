"""A `ModelConfig` out of a GGUF file's metadata, for every architecture in `gguf_archs.ARCHS`.

In: the file's fields and its tensors (names and shapes decide what metadata leaves open: tied
embeddings, biases, vocabulary; two of them hold rotary frequencies). Out: the config. Invariant: a
field that would change the maths is read or refused by name.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from models.checkpoint.tensors import TensorStore
from models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, NormSpec
from models.families.gguf_archs import ARCHS, Arch
from models.families.gguf_rope import gguf_rope

Fields = Mapping[str, Any]

# What the config reads itself and no parameter needs.
GGUF_IGNORED = (re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight"),)

# Fields (after the architecture's name) that change the maths, and the value under which they do
# not; none of the architectures here has them.
_NEUTRAL = {
    "attention.causal": True,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "embedding_scale": 0,
    "expert_count": 0,
    "logit_scale": 0,
    "pooling_type": 0,
    "residual_scale": 0,
}


def config_from_gguf(fields: Fields, store: TensorStore) -> ModelConfig:
    name = fields.get("general.architecture")
    if name not in ARCHS:
        raise ValueError(f"GGUF architecture {name!r} is not supported; known: {', '.join(ARCHS)}")
    arch, read = ARCHS[name], _Reader(fields, name)
    for key, neutral in _NEUTRAL.items():
        if read.value(key, neutral) != neutral:
            raise ValueError(f"{name}.{key} = {read.value(key)} is not supported")
    width, vocab_size = read.integer("embedding_length"), _vocab_size(fields, store)
    layers = _layers(arch, read, width, store)
    eps_key = "attention.layer_norm_" + ("rms_epsilon" if arch.norm == "rms" else "epsilon")
    return ModelConfig(
        family=name,
        vocab_size=vocab_size,
        width=width,
        layers=layers,
        norm=NormSpec(arch.norm, read.number(eps_key), bias=arch.norm == "layer"),
        max_position=read.integer("context_length"),
        tied_embeddings="output.weight" not in store.names(),
        embedding_scale=math.sqrt(width) if arch.scaled_embedding else None,
        learned_positions=arch.positions == "learned",
        unembed_bias="output.bias" in store.names(),
        final_softcap=read.number("final_logit_softcapping", arch.softcaps[1] or 0.0) or None,
        bos_token_id=_token_id(fields, "bos"),
        eos_token_ids=_eos_token_ids(fields),
    )


def _layers(arch: Arch, read: "_Reader", width: int, store: TensorStore) -> tuple[LayerSpec, ...]:
    count = read.integer("block_count")
    if count > len(store.names()):
        raise ValueError(
            f"{read.name}.block_count is {count}, but the file has {len(store.names())} tensors"
        )
    mixer = _mixer(arch, read, width, count, store)
    local_rope = None
    if mixer.rope is not None and arch.local_theta is not None:
        local_rope = gguf_rope(
            read, mixer.head_dim, theta=read.number("rope.freq_base_swa", arch.local_theta)
        )
    mlp = MlpSpec(
        width=read.integer("feed_forward_length"),
        kind=arch.mlp,
        activation=arch.activation,
        bias="blk.0.ffn_up.bias" in store.names(),
    )
    layers = []
    for i, window in enumerate(_windows(arch, read, count)):
        rope = mixer.rope if window is None or local_rope is None else local_rope
        if arch.unrotated_period and (i + 1) % arch.unrotated_period == 0:
            rope = None
        spec = AttentionSpec(**{**vars(mixer), "window": window, "rope": rope})
        layers.append(LayerSpec(mixer=spec, mlp=mlp, norms=arch.norms))
    return tuple(layers)


def _mixer(
    arch: Arch, read: "_Reader", width: int, num_layers: int, store: TensorStore
) -> AttentionSpec:
    """The attention of a layer without window."""
    num_heads = read.integer("attention.head_count")
    head_dim = read.integer("attention.key_length", width // num_heads)
    if read.integer("attention.value_length", head_dim) != head_dim:
        raise ValueError(
            f"{read.name}.attention.value_length {read.value('attention.value_length')} differs "
            f"from key_length {head_dim}; that is not supported"
        )
    is_wide = num_layers == arch.wide_scale_layers
    scale = (width // num_heads if is_wide else head_dim) ** -0.5
    qkv = "attn_qkv" if arch.fused else "attn_q"
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=read.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        scale=read.number("attention.scale", scale),
        rope=gguf_rope(read, head_dim, store=store) if arch.positions == "rotary" else None,
        softcap=read.number("attn_logit_softcapping", arch.softcaps[0] or 0.0) or None,
        qk_norm=arch.qk_norm,
        qkv_bias=f"blk.0.{qkv}.bias" in store.names(),
        out_bias="blk.0.attn_output.bias" in store.names(),
    )


def _windows(arch: Arch, read: "_Reader", num_layers: int) -> list[int | None]:
    """The sliding window of each layer."""
    window = read.integer("attention.sliding_window", arch.window or 0, least=0)
    if not window:
        return [None] * num_layers
    if arch.window_period is None:
        raise ValueError(f"{read.name}.attention.sliding_window = {window} is not supported")
    pattern = read.value("attention.sliding_window_pattern", arch.window_period)
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise ValueError(
                f"{read.name}.attention.sliding_window_pattern has {len(pattern)} entries for "
                f"{num_layers} layers"
            )
        return [window if is_local else None for is_local in pattern]
    period = read.integer("attention.sliding_window_pattern", arch.window_period, least=0)
    return [window if not period or i % period < period - 1 else None for i in range(num_layers)]


def _vocab_size(fields: Fields, store: TensorStore) -> int:
    if "token_embd.weight" not in store.names():
        raise ValueError("the GGUF file has no tensor 'token_embd.weight'; it holds no whole model")
    rows, tokens = store.shape("token_embd.weight")[0], fields.get("tokenizer.ggml.tokens", ())
    if not isinstance(tokens, list | tuple) or len(tokens) > rows:
        raise ValueError(f"the tokenizer lists {len(tokens)} tokens, the embedding has {rows} rows")
    return rows


def _token_id(fields: Fields, name: str) -> int | None:
    value = fields.get(f"tokenizer.ggml.{name}_token_id")
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(f"tokenizer.ggml.{name}_token_id must be a token id, got {value!r}")
    return value


def _eos_token_ids(fields: Fields) -> tuple[int, ...]:
    """Ends of sequence, of turn and of message all end generation."""
    ids = {_token_id(fields, name) for name in ("eos", "eot", "eom")}
    return tuple(sorted(ids - {None}))


class _Reader:
    """Typed reading of the fields that begin with the architecture's name."""

    def __init__(self, fields: Fields, name: str):
        self.fields, self.name = fields, name

    def value(self, key: str, default: Any = None) -> Any:
        return self.fields.get(f"{self.name}.{key}", default)

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.value(key, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if type(value) is not int or not least <= value < 1 << 31:
            given = "missing" if value is None else f"{value!r:.80}"
            raise ValueError(
                f"metadata field {self.name}.{key} must be one integer >= {least}, it is {given}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.value(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            given = "missing" if value is None else f"{value!r:.80}"
            raise ValueError(
                f"metadata field {self.name}.{key} must be a number >= 0, it is {given}"
            )
        return float(value)
