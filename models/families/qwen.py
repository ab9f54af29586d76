"""Qwen2, Qwen2.5 (a Qwen2) and Qwen3.

Qwen2 always has biases on q, k and v and none on the output; Qwen3 has norms over q and k per head
instead, and may have biases everywhere. In both the last layers may have a sliding window.
"""

from models.config import LayerSpec, MlpSpec, ModelConfig
from models.families import names
from models.families.decoder import Sizes, layer_windows, read_sizes, rms_decoder
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

_QWEN2_SIZES = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_QWEN3_SIZES = _QWEN2_SIZES | {"head_dim": 128}


def qwen2_config(fields: Fields) -> ModelConfig:
    # `attention_bias` says nothing here: the reference has the three biases whatever it holds.
    reads = ("attention_bias", "sliding_window", "layer_types")
    refuse_unsupported(fields, "qwen2", reads)
    sizes = read_sizes(fields, _QWEN2_SIZES)
    return _config("qwen2", fields, sizes, qkv_bias=True)


def qwen3_config(fields: Fields) -> ModelConfig:
    refuse_unsupported(fields, "qwen3", ("attention_bias", "sliding_window", "layer_types"))
    sizes = read_sizes(fields, _QWEN3_SIZES)
    has_bias = flag(fields, "attention_bias", False)
    return _config("qwen3", fields, sizes, qk_norm="head", qkv_bias=has_bias, out_bias=has_bias)


def _config(family: str, fields: Fields, sizes: Sizes, **attention) -> ModelConfig:
    window, first = None, integer(fields, "max_window_layers", 28, minimum=0)
    if flag(fields, "use_sliding_window", False):
        window = nullable_integer(fields, "sliding_window", 4096)
    types = [
        "full_attention" if window is None or i < first else "sliding_attention"
        for i in range(sizes.num_layers)
    ]
    rope = read_rope(fields, sizes.head_dim, sizes.max_position)
    mlp = MlpSpec(sizes.mlp_width, activation=activation(fields, "hidden_act", "silu"))
    layers = [
        LayerSpec(mixer=sizes.attention(rope=rope, window=w, **attention), mlp=mlp)
        for w in layer_windows(fields, types, window)
    ]
    return rms_decoder(family, fields, sizes, layers)


def _family(name: str, config_from_hf) -> Family:
    return Family(
        name=name,
        model_types=(name,),
        gguf_archs=(name,),
        config_from_hf=config_from_hf,
        config_from_gguf=config_from_gguf,
        hf_sources=names.llama_sources,
        gguf_sources=gguf_sources,
        hf_ignored=names.IGNORED,
        gguf_ignored=GGUF_IGNORED,
    )


QWEN2 = _family("qwen2", qwen2_config)
QWEN3 = _family("qwen3", qwen3_config)
