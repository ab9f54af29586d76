"""Llama 2 and 3, SmolLM2 (a Llama), Mistral and SmolLM3: one layout, few differences.

Llama may have biases everywhere and any rotary scaling; Mistral adds a sliding window to every
layer; SmolLM3 leaves the rotation out of every fourth layer.
"""

from models.config import LayerSpec, MlpSpec, ModelConfig
from models.families import names
from models.families.decoder import layer_windows, read_sizes, rms_decoder
from models.families.family import Family
from models.families.fields import (
    Fields,
    activation,
    flag,
    integer,
    nullable_integer,
    refuse_unsupported,
)
from models.families.gguf import GGUF_IGNORED, config_from_gguf
from models.families.gguf_archs import gguf_sources
from models.families.rope_fields import read_rope

_LLAMA_SIZES = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_MISTRAL_SIZES = _LLAMA_SIZES | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096 * 32,
}
_SMOLLM3_SIZES = _LLAMA_SIZES | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
}


def llama_config(fields: Fields) -> ModelConfig:
    refuse_unsupported(fields, "llama", reads=("attention_bias", "mlp_bias"))
    sizes = read_sizes(fields, _LLAMA_SIZES)
    has_bias = flag(fields, "attention_bias", False)
    layer = LayerSpec(
        mixer=sizes.attention(
            rope=read_rope(fields, sizes.head_dim, sizes.max_position),
            qkv_bias=has_bias,
            out_bias=has_bias,
        ),
        mlp=MlpSpec(
            width=sizes.mlp_width,
            activation=activation(fields, "hidden_act", "silu"),
            bias=flag(fields, "mlp_bias", False),
        ),
    )
    return rms_decoder("llama", fields, sizes, [layer] * sizes.num_layers, bos=1, eos=2)


def mistral_config(fields: Fields) -> ModelConfig:
    refuse_unsupported(fields, "mistral", reads=("sliding_window",))
    sizes = read_sizes(fields, _MISTRAL_SIZES)
    layer = LayerSpec(
        mixer=sizes.attention(
            rope=read_rope(fields, sizes.head_dim, sizes.max_position),
            window=nullable_integer(fields, "sliding_window", 4096),
        ),
        mlp=MlpSpec(sizes.mlp_width, activation=activation(fields, "hidden_act", "silu")),
    )
    return rms_decoder("mistral", fields, sizes, [layer] * sizes.num_layers, bos=1, eos=2)


def smollm3_config(fields: Fields) -> ModelConfig:
    reads = ("attention_bias", "mlp_bias", "no_rope_layers", "sliding_window", "layer_types")
    refuse_unsupported(fields, "smollm3", reads)
    sizes = read_sizes(fields, _SMOLLM3_SIZES)
    has_bias = flag(fields, "attention_bias", False)
    window = None
    if flag(fields, "use_sliding_window", False):
        window = nullable_integer(fields, "sliding_window", None)
    rotates = _rotating_layers(fields, sizes.num_layers)
    types = ["full_attention" if window is None or r else "sliding_attention" for r in rotates]
    windows = layer_windows(fields, types, window)
    rope = read_rope(fields, sizes.head_dim, sizes.max_position, default_theta=2_000_000.0)
    mlp = MlpSpec(
        width=sizes.mlp_width,
        activation=activation(fields, "hidden_act", "silu"),
        bias=flag(fields, "mlp_bias", False),
    )
    layers = [
        LayerSpec(
            mixer=sizes.attention(
                rope=rope if has_rope else None,
                window=layer_window,
                qkv_bias=has_bias,
                out_bias=has_bias,
            ),
            mlp=mlp,
        )
        for has_rope, layer_window in zip(rotates, windows, strict=True)
    ]
    return rms_decoder("smollm3", fields, sizes, layers, tied=True, bos=128000, eos=128001)


def _rotating_layers(fields: Fields, num_layers: int) -> list[bool]:
    """`no_rope_layers` holds 1 for a layer that rotates and 0 for one that does not."""
    listed = fields.get("no_rope_layers")
    if listed is None:
        interval = integer(fields, "no_rope_layer_interval", 4)
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if len(listed) < num_layers or not set(listed) <= {0, 1}:
        raise ValueError(
            f"config.json: no_rope_layers must hold 0 or 1 for {num_layers} layers, got {listed}"
        )
    return [bool(value) for value in listed[:num_layers]]


def _family(name: str, config_from_hf, gguf_archs: tuple[str, ...]) -> Family:
    return Family(
        name=name,
        model_types=(name,),
        gguf_archs=gguf_archs,
        config_from_hf=config_from_hf,
        config_from_gguf=config_from_gguf,
        hf_sources=names.llama_sources,
        gguf_sources=gguf_sources,
        hf_ignored=names.IGNORED,
        gguf_ignored=GGUF_IGNORED,
    )


LLAMA = _family("llama", llama_config, ("llama",))
# GGUF files call Mistral a llama.
MISTRAL = _family("mistral", mistral_config, ())
SMOLLM3 = _family("smollm3", smollm3_config, ("smollm3",))
