"""Phi-3: a Llama whose q, k, v and whose gate, up are stored as one matrix each, with longrope
and, in later models, rotation of a part of each head."""

from models.config import LayerSpec, MlpSpec, ModelConfig
from models.families import names
from models.families.decoder import read_sizes, rms_decoder
from models.families.family import Family, Source, Sources
from models.families.fields import Fields, activation, nullable_integer, refuse_unsupported
from models.families.gguf import GGUF_IGNORED, config_from_gguf
from models.families.gguf_archs import gguf_sources
from models.families.rope_fields import read_rope

_SIZES = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}
# Files of the first Phi-3 models call longrope by older names.
_ROPE_ALIASES = {"su": "longrope", "yarn": "longrope"}


def phi3_config(fields: Fields) -> ModelConfig:
    refuse_unsupported(fields, "phi3", reads=("partial_rotary_factor", "sliding_window"))
    sizes = read_sizes(fields, _SIZES)
    fields = {"original_max_position_embeddings": 4096, **fields}
    rope = read_rope(
        fields, sizes.head_dim, sizes.max_position, partial=True, aliases=_ROPE_ALIASES
    )
    if rope.kind not in ("default", "longrope"):
        raise ValueError(f"config.json: rope kind {rope.kind!r} is not supported for phi3 models")
    layer = LayerSpec(
        mixer=sizes.attention(rope=rope, window=nullable_integer(fields, "sliding_window", None)),
        mlp=MlpSpec(sizes.mlp_width, activation=activation(fields, "hidden_act", "silu")),
    )
    layers = [layer] * sizes.num_layers
    return rms_decoder("phi3", fields, sizes, layers, eps=1e-5, bos=1, eos=32000)


def phi3_sources(config: ModelConfig) -> Sources:
    mixer, mlp_width = config.layers[0].mixer, config.layers[0].mlp.width
    q_rows = mixer.num_heads * mixer.head_dim
    kv_rows = mixer.num_kv_heads * mixer.head_dim
    qkv, gate_up = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"
    layer = {
        "mixer.wq_NHD": Source(qkv, rows=(0, q_rows)),
        "mixer.wk_KHD": Source(qkv, rows=(q_rows, q_rows + kv_rows)),
        "mixer.wv_KHD": Source(qkv, rows=(q_rows + kv_rows, q_rows + 2 * kv_rows)),
        "mixer.wo_DA": "self_attn.o_proj.weight",
        "mlp.w_gate_FD": Source(gate_up, rows=(0, mlp_width)),
        "mlp.w_up_FD": Source(gate_up, rows=(mlp_width, 2 * mlp_width)),
        "mlp.w_down_DF": "mlp.down_proj.weight",
        **names.PRE_NORMS,
    }
    return names.sources(config, names.TOP, layer)


PHI3 = Family(
    name="phi3",
    model_types=("phi3",),
    gguf_archs=("phi3",),
    config_from_hf=phi3_config,
    config_from_gguf=config_from_gguf,
    hf_sources=phi3_sources,
    gguf_sources=gguf_sources,
    hf_ignored=names.IGNORED,
    gguf_ignored=GGUF_IGNORED,
)
