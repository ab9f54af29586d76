"""Gemma 2 and Gemma 3 (text).

A norm before and after each block, scales stored as offsets from one; embeddings times sqrt(width);
scores over sqrt(query_pre_attn_scalar); local layers with a window between global ones. Gemma 2
soft-caps scores and logits; Gemma 3 has norms over q and k and its own theta for local layers.
"""

from collections.abc import Mapping
from dataclasses import replace

from models.config import LayerSpec, MlpSpec, ModelConfig, RopeSpec
from models.families import names
from models.families.decoder import Sizes, layer_windows, read_sizes, rms_decoder
from models.families.family import Family, Sources
from models.families.fields import (
    Fields,
    activation,
    flag,
    integer,
    nullable_integer,
    nullable_number,
    number,
    refuse_unsupported,
)
from models.families.gguf import GGUF_IGNORED, config_from_gguf
from models.families.gguf_archs import gguf_sources
from models.families.rope_fields import read_rope, rope_dict, rope_spec

_GEMMA2_SIZES = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
}
_GEMMA3_SIZES = _GEMMA2_SIZES | {"vocab_size": 262208, "max_position_embeddings": 131072}


def gemma2_config(fields: Fields) -> ModelConfig:
    reads = (
        "attention_bias",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "layer_types",
        "sliding_window",
    )
    refuse_unsupported(fields, "gemma2", reads)
    sizes = read_sizes(fields, _GEMMA2_SIZES)
    rope = read_rope(fields, sizes.head_dim, sizes.max_position)
    return _config(
        "gemma2",
        fields,
        sizes,
        period=2,
        global_rope=rope,
        local_rope=rope,
        final_softcap=nullable_number(fields, "final_logit_softcapping", 30.0),
        softcap=nullable_number(fields, "attn_logit_softcapping", 50.0),
    )


def gemma3_config(fields: Fields) -> ModelConfig:
    # The reference declares a soft-cap on scores for Gemma 3 but never applies it: refused.
    reads = ("attention_bias", "final_logit_softcapping", "layer_types", "sliding_window")
    refuse_unsupported(fields, "gemma3", reads)
    sizes = read_sizes(fields, _GEMMA3_SIZES)
    global_rope, local_rope = _gemma3_ropes(fields, sizes)
    return _config(
        "gemma3",
        fields,
        sizes,
        period=integer(fields, "sliding_window_pattern", 6),
        global_rope=global_rope,
        local_rope=local_rope,
        final_softcap=nullable_number(fields, "final_logit_softcapping", None),
        qk_norm="head",
    )


def _gemma3_ropes(fields: Fields, sizes: Sizes) -> tuple[RopeSpec, RopeSpec]:
    """(global, local). `rope_scaling` is for global layers alone; `rope_parameters` names both."""
    thetas = {
        "full_attention": number(fields, "rope_theta", 1_000_000.0),
        "sliding_attention": number(fields, "rope_local_base_freq", 10_000.0),
    }
    given = rope_dict(fields)
    if not fields.get("rope_parameters"):
        given = {"full_attention": given}
    unknown = sorted(set(given) - set(thetas))
    if unknown:
        raise ValueError(
            f"config.json: rope_parameters of a gemma3 model must hold {' and '.join(thetas)}, "
            f"got {', '.join(unknown)}"
        )

    def spec(kind: str) -> RopeSpec:
        own = given.get(kind) or {}
        if not isinstance(own, Mapping):
            raise ValueError(f"config.json: rope_parameters of {kind} must be a dict, got {own!r}")
        rope = {"rope_theta": thetas[kind], **own}
        return rope_spec(rope, sizes.head_dim, sizes.max_position)

    return spec("full_attention"), spec("sliding_attention")


def _config(
    family: str,
    fields: Fields,
    sizes: Sizes,
    *,
    period: int,
    global_rope: RopeSpec,
    local_rope: RopeSpec,
    final_softcap: float | None,
    **attention,
) -> ModelConfig:
    """Without `layer_types`, every `period`-th layer is global."""
    window = nullable_integer(fields, "sliding_window", 4096)
    types = [
        "sliding_attention" if (i + 1) % period else "full_attention"
        for i in range(sizes.num_layers)
    ]
    has_bias = flag(fields, "attention_bias", False)
    mixer = sizes.attention(
        scale=number(fields, "query_pre_attn_scalar", 256) ** -0.5,
        qkv_bias=has_bias,
        out_bias=has_bias,
        **attention,
    )
    mlp = MlpSpec(
        sizes.mlp_width, activation=activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    )
    layers = [
        LayerSpec(
            mixer=replace(mixer, window=w, rope=global_rope if w is None else local_rope),
            mlp=mlp,
            norms="sandwich",
        )
        for w in layer_windows(fields, types, window)
    ]
    return rms_decoder(
        family,
        fields,
        sizes,
        layers,
        tied=True,
        bos=2,
        eos=1,
        embedding_scale=sizes.width**0.5,
        final_softcap=final_softcap,
    )


def gemma_sources(config: ModelConfig) -> Sources:
    layer = {**names.ATTENTION, **names.MLP, **names.SANDWICH_NORMS}
    return {
        path: replace(source, add=1.0) if path.endswith("norm.scale") else source
        for path, source in names.sources(config, names.TOP, layer).items()
    }


def _family(name: str, model_type: str, config_from_hf) -> Family:
    return Family(
        name=name,
        model_types=(model_type,),
        gguf_archs=(name,),
        config_from_hf=config_from_hf,
        config_from_gguf=config_from_gguf,
        hf_sources=gemma_sources,
        gguf_sources=gguf_sources,
        hf_ignored=names.IGNORED,
        gguf_ignored=GGUF_IGNORED,
    )


GEMMA2 = _family("gemma2", "gemma2", gemma2_config)
GEMMA3 = _family("gemma3", "gemma3_text", gemma3_config)
