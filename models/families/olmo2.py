"""OLMo 2: norms after each block only, and norms over all of q and all of k, not per head."""

from models.config import LayerSpec, MlpSpec, ModelConfig
from models.families import names
from models.families.decoder import read_sizes, rms_decoder
from models.families.family import Family, Sources
from models.families.fields import Fields, activation, flag, refuse_unsupported
from models.families.gguf import GGUF_IGNORED, config_from_gguf
from models.families.gguf_archs import gguf_sources
from models.families.rope_fields import read_rope

_SIZES = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}


def olmo2_config(fields: Fields) -> ModelConfig:
    refuse_unsupported(fields, "olmo2", reads=("attention_bias",))
    sizes = read_sizes(fields, _SIZES)
    has_bias = flag(fields, "attention_bias", False)
    layer = LayerSpec(
        mixer=sizes.attention(
            rope=read_rope(fields, sizes.head_dim, sizes.max_position),
            qk_norm="full",
            qkv_bias=has_bias,
            out_bias=has_bias,
        ),
        mlp=MlpSpec(sizes.mlp_width, activation=activation(fields, "hidden_act", "silu")),
        norms="post",
    )
    return rms_decoder("olmo2", fields, sizes, [layer] * sizes.num_layers, eps=1e-5, eos=50279)


def olmo2_sources(config: ModelConfig) -> Sources:
    layer = {**names.ATTENTION, **names.MLP, **names.POST_NORMS}
    return names.sources(config, names.TOP, layer)


OLMO2 = Family(
    name="olmo2",
    model_types=("olmo2",),
    gguf_archs=("olmo2",),
    config_from_hf=olmo2_config,
    config_from_gguf=config_from_gguf,
    hf_sources=olmo2_sources,
    gguf_sources=gguf_sources,
    hf_ignored=names.IGNORED,
    gguf_ignored=GGUF_IGNORED,
)
