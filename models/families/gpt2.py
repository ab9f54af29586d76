"""GPT-2: multi-head attention, LayerNorm, learned positions, biases everywhere, a plain MLP.

Its files store weights input axis first and q, k, v as one matrix; the names may lack their leading
"transformer.".
"""

import re

from models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, NormSpec
from models.families import names
from models.families.family import Family, Source, Sources
from models.families.fields import (
    Fields,
    activation,
    flag,
    integer,
    number,
    refuse_unsupported,
    token_ids,
)
from models.families.gguf import GGUF_IGNORED, config_from_gguf
from models.families.gguf_archs import gguf_sources


def gpt2_config(fields: Fields) -> ModelConfig:
    refuse_unsupported(fields, "gpt2")
    width, num_heads = integer(fields, "n_embd", 768), integer(fields, "n_head", 12)
    if width % num_heads:
        raise ValueError(f"config.json: n_embd {width} is not a multiple of n_head {num_heads}")
    head_dim = width // num_heads
    layer = LayerSpec(
        mixer=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if flag(fields, "scale_attn_weights", True) else 1.0,
            qkv_bias=True,
            out_bias=True,
        ),
        mlp=MlpSpec(
            width=integer(fields, "n_inner", 4 * width),
            kind="plain",
            activation=activation(fields, "activation_function", "gelu_new"),
            bias=True,
        ),
    )
    bos_ids = token_ids(fields, "bos_token_id", 50256)
    return ModelConfig(
        family="gpt2",
        vocab_size=integer(fields, "vocab_size", 50257),
        width=width,
        layers=(layer,) * integer(fields, "n_layer", 12),
        norm=NormSpec("layer", number(fields, "layer_norm_epsilon", 1e-5), bias=True),
        max_position=integer(fields, "n_positions", 1024),
        tied_embeddings=flag(fields, "tie_word_embeddings", True),
        learned_positions=True,
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=token_ids(fields, "eos_token_id", 50256),
    )


def gpt2_sources(config: ModelConfig) -> Sources:
    D = config.width

    def fused(part: int) -> dict[str, tuple[int, int]]:
        return {"rows": (part * D, (part + 1) * D)}

    top = {
        "embed_VD": "transformer.wte.weight",
        "positions_ED": "transformer.wpe.weight",
        "final_norm.scale": "transformer.ln_f.weight",
        "final_norm.bias": "transformer.ln_f.bias",
        "unembed_VD": "lm_head.weight",
    }
    layer = {
        "mixer.wq_NHD": Source("attn.c_attn.weight", transpose=True, **fused(0)),
        "mixer.wk_KHD": Source("attn.c_attn.weight", transpose=True, **fused(1)),
        "mixer.wv_KHD": Source("attn.c_attn.weight", transpose=True, **fused(2)),
        "mixer.wo_DA": Source("attn.c_proj.weight", transpose=True),
        "mixer.bq_NH": Source("attn.c_attn.bias", **fused(0)),
        "mixer.bk_KH": Source("attn.c_attn.bias", **fused(1)),
        "mixer.bv_KH": Source("attn.c_attn.bias", **fused(2)),
        "mixer.bo_D": "attn.c_proj.bias",
        "mlp.w_up_FD": Source("mlp.c_fc.weight", transpose=True),
        "mlp.b_up_F": "mlp.c_fc.bias",
        "mlp.w_down_DF": Source("mlp.c_proj.weight", transpose=True),
        "mlp.b_down_D": "mlp.c_proj.bias",
        "mixer_norm.scale": "ln_1.weight",
        "mixer_norm.bias": "ln_1.bias",
        "mlp_norm.scale": "ln_2.weight",
        "mlp_norm.bias": "ln_2.bias",
    }
    return names.sources(config, top, layer, layer_prefix="transformer.h.")


GPT2 = Family(
    name="gpt2",
    model_types=("gpt2",),
    gguf_archs=("gpt2",),
    config_from_hf=gpt2_config,
    config_from_gguf=config_from_gguf,
    hf_sources=gpt2_sources,
    gguf_sources=gguf_sources,
    # The causal masks that older files hold as tensors, and a second copy of tied embeddings.
    hf_ignored=(
        re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"),
        re.compile(r"lm_head\.weight"),
    ),
    gguf_ignored=GGUF_IGNORED,
    hf_prefix="transformer.",
)
